"""Small planning problems for property tests, and their answers by trying every plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import NamedTuple, TypeAlias

from hypothesis import assume
from hypothesis import strategies as st

from pipec.hardware.topology import Device, Level, Topology
from pipec.planner.cost_model import MAX_LOAD, PIPEC, PIPEDREAM, CostModel
from pipec.planner.operator_graph import OperatorGraph, Transfer

Operators = int
"""A set of them: bit k says whether operator k is in it."""

Member: TypeAlias = "int | tuple[Member, ...]"
"""A device, by its kind, or a group: its members, sorted, so that groups which are alike are equal."""

MOST_DOWNSETS = 100
"""On several levels, where any three of them are tried together."""


@dataclass(frozen=True)
class PlanningProblem:
    """``graph`` on ``devices``, in groups of ``sizes`` from the inside out, with links of ``rates``."""

    graph: OperatorGraph
    devices: tuple[Device, ...]
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    latency_seconds: float
    model: CostModel
    max_replicas: int

    @property
    def topology(self) -> Topology:
        levels = zip(self.sizes, self.rates, strict=True)
        return Topology(self.devices, tuple(Level(*level, self.latency_seconds) for level in levels))

    @property
    def kinds(self) -> list[Device]:
        return sorted(set(self.devices))

    @property
    def outermost(self) -> tuple[Member, ...]:
        members: Sequence[Member] = [self.kinds.index(device) for device in self.devices]
        for size in self.sizes:
            members = [tuple(sorted(members[k : k + size])) for k in range(0, len(members), size)]
        return members[0]

    @property
    def limits_memory(self) -> bool:
        return min(device.memory_bytes for device in self.devices) < math.inf

    def best_seconds(self, among: Sequence[Operators] | None = None) -> float:
        """Those of the best plan over all downsets, or ``among`` some; infinite if none fits in memory."""
        return _EveryPlan(self, among or downsets(self.graph)).best_seconds()


def downsets(graph: OperatorGraph) -> list[Operators]:
    """Sets of operators that hold whatever must come before one of them."""
    needs = [0] * len(graph.names)
    for u, v in graph.before:
        needs[v] |= 1 << u
    found = {0}
    for _ in needs:
        found |= {held | 1 << op for held in found for op, need in enumerate(needs) if held & need == need}
    return sorted(found)


class _Stage(NamedTuple):
    """On up to ``devices`` of each of ``replicas`` members alike; the rest is for later stages.

    These have ``after`` devices for each replica, rounded up.
    """

    member: Member
    replicas: int
    devices: int
    rest: tuple[Member, ...]
    rest_devices: int
    after: int


class _EveryPlan:
    """Every plan of a problem is tried, but no part of it twice."""

    def __init__(self, problem: PlanningProblem, downsets: Sequence[Operators]) -> None:
        self.problem, self.graph, self.kinds = problem, problem.graph, problem.kinds
        self.downsets = sorted(downsets)
        self.larger = {k: [end for end in self.downsets if end & k == k != end] for k in self.downsets}
        self.best, self.stages, self.seconds = cache(self._best), cache(self._stages), cache(self._seconds)
        self.exchanged, self.total = cache(self._exchanged), cache(self._total)

    def best_seconds(self) -> float:
        level, members = len(self.problem.sizes) - 1, self.problem.outermost
        return self.best(level, members, num_devices(members), 0, 0, self.downsets[-1], True)

    def _best(
        self,
        level: int,
        members: tuple[Member, ...],
        devices: int,
        after: int,
        first: Operators,
        last: Operators,
        begins: bool,
    ) -> float:
        """The slowest stage of the best pipeline between two downsets."""
        if first == last:
            return 0.0
        ends = [end for end in self.larger[first] if end & last == end]
        found = math.inf
        for stage in self.stages(members, devices, after):
            for end in ends:
                seconds = self.seconds(level, stage, first, end, begins)
                if seconds < found:
                    rest = self.best(level, stage.rest, stage.rest_devices, after, end, last, False)
                    found = min(found, max(seconds, rest))
        return found

    def _stages(self, members: tuple[Member, ...], devices: int, after: int) -> list[_Stage]:
        return [
            _Stage(member, replicas, each, rest, later, math.ceil((after + later) / replicas))
            for member in dict.fromkeys(members)
            for replicas in range(1, min(members.count(member), self.problem.max_replicas) + 1)
            for each in range(1, num_devices([member]) + 1)
            for rest in some(without(members, member, replicas))
            for later in range(len(rest), min(num_devices(rest), devices - replicas * each) + 1)
        ]

    def _seconds(self, level: int, stage: _Stage, first: Operators, last: Operators, begins: bool) -> float:
        problem, held, replicas = self.problem, last & ~first, stage.replicas
        if level == 0:
            busy = self._alone(stage, held)
        else:
            after = stage.after if problem.limits_memory else 0
            busy = self.best(level - 1, stage.member, stage.devices, after, first, last, True)
        busy += self._all_reduce(level, replicas, held, begins)
        if problem.model is MAX_LOAD:
            return (busy + self.exchanged(level, held)) / replicas
        return max(busy, 0.0 if begins else self.exchanged(level, first)) / replicas

    def _alone(self, stage: _Stage, held: Operators) -> float:
        device, saved = self.kinds[stage.member], self.total("saved_bytes", held)
        if self.total("resident_bytes", held) + (1 + stage.after) * saved > device.memory_bytes:
            return math.inf
        return self.total("seconds", held) / device.speed

    def _all_reduce(self, level: int, replicas: int, held: Operators, begins: bool) -> float:
        parameters = self.total("parameter_bytes", held)
        if replicas == 1 or not parameters:
            return 0.0
        passes, links = 2, 1
        if self.problem.model is PIPEDREAM:
            passes, links = 4, self.problem.sizes[level - 1] if begins and level > 0 else 1
        share = passes * (replicas - 1) / replicas * parameters / (self.problem.rates[level] * links)
        rounds = (self.problem.model.step_microbatches or replicas) / replicas
        return (share + 2 * (replicas - 1) * self.problem.latency_seconds) / rounds

    def _exchanged(self, level: int, held: Operators) -> float:
        """The seconds of all values with an end inside and one outside."""
        return sum(
            self._value_seconds(value, level)
            for value in self.graph.transfers
            if len({held >> end & 1 for end in (value.producer, *value.consumers)}) == 2
        )

    def _value_seconds(self, value: Transfer, level: int) -> float:
        """There and back, at the same time or one after the other."""
        there, back = (
            self.problem.latency_seconds + size / self.problem.rates[level] if size else 0.0
            for size in (value.forward_bytes, value.backward_bytes)
        )
        return max(there, back) if self.problem.model.full_duplex else there + back

    def _total(self, column: str, held: Operators) -> float:
        return sum(figure for op, figure in enumerate(getattr(self.graph, column)) if held >> op & 1)


def num_devices(members: Sequence[Member]) -> int:
    return sum(1 if isinstance(member, int) else num_devices(member) for member in members)


def without(members: tuple[Member, ...], member: Member, count: int) -> tuple[Member, ...]:
    first = members.index(member)
    return members[:first] + members[first + count :]


def some(members: tuple[Member, ...]) -> set[tuple[Member, ...]]:
    return {each for count in range(len(members) + 1) for each in combinations(members, count)}


SECONDS = st.integers(0, 8).map(float)
BYTES = st.integers(0, 6).map(float)
MEMORY = st.sampled_from([math.inf, 16.0, 32.0, 64.0])


@st.composite
def graphs(draw: st.DrawFn, max_operators: int) -> OperatorGraph:
    """Mostly in line, so that there are few downsets."""
    count = draw(st.integers(1, max_operators) | st.just(max_operators))
    figures = st.lists(BYTES, min_size=count, max_size=count)
    before = [(k, k + 1) for k in range(count - 1) if draw(st.integers(0, 3))]
    before += [(k, k + 2) for k in range(count - 2) if draw(st.booleans())]
    makers = draw(st.lists(st.integers(0, max(0, count - 2)), max_size=6)) if count > 1 else []
    return OperatorGraph(
        names=[f"op{k}" for k in range(count)],
        seconds=draw(st.lists(SECONDS, min_size=count, max_size=count)),
        parameter_bytes=draw(figures),
        resident_bytes=draw(figures),
        saved_bytes=draw(figures),
        transfers=[draw(values(maker, count)) for maker in makers],
        before=before,
    )


@st.composite
def values(draw: st.DrawFn, maker: int, num_operators: int) -> Transfer:
    readers = draw(st.sets(st.integers(maker + 1, num_operators - 1), min_size=1, max_size=2))
    return Transfer(maker, tuple(readers), draw(BYTES), draw(BYTES))


@st.composite
def problems(
    draw: st.DrawFn, max_operators: int, sizes: st.SearchStrategy[tuple[int, ...]]
) -> PlanningProblem:
    """Devices of up to two kinds, each with or without a limit of memory."""
    graph, chosen = draw(graphs(max_operators)), draw(sizes)
    assume(len(chosen) == 1 or len(downsets(graph)) <= MOST_DOWNSETS)
    kinds = st.sampled_from([Device(draw(MEMORY)), Device(draw(MEMORY), speed=0.5)])
    return PlanningProblem(
        graph,
        devices=tuple(draw(kinds) for _ in range(math.prod(chosen))),
        sizes=chosen,
        rates=tuple(draw(st.sampled_from([0.5, 2.0, 16.0])) for _ in chosen),
        latency_seconds=draw(st.sampled_from([0.0, 0.5])),
        model=draw(st.sampled_from([PIPEC, replace(PIPEC, step_microbatches=8), PIPEDREAM, MAX_LOAD])),
        max_replicas=draw(st.sampled_from([1, 4])),
    )
