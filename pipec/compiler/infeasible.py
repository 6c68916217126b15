"""The error where no plan fits into memory: it says what each rank needs, and which limit suffices."""

import math
from collections.abc import Callable

from pipec.compiler.staged_graph import EvaluatedPlan, StagedGraph
from pipec.errors import InfeasibleError
from pipec.hardware.topology import Topology
from pipec.ir.text_format import format_bytes
from pipec.plan.memory_needs import memory_shortfall

_ATTEMPTS = 4
"""How many limits are tried. Another limit gives other cuts and orders, so that the first may not suffice."""

_SHARES = (0.88, 0.94, 0.97, 0.985)
"""Shares of a sufficient limit that are tried next: with other cuts, less may suffice."""

OnDevices = Callable[[Topology], EvaluatedPlan]
"""Finds the best plan on other devices."""


def require_memory_on_fixed_stages(
    evaluated: EvaluatedPlan, base: StagedGraph, search: Callable[[StagedGraph], EvaluatedPlan]
) -> None:
    """Raise InfeasibleError if an evaluated plan on the fixed stages of ``base`` lacks memory.

    ``search`` finds the best plan on these stages, for any devices.
    """
    where = " on the stages that the first call has fixed"
    require_memory(evaluated, lambda topology: search(base.with_topology(topology)), where)


def require_memory(
    evaluated: EvaluatedPlan, search: OnDevices, where: str = "", instead: Callable[[], str] = str
) -> None:
    """Raise InfeasibleError if the evaluated plan lacks memory.

    ``instead`` returns another schedule that fits, or "".
    """
    topology, more, found = evaluated.staged.options.topology, 0, evaluated
    for attempt in range(_ATTEMPTS):
        if not any(found.excess_bytes):
            break
        more += math.ceil(2**attempt * max(found.excess_bytes))
        found = search(_with_more(topology, more))
    if more:
        enough = "" if any(found.excess_bytes) else _enough(topology, _least(topology, more, search), where)
        if name := instead():
            enough += f"schedule={name!r} fits: it gathers sharded parameters by fewer layers.\n"
        raise infeasible_error(evaluated, enough)


def _least(topology: Topology, more: int, search: OnDevices) -> int:
    """The fewest bytes found to suffice beyond what devices have, given that ``more`` suffice."""
    for share in _SHARES:
        most = max(device.memory_bytes for device in topology.devices) + more
        less = more - math.ceil((1 - share) * most)
        if less > 0 and not any(search(_with_more(topology, less)).excess_bytes):
            more = less
    return more


def _with_more(topology: Topology, more: int) -> Topology:
    return topology.with_reserved_memory([-more] * len(topology.devices))


def infeasible_error(evaluated: EvaluatedPlan, enough: str = "") -> InfeasibleError:
    """The error for an evaluated plan that lacks memory."""
    options = evaluated.staged.options
    limits = [device.memory_bytes for device in options.topology.devices]
    instead = "" if options.recompute == "auto" else ", recompute='auto'"
    instead += "" if options.may_offload or evaluated.is_asynchronous else ", offload='activations'"
    return InfeasibleError(
        f"{memory_shortfall(evaluated.memory, limits, evaluated.plan.placement)}\n{enough}"
        f"Use more devices, more microbatches of fewer rows{instead}, or a higher limit."
    )


def _enough(topology: Topology, more: int, where: str) -> str:
    """Text with the smallest limit that was found to suffice, in bytes."""
    limits = {device.memory_bytes for device in topology.devices}
    if len(limits) > 1:
        return f"With {more} bytes ({format_bytes(more)}) more on each device it would fit{where}.\n"
    limit = math.ceil(limits.pop()) + more
    return f"The smallest limit found to be enough{where} is memory_limit={limit} ({format_bytes(limit)}).\n"
