"""Small planning problems for property tests, and their answers by trying every plan."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

from hypothesis import strategies as st

from pipec.planner.cost_model import PIPEC, PIPEDREAM, CostModel
from pipec.planner.partition import Transfer
from pipec.planner.topology import Device, Topology, uniform
from pipec.planner.workload import Workload

Downset = frozenset[int]

MEMORY = st.sampled_from([4.0, 8.0, 16.0, 32.0, math.inf])


@dataclass(frozen=True)
class Trial:
    """Every plan of ``workload`` on ``sizes`` equal devices, from the inside out, each tried."""

    workload: Workload
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    device: Device
    model: CostModel
    max_replicas: int

    @property
    def topology(self) -> Topology:
        return uniform(self.sizes, self.rates, self.device)

    @cached_property
    def whole(self) -> Downset:
        return frozenset(range(len(self.workload.names)))

    @cached_property
    def downsets(self) -> list[Downset]:
        found = {frozenset()}
        for _ in self.whole:
            found |= {held | {op} for held in found for op in self.whole if self._may_join(op, held)}
        return sorted(found, key=lambda held: (len(held), sorted(held)))

    def _may_join(self, op: int, held: Downset) -> bool:
        return all(u in held for u, v in self.workload.before if v == op)

    def best_seconds(self) -> float:
        """Of the best plan; infinite if none fits in memory."""

        @cache
        def best(
            level: int, first: Downset, members: int, last: Downset, after: Fraction, begins: bool
        ) -> float:
            if first == last:
                return 0.0
            return min(
                (
                    max(stage, best(level, end, rest, last, after, False))
                    for end, rest, stage in stages(level, first, members, last, after, begins)
                ),
                default=math.inf,
            )

        def stages(
            level: int, first: Downset, members: int, last: Downset, after: Fraction, begins: bool
        ) -> Iterator:
            for end in self.downsets:
                if not (first < end <= last):
                    continue
                for rest in range(members):
                    for replicas in range(1, min(members - rest, self.max_replicas) + 1):
                        later = (after + rest * math.prod(self.sizes[:level])) / replicas
                        if level == 0:
                            busy = self._alone(end - first, later)
                        else:
                            busy = best(level - 1, first, self.sizes[level - 1], end, later, True)
                        yield end, rest, self._stage(busy, level, replicas, first, end, begins)

        return best(len(self.sizes) - 1, frozenset(), self.sizes[-1], self.whole, Fraction(0), True)

    def _alone(self, held: Downset, later: Fraction) -> float:
        saved = sum(self.workload.saved_bytes[op] for op in held)
        resident = sum(self.workload.resident_bytes[op] for op in held)
        if resident + (1 + math.ceil(later)) * saved > self.device.memory_bytes:
            return math.inf
        return sum(self.workload.seconds[op] for op in held) / self.device.speed

    def _stage(
        self, busy: float, level: int, replicas: int, first: Downset, end: Downset, begins: bool
    ) -> float:
        held, rate = end - first, self.rates[level]
        parameters = sum(self.workload.parameter_bytes[op] for op in held)
        passes = 4 if self.model is PIPEDREAM else 2
        all_reduce = passes * (replicas - 1) * parameters / (rate * replicas)
        if self.model is PIPEDREAM and begins and level > 0:
            all_reduce /= self.sizes[level - 1]
        if self.model is PIPEDREAM:
            link = 0.0 if begins else self._cut_bytes(first) / rate
            return max((busy + all_reduce) / replicas, link / replicas)
        return (busy + all_reduce + self._exchanged_bytes(held) / rate) / replicas

    def _cut_bytes(self, first: Downset) -> float:
        return sum(
            value.forward_bytes + value.backward_bytes
            for value in self.workload.transfers
            if len({end in first for end in (value.producer, *value.consumers)}) == 2
        )

    _exchanged_bytes = _cut_bytes  # both count the values with an end inside a set and one outside


@st.composite
def trials(draw: st.DrawFn, max_operators: int, sizes: st.SearchStrategy[tuple[int, ...]]) -> Trial:
    """Mostly in line, so that there are few downsets; memory tight in about half."""
    count = draw(st.integers(1, max_operators))
    figures = st.lists(st.integers(0, 8).map(float), min_size=count, max_size=count)
    before = [(k, k + 1) for k in range(count - 1) if draw(st.integers(0, 3))]
    before += [(k, k + 2) for k in range(count - 2) if draw(st.booleans())]
    transfers = [
        Transfer(
            u, tuple(draw(st.sets(st.integers(u + 1, count - 1), min_size=1, max_size=2))), draw(bytes_), 0
        )
        for u in draw(st.lists(st.integers(0, max(0, count - 2)), max_size=6))
        if count > 1
    ]
    workload = Workload(
        names=[f"op{k}" for k in range(count)],
        seconds=draw(figures),
        parameter_bytes=draw(figures),
        resident_bytes=draw(figures),
        saved_bytes=draw(figures),
        transfers=transfers,
        before=before,
    )
    chosen = draw(sizes)
    rates = tuple(draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in chosen)
    device = Device(draw(MEMORY), draw(st.sampled_from([0.5, 1.0])))
    return Trial(
        workload,
        chosen,
        rates,
        device,
        draw(st.sampled_from([PIPEC, PIPEDREAM])),
        draw(st.sampled_from([1, 4])),
    )


bytes_ = st.integers(0, 6).map(float)
