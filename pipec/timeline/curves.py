"""What the ranks hold over time: microbatches in flight, and bytes by category."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Op, Plan, Program, StageMemory
from pipec.ir.columns import OP_CODE, PHASES, Floats, InstructionColumns
from pipec.programs.lower_periodic import steady_excerpt
from pipec.programs.rank_memory import BytesOverTime, memory_by_category
from pipec.timeline.events import Timeline


@dataclass(frozen=True, eq=False)
class Curve:
    """Steps over time: ``amounts[i]`` from ``times[i]`` on. Times ascend, each occurs once."""

    times: Floats
    amounts: Floats

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float]]) -> "Curve":
        """The curve with these steps, each a time and the amount from then on."""
        times, amounts = np.array(steps, float).reshape(-1, 2).T
        return cls(times, amounts)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.times.tolist(), self.amounts.tolist(), strict=True)


@dataclass(frozen=True, eq=False)
class MemoryCurves:
    """The bytes of a rank over time: the ``total``, and by category the part of each, at the same times.

    ``host`` are the bytes in host memory, which are not in the total; None if there are none.
    """

    total: Curve
    by_category: Mapping[str, Floats]
    host: Floats | None = None


def in_flight_over_time(timeline: Timeline) -> tuple[Curve, ...]:
    """For each rank the number of its pairs of stage and microbatch in flight, from time 0.

    A microbatch is in flight from its forward to its last compute.
    """
    computes = timeline.computes.where(timeline.computes.instructions.is_compute_start)
    growths = np.array([_IN_FLIGHT.growth(phase) for phase in PHASES])
    curves = []
    for rank in range(timeline.num_ranks):
        own = computes.of_rank(rank)
        times = np.stack([own.starts, own.ends], axis=1).reshape(-1)
        changes = growths[own.instructions.phases].reshape(-1)
        times, changes = np.append(0.0, times[changes != 0]), np.append(0.0, changes[changes != 0])
        order = np.argsort(times, kind="stable")
        times, amounts = times[order], np.cumsum(changes[order])
        last = _is_last_of_its_time(times)
        curves.append(Curve(times[last], amounts[last]))
    return tuple(curves)


_IN_FLIGHT = StageMemory(saved=1, weight_gradient_saved=1)


def rank_memory_over_time(
    plan: Plan, programs: Sequence[Program], timeline: Timeline
) -> tuple[MemoryCurves, ...]:
    """The bytes that each rank holds over time, as ``rank_memory`` counts them.

    There are none if the timeline does not belong to these programs, and none of an update alone: nothing
    tells which gradients there were before it.
    """
    if not plan.sync_spec.runs_microbatches:
        return ()
    curves = []
    for rank, program in enumerate(steady_excerpt(programs, plan.sync_spec.stream, plan.placement)):
        events = timeline.columns.of_rank(rank)
        columns = InstructionColumns.of(program.instructions, plan.links)
        timed = np.flatnonzero(columns.is_timed & (columns.ops != OP_CODE[Op.SEND]))
        chosen = np.flatnonzero(events.is_blocking | events.is_overlapped)
        if timed.size != chosen.size:
            return ()
        ends, starts = np.zeros(len(columns)), np.zeros(len(columns))
        starts[timed], ends[timed] = events.starts[chosen], events.ends[chosen]
        times = np.append(0.0, np.maximum.accumulate(np.stack([starts, ends], axis=1).reshape(-1)))
        last = _is_last_of_its_time(times)
        categories, on_host = memory_by_category(plan, program)
        amounts = {category: _steps(found)[last] for category, found in categories.items()}
        total, host = sum(amounts.values(), np.zeros(int(last.sum()))), _steps(on_host)[last]
        curves.append(MemoryCurves(Curve(times[last], total), amounts, host if host.any() else None))
    return tuple(curves)


def _steps(amounts: BytesOverTime) -> Floats:
    before, during, after = amounts
    steps: Floats = np.append(before, np.stack([during, after], axis=1).reshape(-1))
    return steps


def _is_last_of_its_time(times: Floats) -> NDArray[np.bool_]:
    return np.append(times[1:] != times[:-1], True)
