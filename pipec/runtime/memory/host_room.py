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
    counts = [len({*ranks} & {*placed}) for placed in plan.placement]
    sync_spec, weights, missing, gradients = plan.sync_spec, 0.0, 0.0, 0.0
    for bucket in filter(sync_spec.is_in_host_memory, sync_spec.buckets):
        sizes = {value.name: value_bytes(value, {}) for value in bucket.parameters}
        own = counts[bucket.stage] * (bucket.shard_bytes or sum(sizes.values()))
        weights += own
        gradients += own * bucket.trained
        absent = sum(size for name, size in sizes.items() if name not in present)
        missing += own * absent / max(sum(sizes.values()), 1)
    if not weights:
        return
    kept = sum(n * stage.cost.memory.host for n, stage in zip(counts, plan.stages, strict=True))
    state = kept - weights
    needed = gradients + state + missing
    available = available_bytes()
    if available is not None and needed > available:
        raise InfeasibleError(
            f"offload keeps {format_bytes(weights)} of weights, {format_bytes(gradients)} of gradients and "
            f"{format_bytes(state)} of optimizer state in host memory. {format_bytes(needed)} of that are "
            f"not allocated yet, but the host has {format_bytes(available)} left. Train fewer parameters, "
            "take an optimizer with less state, weights of a smaller type, or more hosts"
        )
