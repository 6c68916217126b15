"""How many bytes each rank needs for a plan, and what is short when it does not fit."""

import math
from collections.abc import Sequence

from pipec.ir import Placement, Plan, Program, RankMemory, stages_on
from pipec.ir.text import format_bytes
from pipec.programs.alike import ReplicatedPrograms
from pipec.programs.fold import excerpt
from pipec.programs.memory import rank_memory


def plan_memory(plan: Plan, programs: Sequence[Program]) -> list[RankMemory]:
    """What each rank needs. Programs without end are played until their steady state is seen."""
    if isinstance(programs, ReplicatedPrograms):
        return programs.few.of_all(
            [rank_memory(plan, each) for each in programs.few.in_step(programs.played)]
        )
    return [rank_memory(plan, program) for program in excerpt(programs, plan.ending.stream, plan.placement)]


def shortfall(needs: Sequence[RankMemory], limits: Sequence[float], placement: Placement) -> str:
    """What each rank needs for its stages against its limit."""
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


_STATIC = ("parameters", "buffers", "prepared", "gradients", "optimizer", "versions")
_MESSAGES = ("received", "sent", "travelling", "results")


def _of(need: RankMemory, kinds: Sequence[str]) -> float:
    return sum(need.parts[kind] for kind in kinds)
