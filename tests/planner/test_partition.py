"""Chains on devices that are alike, one stage each: equal to trying every cut, ties broken by rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import PlanError
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology, equal_devices
from pipec.planner.chain import CostModel, OperatorChain, Transfer
from pipec.planner.partition import TOLERANCE, PartitionStage, partition_chain


@dataclass(frozen=True)
class Line:
    """Operators in line, and the link between any two devices."""

    seconds: Sequence[float]
    transfers: Sequence[Transfer]
    bytes_per_second: float = 1.0
    latency_seconds: float = 0.0

    @property
    def chain(self) -> OperatorChain:
        count = len(self.seconds)
        names, idle = [f"op{k}" for k in range(count)], [0.0] * count
        return OperatorChain(names, self.seconds, idle, idle, idle, self.transfers)

    def cut(self, num_stages: int, tolerance: float = 0.0) -> tuple[PartitionStage, ...]:
        devices = equal_devices(num_stages, LinkModel(self.bytes_per_second, self.latency_seconds))
        return partition_chain(self.chain, devices, CostModel(), replicas=1, tolerance=tolerance)

    def crossing(self, cut: int) -> float:
        """Seconds of the values that cross a cut, there and back at the same time."""
        return sum(
            max(self._message(value.forward_bytes), self._message(value.backward_bytes))
            for value in self.transfers
            if value.first < cut <= value.last
        )

    def _message(self, size: float) -> float:
        return self.latency_seconds + size / self.bytes_per_second if size else 0.0

    def all_cuts(self, num_stages: int) -> Iterator[tuple[float, float, tuple[int, ...]]]:
        """(seconds of the slowest stage, communication, cuts) of every choice."""
        for cuts in combinations(range(1, len(self.seconds)), num_stages - 1):
            ends = (0, *cuts, len(self.seconds))
            crossing = [0.0, *map(self.crossing, cuts)]
            stages = zip(pairwise(ends), crossing, strict=True)
            slowest = max(max(sum(self.seconds[i:j]), link) for (i, j), link in stages)
            yield slowest, sum(crossing), cuts


def cuts_of(stages: Sequence[PartitionStage]) -> tuple[int, ...]:
    return tuple(stage.blocks[0] for stage in stages[1:])


def slowest(stages: Sequence[PartitionStage]) -> float:
    return max(stage.seconds for stage in stages)


def chain(seconds: Sequence[float], size: float = 0) -> Line:
    """Each operator reads the one before; one byte takes one second."""
    return Line(seconds, [Transfer(k, k + 1, size, 0) for k in range(len(seconds) - 1)])


@st.composite
def lines(draw: st.DrawFn, times: st.SearchStrategy[float]) -> Line:
    """Up to 12 operators, with skips."""
    count = draw(st.integers(1, 12))
    transfers = []
    for producer in draw(st.lists(st.integers(0, 10), max_size=14)):
        if producer < count - 1:
            last = draw(st.integers(producer + 1, count - 1))
            forward, backward = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
            transfers.append(Transfer(producer, last, forward, backward))
    return Line(
        draw(st.lists(times, min_size=count, max_size=count)),
        transfers,
        bytes_per_second=draw(st.sampled_from([0.5, 2.0])),
        latency_seconds=draw(st.sampled_from([0.0, 0.5])),
    )


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(lines(st.integers(0, 5).map(float)), st.sampled_from([0.0, 0.125, 0.5]))
def test_equals_brute_force_for_every_number_of_stages(line: Line, tolerance: float) -> None:
    """Small whole numbers, so that ties abound and both sides add exactly: cuts must match too."""
    for num_stages in range(1, len(line.seconds) + 1):
        found = line.cut(num_stages, tolerance)
        every = list(line.all_cuts(num_stages))
        fastest = min(every)[0]
        within = [plan for plan in every if plan[0] <= fastest * (1 + tolerance)]
        seconds, communication, cuts = min(within, key=lambda plan: (plan[1], plan[0], plan[2]))
        assert (slowest(found), cuts_of(found)) == (seconds, cuts)
        assert sum(stage.communication_seconds for stage in found) == communication
        assert [stage.devices for stage in found] == [(k,) for k in range(num_stages)]


@settings(max_examples=50, deadline=None)
@given(lines(st.integers(0, 5).map(float)), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_given_numbers_of_replicas_share_the_work_of_their_stages(line: Line, numbers: list[int]) -> None:
    if len(line.seconds) < len(numbers):
        return
    line = replace(line, transfers=[])
    devices = equal_devices(sum(numbers), LinkModel(1.0, 0.0))
    found = partition_chain(line.chain, devices, CostModel(), numbers, tolerance=0.0)
    assert [stage.replicas for stage in found] == numbers
    best = min(
        max(sum(line.seconds[i:j]) / number for (i, j), number in zip(pairwise(ends), numbers, strict=True))
        for cuts in combinations(range(1, len(line.seconds)), len(numbers) - 1)
        for ends in [(0, *cuts, len(line.seconds))]
    )
    assert slowest(found) == pytest.approx(best)


def test_costs_that_are_not_known_so_well_do_not_decide() -> None:
    """A cut through a wide value is not worth half a percent."""
    line = Line([100.5, 1, 99], [Transfer(0, 1, 1, 1), Transfer(1, 2, 9, 9)])
    assert cuts_of(line.cut(2)) == (1,)
    assert cuts_of(replace(line, seconds=[99, 1, 100.5]).cut(2)) == (2,)
    assert cuts_of(replace(line, seconds=[99, 1, 100.5]).cut(2, TOLERANCE)) == (1,)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "cuts"), [(5, 2, (2,)), (10, 3, (2, 6)), (6, 4, (1, 2, 4))]
)
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7])
def test_equal_layers_tie_in_spite_of_rounding(
    seconds: float, num_layers: int, num_stages: int, cuts: tuple[int, ...]
) -> None:
    """Added in floating point, two of these layers may take longer than two others."""
    assert cuts_of(chain([seconds] * num_layers).cut(num_stages)) == cuts


def test_a_link_that_is_slower_between_groups_is_crossed_where_little_does() -> None:
    """Devices alike, but not their links: the stages still visit them in order."""
    line = Line([4.0] * 4, [Transfer(k, k + 1, size, 0) for k, size in enumerate((8, 2, 8))])
    topology = Topology((Device(),) * 4, (Level(2, 2.0), Level(2, 0.5)))
    found = partition_chain(line.chain, topology, CostModel(), replicas=1)
    assert [stage.devices for stage in found] == [(0,), (1,), (2,), (3,)]
    assert [stage.seconds for stage in found] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("seconds", "message"), [([1, 1, 1], "3 operators .* 4 devices"), ([], "no operators")]
)
def test_too_few_operators_are_refused(seconds: Sequence[float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        chain(seconds).cut(4)
