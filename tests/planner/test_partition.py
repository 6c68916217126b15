"""Cuts and placements: equal to trying every plan, ties broken by rule, bad problems refused."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_problems import SECONDS, PlanningProblem, chains, crossing_seconds, problems

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology, equal_devices
from pipec.planner.chain import CostModel, OperatorChain, Transfer
from pipec.planner.partition import TOLERANCE, PartitionStage, partition_chain

MOST_BLOCKS = 12
UNIT_LINK = LinkModel(1.0, 0.0)
LINKS = st.builds(LinkModel, st.sampled_from([0.5, 2.0]), st.sampled_from([0.0, 0.5]))

Cut = tuple[float, float, tuple[int, ...]]
"""The seconds of the slowest stage and of all communication, and where the stages begin."""


def line(seconds: Sequence[float], sizes: Sequence[float]) -> OperatorChain:
    """Operators with a byte of parameters each. Each reads so many bytes of the one before."""
    count = len(seconds)
    transfers = [Transfer(k, k + 1, size, 0) for k, size in enumerate(sizes)]
    none = [0.0] * count
    return OperatorChain([f"op{k}" for k in range(count)], seconds, [1.0] * count, none, none, transfers)


def cut(
    chain: OperatorChain, num_stages: int, tolerance: float = 0.0, link: LinkModel = UNIT_LINK
) -> tuple[PartitionStage, ...]:
    return partition_chain(chain, equal_devices(num_stages, link), CostModel(), 1, tolerance)


def all_cuts(chain: OperatorChain, num_stages: int, link: LinkModel) -> Iterator[Cut]:
    """Every choice of stages on equal devices."""
    for cuts in combinations(range(1, len(chain.seconds)), num_stages - 1):
        ends = (0, *cuts, len(chain.seconds))
        crossings = [0.0, *(crossing_seconds(chain, each, link) for each in cuts)]
        stages = zip(pairwise(ends), crossings, strict=True)
        slowest = max(max(sum(chain.seconds[i:j]), crossing) for (i, j), crossing in stages)
        yield slowest, sum(crossings), cuts


def cuts_of(stages: Sequence[PartitionStage]) -> tuple[int, ...]:
    return tuple(stage.blocks[0] for stage in stages[1:])


def slowest(stages: Sequence[PartitionStage]) -> float:
    return max(stage.seconds for stage in stages)


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(chains(MOST_BLOCKS), LINKS, st.sampled_from([0.0, 0.125, 0.5]))
def test_equals_brute_force_for_every_number_of_stages(
    chain: OperatorChain, link: LinkModel, tolerance: float
) -> None:
    """Small whole numbers, so that ties abound and both sides add exactly: cuts must match too."""
    for num_stages in range(1, len(chain.seconds) + 1):
        found = cut(chain, num_stages, tolerance, link)
        every = list(all_cuts(chain, num_stages, link))
        within = [plan for plan in every if plan[0] <= min(every)[0] * (1 + tolerance)]
        seconds, communication, cuts = min(within, key=lambda plan: (plan[1], plan[0], plan[2]))
        assert (slowest(found), cuts_of(found)) == (seconds, cuts)
        assert sum(stage.communication_seconds for stage in found) == communication
        assert [stage.devices for stage in found] == [(k,) for k in range(num_stages)]


@settings(max_examples=50, deadline=None)
@given(st.lists(SECONDS, min_size=4, max_size=12), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_given_numbers_of_replicas_share_the_work_of_their_stages(
    times: list[float], numbers: list[int]
) -> None:
    chain = replace(line(times, []), parameter_bytes=[0.0] * len(times))
    devices = equal_devices(sum(numbers), UNIT_LINK)
    found = partition_chain(chain, devices, CostModel(), numbers, tolerance=0.0)
    assert [stage.replicas for stage in found] == numbers
    best = min(
        max(sum(times[i:j]) / number for (i, j), number in zip(pairwise(ends), numbers, strict=True))
        for cuts in combinations(range(1, len(times)), len(numbers) - 1)
        for ends in [(0, *cuts, len(times))]
    )
    assert slowest(found) == pytest.approx(best)


def test_costs_that_are_not_known_so_well_do_not_decide() -> None:
    """A cut through a wide value is not worth half a percent."""
    assert cuts_of(cut(line([100.5, 1, 99], [1, 9]), 2)) == (1,)
    assert cuts_of(cut(line([99, 1, 100.5], [1, 9]), 2)) == (2,)
    assert cuts_of(cut(line([99, 1, 100.5], [1, 9]), 2, TOLERANCE)) == (1,)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "cuts"), [(5, 2, (2,)), (10, 3, (2, 6)), (6, 4, (1, 2, 4))]
)
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7])
def test_equal_layers_tie_in_spite_of_rounding(
    seconds: float, num_layers: int, num_stages: int, cuts: tuple[int, ...]
) -> None:
    """Added in floating point, two of these layers may take longer than two others."""
    assert cuts_of(cut(line([seconds] * num_layers, [0] * (num_layers - 1)), num_stages)) == cuts


def test_no_operators_are_refused() -> None:
    with pytest.raises(PlanError, match="no operators"):
        cut(line([], []), 4)


# replicas, groups of devices, and limits of memory

FLAT = st.sampled_from([(4,), (3,), (2,), (1,)])
NESTED = st.sampled_from([(2, 2), (1, 4), (3, 1), (2, 1), (3, 2), (2, 2, 2)])


def planned(problem: PlanningProblem, tolerance: float = 0.0) -> tuple[PartitionStage, ...]:
    return partition_chain(problem.chain, problem.topology, problem.model, problem.max_replicas, tolerance)


def seconds(problem: PlanningProblem) -> float:
    """Infinite if nothing fits in memory, or blocks are too few."""
    try:
        return slowest(planned(problem))
    except PlanError:
        return math.inf


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FLAT, NESTED], ids=["one level", "several levels"])
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_plan_is_as_fast_as_the_best_of_all(
    sizes: st.SearchStrategy[tuple[int, ...]], data: st.DataObject
) -> None:
    problem = data.draw(problems(MOST_BLOCKS, sizes))
    assert seconds(problem) == pytest.approx(problem.best_seconds(), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(MOST_BLOCKS, FLAT | NESTED))
def test_every_block_and_every_device_is_used_once(problem: PlanningProblem) -> None:
    try:
        stages = planned(problem, tolerance=0.01)
    except PlanError:
        return
    assert [block for stage in stages for block in stage.blocks] == [*range(len(problem.chain.names))]
    devices = [device for stage in stages for device in stage.devices]
    assert sorted(devices) == [*range(len(problem.devices))]
    for stage in stages:
        assert stage.memory_bytes <= min(problem.devices[device].memory_bytes for device in stage.devices)


@settings(max_examples=15, deadline=None)
@given(problems(MOST_BLOCKS, FLAT | NESTED))
def test_a_chain_with_too_many_places_to_cut_gets_a_plan_that_is_not_better(problem: PlanningProblem) -> None:
    best = seconds(problem)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FEW_POSITIONS", "MOST_POSITIONS"):
            patch.setattr(f"pipec.planner.partition.{name}", 6)
        found = seconds(problem)
    assert best <= found * (1 + 1e-9)


def test_a_long_chain_of_equal_layers_is_cut_between_layers() -> None:
    """Layers of 10 blocks; inside a layer, ten times as much crosses."""
    sizes = [0.1 if k % 10 == 9 else 1.0 for k in range(3200)]
    long = line([1.0] * 3200, sizes[:-1])
    for most in (1, 16):
        stages = partition_chain(long, Topology((Device(),) * 16, (Level(16, 1.0),)), CostModel(), most)
        assert [(stage.blocks, stage.replicas) for stage in stages] == [
            (range(first, first + 200), 1) for first in range(0, 3200, 200)
        ]


def test_a_group_that_is_replicated_holds_one_pipeline() -> None:
    """Devices of a host hold different weights: neither has memory for both."""
    topology = Topology((Device(memory_bytes=3.0),) * 4, (Level(2, 100.0), Level(2, 1.0)))
    model = replace(line([1.0, 1.0], [10.0]), resident_bytes=[2.0, 2.0])
    stages = partition_chain(model, topology, CostModel(step_microbatches=100), 2)
    assert [(stage.blocks, stage.devices) for stage in stages] == [(range(1), (0, 2)), (range(1, 2), (1, 3))]


def test_a_plan_that_may_be_missed_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of unequal devices fit in memory only if they are cut where the search does not look."""
    for name in ("_FEW_POSITIONS", "MOST_POSITIONS"):
        monkeypatch.setattr(f"pipec.planner.partition.{name}", 3)
    heavy = replace(line([1.0] * 6, [9.0, 1.0, 1.0, 1.0, 9.0]), resident_bytes=[1.0] * 6)
    topology = Topology((Device(memory_bytes=1.0), Device(memory_bytes=5.0)), (Level(2, 1.0),))
    with pytest.raises(InfeasibleError, match="of the plans that could be searched, none fits in the memory"):
        partition_chain(heavy, topology, CostModel(), replicas=1)
