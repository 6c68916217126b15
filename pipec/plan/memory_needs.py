"""The bytes that each rank needs for a plan, and the shortfall where that exceeds its limit."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipec.ir import Placement, Plan, Program, RankMemory, RepresentativeRanks, stages_on
from pipec.ir.text_format import format_bytes
from pipec.programs.lower_periodic import steady_excerpt
from pipec.programs.rank_memory import rank_memory


def plan_memory(plan: Plan, programs: Sequence[Program]) -> list[RankMemory]:
    """The memory that each rank of a plan needs. Periodic programs are followed until their steady state.

    ``programs`` are those of all ranks, or of ranks that represent all.
    """
    excerpt = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    needs = {program.rank: rank_memory(plan, program) for program in excerpt}
    few = RepresentativeRanks.of(plan.placement, [*needs])
    return (
        [replace(needs[rank], rank=each) for each, rank in enumerate(few.represented_by)]
        if few
        else [*needs.values()]
    )


def memory_shortfall(needs: Sequence[RankMemory], limits: Sequence[float], placement: Placement) -> str:
    """A text that compares each rank's needs with its limit."""
    rows = []
    for need, limit in zip(needs, limits, strict=True):
        stages = " and ".join(map(str, stages_on(placement, need.rank)))
        of_limit = f" of {format_bytes(limit)}" if limit < math.inf else ""
        excess = f", {format_bytes(need.peak_bytes - limit)} too many" if need.peak_bytes > limit else ""
        rows.append(
            f"  rank {need.rank}, stage {stages}: {format_bytes(_of(need, _STATIC))} weights, gradients and "
            f"state + {format_bytes(_of(need, ('saved', 'inputs')))} saved ({need.in_flight} in flight) + "
            f"{format_bytes(need.running)} transient + {format_bytes(_of(need, _MESSAGES))} messages = "
            f"{format_bytes(need.peak_bytes)}{of_limit}{excess}"
        )
    return "\n".join(
        ["nothing that was tried fits into the memory of the devices; what comes nearest needs", *rows]
    )


_STATIC = ("parameters", "buffers", "precomputed", "gradients", "optimizer", "versions")
_MESSAGES = ("received", "sent", "in_transit", "results")


def _of(need: RankMemory, kinds: Sequence[str]) -> float:
    return sum(need.bytes_by_category[kind] for kind in kinds)
