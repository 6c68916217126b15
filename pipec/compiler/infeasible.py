"""The error where no plan fits into memory: it says what each rank needs."""

import math
from collections.abc import Iterator, Sequence

from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError
from pipec.ir import RankMemory, ShardingLevel, stages_on
from pipec.ir.text_format import format_bytes

_STATIC = ("parameters", "buffers", "precomputed", "gradients", "optimizer", "versions")
_MESSAGES = ("received", "sent", "in_transit", "results")


def require_memory(evaluated: EvaluatedPlan, where: str = "") -> None:
    """Raise InfeasibleError if the plan that comes nearest to fitting lacks memory."""
    if not any(evaluated.excess_bytes):
        return
    options = evaluated.staged.options
    instead = "" if options.recompute == "auto" else ", recompute='auto'"
    instead += "" if options.may_offload or evaluated.is_asynchronous else ", offload='activations'"
    is_shared = any(len(ranks) > 1 for ranks in evaluated.plan.placement) or evaluated.is_asynchronous
    instead += "" if options.sync_spec.weights_on_host or is_shared else ", offload='weights'"
    if options.sync_spec.shard is ShardingLevel.PARAMETERS:
        instead += ", schedule='looped-bfs-v4', which gathers a quarter of a rank's layers at a time"
    needed = math.ceil(max(need.peak_bytes for need in evaluated.memory))
    lines = [
        "nothing that was tried fits into the memory of the devices; what comes nearest needs",
        *_needs(evaluated),
        f"This plan{where} needs memory_limit={needed} ({format_bytes(needed)}).",
        f"Use more devices, more microbatches of fewer rows{instead}, or a higher limit.",
    ]
    raise InfeasibleError("\n".join(lines))


def _needs(evaluated: EvaluatedPlan) -> Iterator[str]:
    """What each rank needs, and its limit."""
    for need in evaluated.memory:
        limit = evaluated.memory_limit(need.rank)
        stages = " and ".join(map(str, stages_on(evaluated.plan.placement, need.rank)))
        of_limit = f" of {format_bytes(limit)}" if limit < math.inf else ""
        excess = f", {format_bytes(need.peak_bytes - limit)} too many" if need.peak_bytes > limit else ""
        yield (
            f"  rank {need.rank}, stage {stages}: {_sum(need, _STATIC)} weights, gradients and state + "
            f"{_sum(need, ('saved', 'inputs'))} saved ({need.in_flight} in flight) + "
            f"{format_bytes(need.running)} transient + {_sum(need, _MESSAGES)} messages = "
            f"{format_bytes(need.peak_bytes)}{of_limit}{excess}"
        )


def _sum(need: RankMemory, kinds: Sequence[str]) -> str:
    return format_bytes(sum(need.bytes_by_category[kind] for kind in kinds))
