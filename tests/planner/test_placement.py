"""Plans: equal to trying every plan, monotone in devices, bandwidth and memory, bad problems refused."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_problems import PlanningProblem, problems

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Device, Level, Topology, uniform_topology
from pipec.planner.chain import CostModel, OperatorChain, Transfer
from pipec.planner.partition import PartitionStage, partition_chain

FLAT = st.sampled_from([(4,), (3,), (2,), (1,)])
NESTED = st.sampled_from([(2, 2), (1, 4), (3, 1), (2, 1), (3, 2), (2, 2, 2)])
MOST_BLOCKS = 12


def planned(problem: PlanningProblem, tolerance: float = 0.0) -> tuple[PartitionStage, ...]:
    return partition_chain(problem.chain, problem.topology, problem.model, problem.max_replicas, tolerance)


def slowest(stages: Sequence[PartitionStage]) -> float:
    return max(stage.seconds for stage in stages)


def seconds(problem: PlanningProblem) -> float:
    """Infinite if nothing fits in memory, or blocks are too few."""
    try:
        return slowest(planned(problem))
    except PlanError:
        return math.inf


def chain(num_blocks: int, size: float = 1.0) -> OperatorChain:
    """Equal operators of a second and a byte of parameters, each reading the one before."""
    one, none = [1.0] * num_blocks, [0.0] * num_blocks
    names = [f"op{k}" for k in range(num_blocks)]
    transfers = [Transfer(k, k + 1, size, 0) for k in range(num_blocks - 1)]
    return OperatorChain(names, one, one, none, none, transfers)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problems(MOST_BLOCKS, FLAT))
def test_a_plan_on_one_level_is_as_fast_as_the_best_of_all(problem: PlanningProblem) -> None:
    assert seconds(problem) == pytest.approx(problem.best_seconds(), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problems(MOST_BLOCKS, NESTED))
def test_a_plan_on_several_levels_is_as_fast_as_the_best_of_all(problem: PlanningProblem) -> None:
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
    transfers = [Transfer(k, k + 1, size, 0) for k, size in enumerate(sizes[:-1])]
    long = replace(chain(3200), transfers=transfers)
    for most in (1, 16):
        stages = partition_chain(long, uniform_topology([16], [1.0]), CostModel(), most)
        assert [(stage.blocks, stage.replicas) for stage in stages] == [
            (range(first, first + 200), 1) for first in range(0, 3200, 200)
        ]


def test_a_stage_with_many_weights_gets_one_device() -> None:
    """What VGG is in large: 15 devices for the convolutions, one for the weights (PipeDream, Table 1)."""
    model = replace(chain(16), seconds=[1.0] * 15 + [1.0], parameter_bytes=[0.0] * 15 + [1e3])
    stages = partition_chain(model, uniform_topology([16], [10.0]), CostModel(), 16)
    assert [(stage.blocks, stage.replicas) for stage in stages] == [(range(15), 15), (range(15, 16), 1)]


def test_a_group_that_is_replicated_holds_one_pipeline() -> None:
    """Devices of a host hold different weights: neither has memory for both."""
    topology = Topology((Device(memory_bytes=3.0),) * 4, (Level(2, 100.0), Level(2, 1.0)))
    model = replace(chain(2, size=10.0), resident_bytes=[2.0, 2.0])
    stages = partition_chain(model, topology, CostModel(step_microbatches=100), 2)
    assert [(stage.blocks, stage.devices) for stage in stages] == [(range(1), (0, 2)), (range(1, 2), (1, 3))]


def test_what_does_not_fit_is_explained_stage_by_stage() -> None:
    heavy = replace(chain(4), resident_bytes=[6.0] * 4, saved_bytes=[1.0] * 4)
    topology = uniform_topology([2], [math.inf], Device(memory_bytes=10))
    with pytest.raises(InfeasibleError, match="no plan fits in the memory of the devices") as caught:
        partition_chain(heavy, topology, CostModel(), replicas=1)
    bytes_of = "12 bytes resident + 2 saved for each of"
    assert f"stage 0: {bytes_of} 2 microbatches in flight = 16 of 10, 6 too many" in str(caught.value)
    assert f"stage 1: {bytes_of} 1 microbatches in flight = 14 of 10, 4 too many" in str(caught.value)


def test_a_plan_that_may_be_missed_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of unequal devices fit in memory only if they are cut where the search does not look."""
    for name in ("_FEW_POSITIONS", "MOST_POSITIONS"):
        monkeypatch.setattr(f"pipec.planner.partition.{name}", 3)
    sizes = [9.0, 1.0, 1.0, 1.0, 9.0]
    heavy = replace(
        chain(6),
        resident_bytes=[1.0] * 6,
        transfers=[Transfer(k, k + 1, size, 0) for k, size in enumerate(sizes)],
    )
    topology = Topology((Device(memory_bytes=1.0), Device(memory_bytes=5.0)), (Level(2, 1.0),))
    with pytest.raises(InfeasibleError, match="of the plans that could be searched, none fits in the memory"):
        partition_chain(heavy, topology, CostModel(), replicas=1)
