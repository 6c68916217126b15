"""The partition: equal to brute force, ties broken by rule, malformed problems refused."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import PlanError
from pipec.hardware.topology import Device, Level, Topology
from pipec.planner.cost_model import PIPEC
from pipec.planner.partition import Partition, PartitionProblem, Transfer, partition
from pipec.planner.placement import place
from pipec.planner.workload import Workload


def chain(seconds: Sequence[float], num_stages: int, size: int = 0, **options: object) -> PartitionProblem:
    """Each operator reads the one before; one byte takes one second."""
    transfers = [Transfer(k, (k + 1,), size, 0) for k in range(len(seconds) - 1)]
    problem = PartitionProblem(seconds, transfers, num_stages, bytes_per_second=1.0)
    return replace(problem, **options)


def stage_seconds(problem: PartitionProblem, begin: int, end: int) -> tuple[float, float]:
    """Seconds, and of these communication, of the stage [begin, end), word for word from the model."""
    communication = 0.0
    for transfer in problem.transfers:
        readers = set(transfer.consumers)
        receives = transfer.producer < begin and any(begin <= reader < end for reader in readers)
        sends = begin <= transfer.producer < end and any(reader >= end for reader in readers)
        sizes = [size for size in (transfer.forward_bytes, transfer.backward_bytes) if size]
        seconds = sum(problem.latency_seconds + size / problem.bytes_per_second for size in sizes)
        communication += seconds * (receives + sends)
    return sum(problem.seconds[begin:end]) + communication, communication


def all_partitions(problem: PartitionProblem) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """(bottleneck, communication, cuts) of every choice of allowed cuts."""
    num_operators = len(problem.seconds)
    cost = {
        (i, j): stage_seconds(problem, i, j)
        for i in range(num_operators)
        for j in range(i + 1, num_operators + 1)
    }
    allowed = [k for k in range(1, num_operators) if k not in problem.forbidden_cuts]
    for cuts in combinations(allowed, problem.num_stages - 1):
        stages = [cost[stage] for stage in pairwise((0, *cuts, num_operators))]
        yield max(s for s, _ in stages), sum(c for _, c in stages), cuts


@st.composite
def problems(draw: st.DrawFn, times: st.SearchStrategy[float]) -> PartitionProblem:
    """Up to 12 operators with skips and values read several times; ``num_stages`` is 1, to be replaced."""
    num_operators = draw(st.integers(1, 12))
    transfers = []
    for producer in draw(st.lists(st.integers(0, 10), max_size=14)):
        if producer >= num_operators - 1:
            continue
        consumers = draw(st.lists(st.integers(producer + 1, num_operators - 1), max_size=3))
        forward, backward = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
        transfers.append(Transfer(producer, tuple(consumers), forward, backward))
    return PartitionProblem(
        seconds=draw(st.lists(times, min_size=num_operators, max_size=num_operators)),
        transfers=transfers,
        num_stages=1,
        bytes_per_second=draw(st.sampled_from([0.5, 2.0, math.inf])),
        latency_seconds=draw(st.sampled_from([0.0, 0.5])),
        forbidden_cuts=draw(st.frozensets(st.integers(1, 12), max_size=4)),
    )


def num_blocks(problem: PartitionProblem) -> int:
    return 1 + len(set(range(1, len(problem.seconds))) - problem.forbidden_cuts)


@settings(max_examples=150, deadline=None)
@given(problems(st.integers(0, 5).map(float)))
def test_equals_brute_force_for_every_number_of_stages(problem: PartitionProblem) -> None:
    """Small whole numbers, so that ties abound and both sides add exactly: cuts must match too."""
    for num_stages in range(1, num_blocks(problem) + 1):
        staged = replace(problem, num_stages=num_stages)
        found = partition(staged)
        best = min(all_partitions(staged))
        assert (found.bottleneck_seconds, sum(found.communication_seconds), found.cuts) == best


@settings(max_examples=60, deadline=None)
@given(problems(st.floats(0, 1e3)), st.integers(1, 12))
def test_any_times_reach_the_best_bottleneck(problem: PartitionProblem, num_stages: int) -> None:
    """As near as the grid allows, which is never finer than the smallest normal number."""
    staged = replace(problem, num_stages=min(num_stages, num_blocks(problem)))
    found, (best, _, _) = partition(staged), min(all_partitions(staged))
    moved = sum(t.forward_bytes + t.backward_bytes for t in problem.transfers) / problem.bytes_per_second
    latency = 2 * len(problem.transfers) * problem.latency_seconds
    rounding = 1e-14 * (sum(problem.seconds) + moved + latency) + 100 * sys.float_info.min
    assert found.bottleneck_seconds == pytest.approx(best, rel=1e-12, abs=rounding)


@settings(max_examples=60, deadline=None)
@given(problems(st.floats(0, 10)), st.integers(1, 12))
def test_reported_seconds_are_those_of_the_cuts(problem: PartitionProblem, num_stages: int) -> None:
    staged = replace(problem, num_stages=min(num_stages, num_blocks(problem)))
    found = partition(staged)
    stages = list(pairwise((0, *found.cuts, len(problem.seconds))))
    expected = [stage_seconds(staged, begin, end) for begin, end in stages]
    reported = zip(found.stage_seconds, found.communication_seconds, strict=True)
    for (seconds, communication), (total, moved) in zip(reported, expected, strict=True):
        assert seconds == pytest.approx(total, rel=1e-12, abs=1e-12)
        assert communication == pytest.approx(moved, rel=1e-12, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(problems(st.floats(0, 10)), st.integers(1, 12), st.sampled_from([0.125, 2.0, 1024.0]))
def test_scaling_all_times_scales_the_answer(
    problem: PartitionProblem, num_stages: int, factor: float
) -> None:
    staged = replace(problem, num_stages=min(num_stages, num_blocks(problem)))
    scaled = replace(
        staged,
        seconds=[factor * seconds for seconds in staged.seconds],
        bytes_per_second=staged.bytes_per_second / factor,
        latency_seconds=staged.latency_seconds * factor,
    )
    expected, found = partition(staged), partition(scaled)
    assert found.cuts == expected.cuts
    assert found.bottleneck_seconds == factor * expected.bottleneck_seconds


def on_devices(problem: PartitionProblem, num_devices: int) -> tuple[Workload, Topology]:
    """The same problem for the search that may also replicate, reorder and leave devices unused."""
    count, link = len(problem.seconds), Level(num_devices, problem.bytes_per_second, problem.latency_seconds)
    names, idle = [f"op{k}" for k in range(count)], [0.0] * count
    before = [(k, k + 1) for k in range(count - 1)]
    workload = Workload(names, problem.seconds, idle, idle, idle, problem.transfers, before)
    return workload, Topology((Device(),) * num_devices, (link,))


@settings(max_examples=100, deadline=None)
@given(problems(st.integers(0, 5).map(float)), st.integers(1, 5))
def test_without_replicas_a_line_is_placed_as_it_is_cut(problem: PartitionProblem, num_devices: int) -> None:
    """``place`` takes as many stages as help, and cuts them where ``partition`` does."""
    problem = replace(problem, forbidden_cuts=frozenset())
    placed = place(*on_devices(problem, num_devices), PIPEC, max_replicas=1)
    most = min(num_devices, num_blocks(problem))
    cuts = [partition(replace(problem, num_stages=count)) for count in range(1, most + 1)]
    assert placed.seconds == min(found.bottleneck_seconds for found in cuts)
    found = cuts[len(placed.stages) - 1]
    assert tuple(stage.operators[0] for stage in placed.stages[1:]) == found.cuts
    assert tuple(stage.seconds for stage in placed.stages) == found.stage_seconds
    assert tuple(stage.communication_seconds for stage in placed.stages) == found.communication_seconds
    everywhere = place(*on_devices(problem, most), PIPEC, max_replicas=1, every_device=True)
    assert tuple(stage.operators[0] for stage in everywhere.stages[1:]) == cuts[-1].cuts
    assert tuple(stage.seconds for stage in everywhere.stages) == cuts[-1].stage_seconds


def test_a_balanced_chain() -> None:
    found = partition(chain([1, 1, 2, 2, 1, 1], 4))
    assert found == Partition((2, 3, 4), (2.0, 2.0, 2.0, 2.0), (0.0, 0.0, 0.0, 0.0))


def test_communication_moves_the_cut() -> None:
    wide = Transfer(1, (2,), forward_bytes=3, backward_bytes=3)
    thin = [Transfer(0, (1,), 1, 0), Transfer(2, (3,), 1, 0)]
    problem = PartitionProblem([3, 3, 3, 3], [wide, *thin], 2, bytes_per_second=1.0)
    assert partition(problem).cuts == (1,)
    assert partition(replace(problem, bytes_per_second=math.inf)).cuts == (2,)


def test_a_skip_is_paid_by_its_maker_once_and_by_each_reader() -> None:
    problem = PartitionProblem([0, 0, 0, 0], [Transfer(0, (1, 3), 5, 2)], 4, bytes_per_second=1.0)
    assert partition(problem).communication_seconds == (7, 7, 0, 7)


def test_latency_is_paid_per_message() -> None:
    problem = chain([0, 0], 2, size=1, latency_seconds=10.0)
    assert partition(problem).bottleneck_seconds == 11
    both = replace(problem, transfers=[Transfer(0, (1,), 1, 1)])
    assert partition(both).bottleneck_seconds == 22


def test_ties_prefer_less_communication() -> None:
    """The first operator bounds every choice; cutting later sends less."""
    transfers = [Transfer(1, (2,), 5, 0), Transfer(2, (3,), 1, 0)]
    assert partition(PartitionProblem([100, 0, 0, 0], transfers, 3, bytes_per_second=1.0)).cuts == (1, 3)


def test_ties_then_prefer_earlier_cuts() -> None:
    assert partition(chain([100, 0, 0, 0], 3)).cuts == (1, 2)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "cuts"), [(5, 2, (2,)), (10, 3, (2, 6)), (6, 4, (1, 2, 4))]
)
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7])
def test_equal_layers_tie_exactly(
    seconds: float, num_layers: int, num_stages: int, cuts: tuple[int, ...]
) -> None:
    """Added in floating point, two of these layers may take longer than two others."""
    assert partition(chain([seconds] * num_layers, num_stages)).cuts == cuts


def test_forbidden_cuts_are_avoided() -> None:
    problem = chain([1, 1, 1, 1], 2)
    assert partition(problem).cuts == (2,)
    assert partition(replace(problem, forbidden_cuts=frozenset({2}))).cuts == (1,)


def test_equal_problems_have_equal_answers() -> None:
    problem = chain([0.1] * 50, 7, size=3)
    assert partition(problem) == partition(replace(problem, seconds=tuple(problem.seconds)))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (chain([1, 1, 1], 4), "cannot cut 3 operators into 4 stages: .* Ask for 1 to 3 stages"),
        (chain([1, 1, 1], 0), "cannot cut 3 operators into 0 stages"),
        (chain([], 1), "cannot cut 0 operators into 1 stages"),
        (
            chain([1, 1, 1], 3, forbidden_cuts=frozenset({1, 7})),
            "into 3 stages: .* 1 boundaries between operators are not allowed as cuts. Ask for 1 to 2 stages",
        ),
        (chain([1, -2, 1], 2), "operator 1 costs -2 seconds: expected a finite number"),
        (
            chain([1, 1, math.nan], 2, names=("a", "b", "h.0.mlp")),
            r"operator 2 \(h.0.mlp\) costs nan seconds",
        ),
        (chain([1, math.inf], 2), "operator 1 costs inf seconds"),
        (chain([1, 1], 2, bytes_per_second=0.0), "the link carries 0.0 bytes per second"),
        (chain([1, 1], 2, bytes_per_second=math.nan), "the link carries nan bytes per second"),
        (chain([1, 1], 2, latency_seconds=-1.0), "after -1.0 seconds: expected a bandwidth above 0"),
        (
            chain([1, 1], 2, transfers=[Transfer(0, (1,), -8, 0)]),
            "the value of operator 0 has -8 bytes forward",
        ),
        (
            chain([1, 1], 2, transfers=[Transfer(1, (0,), 8, 0)], names=("a", "b")),
            r"operator 0 \(a\) reads the value of operator 1 \(b\): .* the reader after the maker",
        ),
        (chain([1, 1], 2, transfers=[Transfer(0, (2,), 8, 0)]), "operator 2 reads the value of operator 0"),
    ],
)
def test_malformed_problems_are_refused(problem: PartitionProblem, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(problem)
