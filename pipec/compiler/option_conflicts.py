"""Options of a compiled model that do not go together."""

import math
from collections.abc import Iterable

from pipec.compiler.schedule_policy import SchedulePolicy
from pipec.errors import InputError
from pipec.ir import Precision


def check_local_batch_options(
    policy: SchedulePolicy, replicas: object, microbatches: int | None, weight: object
) -> None:
    """Refuse what replicas that pass their own parts of a batch cannot do."""
    if replicas == "auto" or not isinstance(policy.replicas, int):
        raise InputError(
            f'replicas is {replicas!r}; batch="local" needs one number, so that it is known beforehand which '
            "rank passes which part. Pass stages=... or replicas=2, say"
        )
    if microbatches and microbatches % policy.replicas:
        raise InputError(
            f'microbatches is {microbatches}; with batch="local" each of the {policy.replicas} replicas '
            f"splits its own part, so pass a multiple of {policy.replicas}"
        )
    if callable(weight):
        raise InputError(
            'microbatch_weight is a function, which batch="local" would call with the rows of one replica '
            'alone; pass "rows" or "sum", or divide by a count over the batch that the model or loss_fn takes'
        )


def check_asynchronous_options(
    policy: SchedulePolicy,
    may_replicate: bool,
    updates: bool,
    shard: str | None,
    batch: str,
    on_nan: str,
    precision: Precision | None,
) -> None:
    """Raise InputError if a schedule without a flush is to do what needs one.

    ``may_replicate`` tells whether the search may give stages replicas that the policy has not.
    """
    if not policy.may_be_asynchronous:
        return
    name = f"schedule {policy.source!r}" + " with asynchronous=True" * policy.asynchronous
    if not updates:
        raise InputError(
            f"{name} updates each stage after every mini-batch, and so makes the updates itself; pass "
            "optimizer=..., such as functools.partial(torch.optim.AdamW, lr=1e-3), or take schedule='1f1b'"
        )
    if shard is not None:
        raise InputError(
            f"{name} updates a stage while replicas of it still use other versions of its weights, of which "
            f"shard={shard!r} would leave each a share; leave it out, or take schedule='1f1b'"
        )
    if precision is Precision.FP16:
        raise InputError(
            f"{name} updates a stage before it is known whether gradients of others overflow, for which "
            "precision='fp16-mixed' leaves out all updates; take precision='bf16-mixed', or "
            "schedule='1f1b'"
        )
    if on_nan == "skip":
        raise InputError(
            f"{name} begins with mini-batches before it is known whether the one before is to be skipped; "
            "pass on_nan='raise', which ends the stream with those before it, or take schedule='1f1b'"
        )
    if on_nan == "raise" and (may_replicate or policy.replicas != 1):
        raise InputError(
            f"{name} updates a stage with replicas once for several mini-batches, so that no update could be "
            "left out for one whose loss is NaN alone; leave out on_nan, or take schedule='1f1b'"
        )
    if batch != "same":
        raise InputError(
            f"{name} lets ranks read batches ahead of each other, each its own, but batch is {batch!r}; pass "
            "the same batches on every rank, or take schedule='1f1b'"
        )


def check_offload_options(
    offload: str | None, recompute: str, memory_limits: Iterable[float], flushes: bool, updates: bool
) -> None:
    """Raise InputError if state or saved values are to wait on the host where they cannot, or need not."""
    if offload in ("optimizer", "all") and not updates:
        raise InputError(
            f"offload is {offload!r}, but the programs have no optimizer; pass optimizer=..., such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3), or offload='activations'"
        )
    if offload not in ("activations", "all"):
        return
    if not flushes:
        raise InputError(
            f"offload is {offload!r}, but without a flush what was saved stays on the device; take a "
            "schedule with a flush, such as schedule='1f1b', or leave it out"
        )
    if recompute == "full":
        raise InputError(
            f"offload is {offload!r}, but recompute='full' saves nothing that could wait on the host; take "
            "recompute='auto', which chooses both together, or 'none'"
        )
    if all(limit == math.inf for limit in memory_limits):
        raise InputError(
            f"offload is {offload!r}, which moves no more than memory asks for; pass the bytes that a device "
            "has, such as memory_limit='16GiB', or a topology that says so"
        )


def check_fused_gradient_options(precision: Precision | None) -> None:
    """Raise InputError if products are of another type than the sums that they are to be added to."""
    if precision is not None:
        raise InputError(
            f"fused_gradients adds products of weights' own type to sums of that type, but with precision="
            f"{str(precision)!r} products have 16 bits and sums 32; leave out one of the two"
        )
