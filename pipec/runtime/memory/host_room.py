"""Whether the host has room for the weights, gradients and optimizer state that a plan keeps there."""

from collections.abc import Collection
from pathlib import Path

from pipec.errors import InfeasibleError
from pipec.ir import Plan
from pipec.ir.text_format import format_bytes, value_bytes


def available_bytes() -> float | None:
    """The memory that the host can still give to processes, in bytes; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def require_host_memory(plan: Plan, ranks: Collection[int], present: Collection[str]) -> None:
    """Raise InfeasibleError if the host has no room for what these ranks will keep there.

    The weights that are ``present`` by FQN have their memory already.
    """
    stages = [stage for stage, placed in enumerate(plan.placement) if not {*ranks}.isdisjoint(placed)]
    loaded = [bucket for bucket in plan.sync_spec.buckets if bucket.on_host and bucket.stage in stages]
    if not loaded:
        return
    sizes = {value.name: value_bytes(value, {}) for bucket in loaded for value in bucket.parameters}
    weights = sum(sizes.values())
    gradients = sum(sizes[name] for bucket in loaded if bucket.trained for name in bucket.names)
    state = sum(plan.stages[stage].cost.memory.host for stage in stages) - weights
    needed = gradients + state + sum(size for name, size in sizes.items() if name not in present)
    available = available_bytes()
    if available is not None and needed > available:
        raise InfeasibleError(
            f"offload keeps {format_bytes(weights)} of weights, {format_bytes(gradients)} of gradients and "
            f"{format_bytes(state)} of optimizer state in host memory. {format_bytes(needed)} of that are "
            f"not allocated yet, but the host has {format_bytes(available)} left. Train fewer parameters, "
            "take an optimizer with less state, weights of a smaller type, or more hosts"
        )
