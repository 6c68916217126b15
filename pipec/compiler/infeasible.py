"""The error where no plan fits into memory: it says what each rank needs, and a limit that is enough."""

import math
from collections.abc import Callable

from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError
from pipec.hardware.topology import Topology
from pipec.ir import ShardingLevel
from pipec.ir.text_format import format_bytes
from pipec.plan.memory_needs import memory_shortfall

OnDevices = Callable[[Topology], EvaluatedPlan]
"""Finds the best plan on other devices."""


def require_memory(evaluated: EvaluatedPlan, search: OnDevices | None = None, where: str = "") -> None:
    """Raise InfeasibleError if the plan that comes nearest to fitting lacks memory.

    What the plan needs is enough for the same plan. Another limit may give other cuts, so that ``search``
    confirms it, unless stages are fixed.
    """
    if not any(evaluated.excess_bytes):
        return
    topology, more = evaluated.staged.options.topology, math.ceil(max(evaluated.excess_bytes))
    larger = topology.with_reserved_memory([-more] * len(topology.devices))
    is_enough = search is None or not any(search(larger).excess_bytes)
    raise infeasible_error(evaluated, _enough(topology, more, where) if is_enough else "")


def infeasible_error(evaluated: EvaluatedPlan, enough: str = "") -> InfeasibleError:
    """The error for an evaluated plan that lacks memory."""
    options = evaluated.staged.options
    limits = [device.memory_bytes for device in options.topology.devices]
    instead = "" if options.recompute == "auto" else ", recompute='auto'"
    instead += "" if options.may_offload or evaluated.is_asynchronous else ", offload='activations'"
    if options.sync_spec.shard is ShardingLevel.PARAMETERS:
        instead += ", schedule='looped-bfs-v4', which gathers a quarter of a rank's layers at a time"
    return InfeasibleError(
        f"{memory_shortfall(evaluated.memory, limits, evaluated.plan.placement)}\n{enough}"
        f"Use more devices, more microbatches of fewer rows{instead}, or a higher limit."
    )


def _enough(topology: Topology, more: int, where: str) -> str:
    """Text with a limit that suffices, in bytes."""
    limits = {device.memory_bytes for device in topology.devices}
    if len(limits) > 1:
        return f"With {more} bytes ({format_bytes(more)}) more on each device it would fit{where}.\n"
    limit = math.ceil(limits.pop()) + more
    return f"A limit that is enough{where} is memory_limit={limit} ({format_bytes(limit)}).\n"
