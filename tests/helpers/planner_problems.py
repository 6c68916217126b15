"""Small planning problems for property tests, and their answers by trying every plan."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from hypothesis import strategies as st

from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology
from pipec.planner.chain import CostModel, OperatorChain, Transfer

Member: TypeAlias = "Device | tuple[Member, ...]"
"""A device, or a group: its members, sorted, so that groups which are alike are equal."""


@dataclass(frozen=True)
class PlanningProblem:
    """``chain`` on ``devices``, in groups of ``sizes`` from the inside out, with links of ``rates``."""

    chain: OperatorChain
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
    def outermost(self) -> tuple[Member, ...]:
        members: Sequence[Member] = self.devices
        for size in self.sizes:
            members = [tuple(sorted(members[k : k + size])) for k in range(0, len(members), size)]
        (outermost,) = members
        assert isinstance(outermost, tuple)
        return outermost

    def best_seconds(self) -> float:
        """Those of the best plan; infinite if none fits in memory, or blocks are too few."""
        level, count = len(self.sizes) - 1, len(self.chain.names)
        return _EveryPlan(self).best(self.outermost, 0, 0, count, _Around((), level, 0))


class _Around(NamedTuple):
    """The replicas of the groups around a pipeline, from the outside in.

    Its first stage reads over links of ``level``, one for each of ``links`` microbatches; with 0 links, over
    those of its own group.
    """

    replicas: tuple[int, ...]
    level: int
    links: int


class _EveryPlan:
    """Every plan of a problem is tried, but no part of it twice."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem, self.chain = problem, problem.chain
        self.best = cache(self._best)

    def _best(self, members: tuple[Member, ...], after: int, first: int, last: int, around: _Around) -> float:
        """The slowest stage of the best pipeline on all ``members``, which ``after`` devices follow."""
        if not members:
            return 0.0 if first == last else math.inf
        level, outer = len(self.problem.sizes) - 1 - len(around.replicas), math.prod(around.replicas)
        found = math.inf
        for member, count, rest in choices(members, self.problem.max_replicas):
            later = math.ceil((after + num_devices(rest)) / count)
            now = around._replace(replicas=(*around.replicas, count))
            if not around.links:
                now = now._replace(level=level, links=outer * count)
            for end in range(first + 1, last + 1):
                inside = self._inside(member, later, first, end, now)
                if inside < found:
                    others = self.best(rest, after, end, last, _Around(around.replicas, level, 0))
                    found = min(found, max(inside, others))
        return found

    def _inside(self, member: Member, later: int, first: int, last: int, around: _Around) -> float:
        if isinstance(member, tuple):
            return self.best(member, later, first, last, around)
        chain, model, blocks = self.chain, self.problem.model, range(first, last)
        replicas, latency = math.prod(around.replicas), self.problem.latency_seconds
        held = sum(chain.resident_bytes[k] + model.in_flight(later) * chain.saved_bytes[k] for k in blocks)
        if held > member.memory_bytes:
            return math.inf
        parameters = sum(chain.parameter_bytes[k] for k in blocks)
        reduced = 0.0
        rates = [r for r, n in zip(self.problem.rates[::-1], around.replicas, strict=True) if n > 1]
        if parameters and rates:
            reduced = 2 * (replicas - 1) * (parameters / replicas / min(rates) + latency)
        busy = sum(chain.seconds[k] for k in blocks) / member.speed / replicas
        link = LinkModel(self.problem.rates[around.level], latency)
        crossing = crossing_seconds(chain, first, link) / around.links
        return max(busy + reduced / (model.step_microbatches or replicas), crossing)


def crossing_seconds(chain: OperatorChain, position: int, link: LinkModel) -> float:
    """The seconds of the values that cross a position, there and back at the same time."""
    crossing = [each for each in chain.transfers if each.first < position <= each.last]
    largest = [max(each.forward_bytes, each.backward_bytes) for each in crossing]
    return sum(link.latency_seconds + size / link.bytes_per_second for size in largest if size)


def choices(
    members: tuple[Member, ...], max_replicas: int
) -> Iterator[tuple[Member, int, tuple[Member, ...]]]:
    """Some equal members, their number, and the others."""
    for member in dict.fromkeys(members):
        for count in range(1, min(members.count(member), max_replicas) + 1):
            first = members.index(member)
            yield member, count, members[:first] + members[first + count :]


def num_devices(members: Sequence[Member]) -> int:
    return sum(num_devices(member) if isinstance(member, tuple) else 1 for member in members)


SECONDS = st.integers(0, 5).map(float)
BYTES = st.integers(0, 6).map(float)
MEMORY = st.sampled_from([math.inf, 16.0, 32.0, 64.0])


@st.composite
def chains(draw: st.DrawFn, max_blocks: int) -> OperatorChain:
    count = draw(st.integers(1, max_blocks) | st.just(max_blocks))
    figures = st.lists(BYTES, min_size=count, max_size=count)
    ends = st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(sorted)
    values = draw(st.lists(ends, max_size=8)) if count > 1 else []
    return OperatorChain(
        names=[f"op{k}" for k in range(count)],
        seconds=draw(st.lists(SECONDS, min_size=count, max_size=count)),
        parameter_bytes=draw(figures),
        resident_bytes=draw(figures),
        saved_bytes=draw(figures),
        transfers=[Transfer(*value, draw(BYTES), draw(BYTES)) for value in values],
    )


@st.composite
def problems(draw: st.DrawFn, max_blocks: int, sizes: st.SearchStrategy[tuple[int, ...]]) -> PlanningProblem:
    """Devices of up to two kinds, each with or without a limit of memory."""
    chosen = draw(sizes)
    kinds = st.sampled_from([Device(draw(MEMORY)), Device(draw(MEMORY), speed=0.5)])
    return PlanningProblem(
        draw(chains(max_blocks)),
        devices=tuple(draw(kinds) for _ in range(math.prod(chosen))),
        sizes=chosen,
        rates=tuple(draw(st.sampled_from([0.5, 2.0, 16.0])) for _ in chosen),
        latency_seconds=draw(st.sampled_from([0.0, 0.5])),
        model=draw(st.sampled_from([CostModel(), CostModel(step_microbatches=8)])),
        max_replicas=draw(st.sampled_from([1, 4])),
    )
