"""How many bytes each rank needs for a plan, and what is short when it does not fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir import Placement, Plan, Program, StageMemory, stages_on
from pipec.ir.columns import Instructions
from pipec.ir.text import format_bytes
from pipec.programs.fold import excerpt
from pipec.programs.memory import held


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the compute that needs most.

    ``static`` are weights, in all versions that are held at a time, the sums of their gradients and optimizer
    state, ``saved`` is what the ``in_flight`` pairs of stage and microbatch hold, ``transient`` what the
    compute itself holds while it runs.
    """

    static: float
    saved: float
    in_flight: int
    transient: float

    @property
    def total(self) -> float:
        return self.static + self.saved + self.transient


def rank_memory(plan: Plan, programs: Sequence[Program]) -> list[RankMemory]:
    """What each rank needs; ``StageMemory`` says what is counted."""
    return [_memory_of(plan, program) for program in excerpt(programs, len(plan.stages))]


def _memory_of(plan: Plan, program: Program) -> RankMemory:
    stages = [stage.cost.memory for stage in plan.stages]
    static = sum(stages[stage].static for stage in stages_on(plan.placement, program.rank))
    cells = Instructions.of(program.instructions, plan.links).cells
    amounts = held(cells, stages)
    if not amounts.size:
        return RankMemory(static, 0, 0, 0)
    most = int(amounts.argmax())
    transient = stages[int(cells.stages[most])].transient
    pairs = held(cells, [StageMemory(saved=1, kept=1)] * len(stages))
    return RankMemory(static, float(amounts[most]) - transient, int(pairs[most]), transient)


def shortfall(needs: Sequence[RankMemory], limits: Sequence[float], placement: Placement) -> str:
    """What each rank needs for its stages against its limit."""
    rows = []
    for rank, (need, limit) in enumerate(zip(needs, limits, strict=True)):
        stages = " and ".join(map(str, stages_on(placement, rank)))
        of_limit = f" of {format_bytes(limit)}" if limit < math.inf else ""
        excess = f", {format_bytes(need.total - limit)} too many" if need.total > limit else ""
        rows.append(
            f"  rank {rank}, stage {stages}: {format_bytes(need.static)} weights, gradients and state + "
            f"{format_bytes(need.saved)} saved ({need.in_flight} in flight) + "
            f"{format_bytes(need.transient)} transient = {format_bytes(need.total)}{of_limit}{excess}"
        )
    return "\n".join(
        ["nothing that was tried fits into the memory of the devices; what comes nearest needs", *rows]
    )
