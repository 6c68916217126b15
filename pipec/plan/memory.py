"""How many bytes each rank needs for a plan, and what is short when it does not fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir import Mode, Plan, Program
from pipec.ir.text import format_bytes
from pipec.programs.in_flight import peak_in_flight


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: weights with gradients, saved values of the microbatches in flight, scratch."""

    static: int
    saved: int
    in_flight: int
    transient: int

    @property
    def total(self) -> int:
        return self.static + self.saved + self.transient


def rank_bytes(plan: Plan, programs: Sequence[Program]) -> list[RankBytes]:
    """Optimizer state is not counted: pipec does not know which optimizer will be used."""
    copies = 2 if plan.mode is Mode.TRAIN else 1
    return [_bytes_of(plan, program.rank, copies, peak_in_flight(program)) for program in programs]


def _bytes_of(plan: Plan, rank: int, copies: int, in_flight: int) -> RankBytes:
    costs = [s.cost for s in plan.stages if plan.placement[s.index] == rank]
    most_saved = max((cost.saved_bytes for cost in costs), default=0)
    return RankBytes(
        static=copies * sum(cost.parameter_bytes for cost in costs),
        saved=most_saved * in_flight,
        in_flight=in_flight,
        transient=max((cost.transient_bytes for cost in costs), default=0),
    )


def shortfall(needs: Sequence[RankBytes], limits: Sequence[float], placement: Sequence[int]) -> str:
    """What each rank needs for its stages against its limit, and what to do about it."""
    rows = []
    for rank, (need, limit) in enumerate(zip(needs, limits, strict=True)):
        stages = " and ".join(str(stage) for stage, home in enumerate(placement) if home == rank)
        of_limit = f" of {format_bytes(limit)}" if limit < math.inf else ""
        excess = f", {format_bytes(need.total - limit)} too many" if need.total > limit else ""
        rows.append(
            f"  rank {rank}, stage {stages}: {format_bytes(need.static)} weights and gradients + "
            f"{format_bytes(need.saved)} saved ({need.in_flight} in flight) + "
            f"{format_bytes(need.transient)} transient = {format_bytes(need.total)}{of_limit}{excess}"
        )
    return "\n".join(
        [
            "nothing that was tried fits into the memory of the devices; what comes nearest needs",
            *rows,
            "Use more devices, more microbatches of fewer rows, recompute='full', or a higher limit.",
        ]
    )
