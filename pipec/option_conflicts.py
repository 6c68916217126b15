"""Options that do not go together, or not with the schedule or the devices."""

import math

from pipec.compiler.schedule_policy import SchedulePolicy
from pipec.errors import InputError
from pipec.hardware.topology import Topology
from pipec.ir import Precision
from pipec.options import Options


def check_conflicts(
    options: Options, policy: SchedulePolicy, microbatches: int | None, topology: Topology
) -> None:
    """Raise InputError for options of which one excludes or needs another one.

    ``microbatches`` is how many were asked for, or a file of orders sets.
    """
    if policy.may_be_asynchronous:
        _check_asynchronous(options, policy)
    if options.batch == "local":
        _check_local_batch(options, policy, microbatches)
    if options.offload is not None:
        _check_offload(options, policy, topology)
    if options.optimizer is None:
        _check_without_optimizer(options)


def _check_local_batch(options: Options, policy: SchedulePolicy, microbatches: int | None) -> None:
    """Refuse what replicas that pass their own parts of a batch cannot do."""
    if options.replicas == "auto" or not isinstance(policy.replicas, int):
        raise InputError(
            f'replicas is {options.replicas!r}; batch="local" needs one number, so that it is known '
            "beforehand which rank passes which part. Pass stages=... or replicas=2, say"
        )
    if microbatches and microbatches % policy.replicas:
        raise InputError(
            f'microbatches is {microbatches}; with batch="local" each of the {policy.replicas} replicas '
            f"splits its own part, so pass a multiple of {policy.replicas}"
        )
    if callable(options.microbatch_weight):
        raise InputError(
            'microbatch_weight is a function, which batch="local" would call with the rows of one replica '
            'alone; pass "rows" or "sum", or divide by a count over the batch that the model or loss_fn takes'
        )


def _check_asynchronous(options: Options, policy: SchedulePolicy) -> None:
    """Refuse options that need a synchronous schedule, if the schedule may be asynchronous."""
    name = f"schedule {options.schedule!r}"
    if options.optimizer is None:
        raise InputError(
            f"{name} updates each stage after every mini-batch, and so makes the updates itself; pass "
            "optimizer=..., such as functools.partial(torch.optim.AdamW, lr=1e-3), or take schedule='1f1b'"
        )
    if options.shard is not None:
        raise InputError(
            f"{name} updates a stage while its replicas still use other versions of the weights, which "
            f"shard={options.shard!r} cannot hold; leave shard out, or pass schedule='1f1b'"
        )
    if options.precision == Precision.FP16:
        raise InputError(
            f"{name} updates a stage before it is known whether gradients of other stages overflow, but "
            "precision='fp16-mixed' must skip all updates then; pass precision='bf16-mixed', or "
            "schedule='1f1b'"
        )
    if options.on_nan == "skip":
        raise InputError(
            f"{name} begins mini-batches before it is known whether the previous one is skipped; pass "
            "on_nan='raise', which ends the stream before it, or schedule='1f1b'"
        )
    if options.on_nan == "raise" and (options.replicas == "auto" or policy.replicas != 1):
        raise InputError(
            f"{name} updates a stage with replicas once for several mini-batches, so that the update of one "
            "mini-batch whose loss is NaN cannot be skipped; leave out on_nan, or pass schedule='1f1b'"
        )
    if options.batch != "same":
        raise InputError(
            f"{name} needs the same batches on every rank, because ranks read them ahead of each other, but "
            f"batch is {options.batch!r}; pass the same batches on every rank, or schedule='1f1b'"
        )


def _check_offload(options: Options, policy: SchedulePolicy, topology: Topology) -> None:
    """Refuse to keep state or saved values on the host where they cannot be there, or need not."""
    offload = options.offload
    if offload in ("optimizer", "all") and options.optimizer is None:
        raise InputError(
            f"offload is {offload!r}, but the programs have no optimizer; pass optimizer=..., such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3), or offload='activations'"
        )
    if offload not in ("activations", "all"):
        return
    if policy.may_be_asynchronous:
        raise InputError(
            f"offload is {offload!r}, but under an asynchronous schedule saved values stay on the device; "
            "pass a synchronous schedule, such as schedule='1f1b', or leave offload out"
        )
    if options.recompute == "full":
        raise InputError(
            f"offload is {offload!r}, but recompute='full' saves nothing that could be offloaded; pass "
            "recompute='auto', which chooses both together, or 'none'"
        )
    if all(device.memory_bytes == math.inf for device in topology.devices):
        raise InputError(
            f"offload is {offload!r}, which moves no more than memory asks for; pass the bytes that a device "
            "has, such as memory_limit='16GiB', or a topology that says so"
        )


def _check_without_optimizer(options: Options) -> None:
    """Refuse what concerns updates that the programs do not make."""
    for name in ("clip_grad_norm", "shard"):
        if (value := getattr(options, name)) is not None:
            raise InputError(
                f"{name}={value!r} concerns the updates that a program makes; pass optimizer=..., such "
                "as functools.partial(torch.optim.AdamW, lr=1e-3), or leave it out"
            )
    if options.precision == Precision.FP16:
        raise InputError(
            "precision='fp16-mixed' leaves an update out on all ranks where a gradient overflows, and an "
            "optimizer of your own would make it; pass optimizer=..., such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3), or take precision='bf16-mixed'"
        )
