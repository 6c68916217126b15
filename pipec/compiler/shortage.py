"""What is said where nothing fits into memory: what each rank needs, and what limit would be enough."""

import math
from collections.abc import Callable

from pipec.compiler.staged import StagedGraph, Trial
from pipec.errors import InfeasibleError
from pipec.hardware.topology import Topology
from pipec.ir.text import format_bytes
from pipec.plan.memory import shortfall

_ATTEMPTS = 4
"""How many limits are tried. With another limit other cuts are, so that the first may not be enough."""

_SHARES = (0.88, 0.94, 0.97, 0.985)
"""What is tried of a limit that is enough. On other cuts less may be."""

OnDevices = Callable[[Topology], Trial]
"""Finds the best trial on other devices."""


def refuse_on_its_stages(trial: Trial, base: StagedGraph, search: Callable[[StagedGraph], Trial]) -> None:
    """Raise InfeasibleError if a trial lacks memory whose stages, those of ``base``, are settled.

    ``search`` finds the best trial on these stages, for any devices.
    """
    where = " on the stages that the first call has settled"
    refuse(trial, lambda topology: search(base.on(topology)), where)


def refuse(trial: Trial, search: OnDevices, where: str = "") -> None:
    """Raise InfeasibleError if the trial lacks memory."""
    topology, more, found = trial.staged.options.topology, 0, trial
    for _ in range(_ATTEMPTS):
        if not any(found.excess):
            break
        more += math.ceil(max(found.excess))
        found = search(_with_more(topology, more))
    if more:
        enough = "" if any(found.excess) else _enough(topology, _least(topology, more, search), where)
        raise infeasible(trial, enough)


def _least(topology: Topology, more: int, search: OnDevices) -> int:
    """The least that was found to be enough besides what devices have, where so much ``more`` is."""
    for share in _SHARES:
        most = max(device.memory_bytes for device in topology.devices) + more
        less = more - math.ceil((1 - share) * most)
        if less > 0 and not any(search(_with_more(topology, less)).excess):
            more = less
    return more


def _with_more(topology: Topology, more: int) -> Topology:
    return topology.reserving([-more] * len(topology.devices))


def infeasible(trial: Trial, enough: str = "") -> InfeasibleError:
    """The error for a trial that lacks memory."""
    options = trial.staged.options
    limits = [device.memory_bytes for device in options.topology.devices]
    instead = "" if options.recompute == "auto" else ", recompute='auto'"
    instead += "" if options.offloads or trial.overlaps else ", offload='activations'"
    return InfeasibleError(
        f"{shortfall(trial.memory, limits, trial.plan.placement)}\n{enough}"
        f"Use more devices, more microbatches of fewer rows{instead}, or a higher limit."
    )


def _enough(topology: Topology, more: int, where: str) -> str:
    """The smallest limit that was found to be enough, to the byte."""
    limits = {device.memory_bytes for device in topology.devices}
    if len(limits) > 1:
        return f"With {more} bytes ({format_bytes(more)}) more on each device it would fit{where}.\n"
    limit = math.ceil(limits.pop()) + more
    return f"The smallest limit found to be enough{where} is memory_limit={limit} ({format_bytes(limit)}).\n"
