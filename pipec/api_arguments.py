"""The arguments of the front door: an example, what options stand for, and which do not go together."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipec.capture.batch_inputs import BatchedOption
from pipec.capture.model_loss import LossKey, LossPath
from pipec.compiler.schedule_policy import SchedulePolicy
from pipec.errors import InputError
from pipec.hardware.devices import DeviceModel
from pipec.hardware.gpus import gpu_topology
from pipec.hardware.topology import Topology, equal_devices, read_topology
from pipec.ir import Precision, ShardingLevel
from pipec.ir.argument_checks import (
    DEVICE,
    NONE,
    check_arguments,
    instance,
    integer_between,
    short_repr,
)
from pipec.options import OPTIONS, Options
from pipec.runtime.absent_tensors import is_absent
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_argument,
    describe_differences,
    describe_tensor,
)
from pipec.runtime.messages.nccl import MAX_CTAS
from pipec.runtime.processes.launch import World
from pipec.runtime.step.ranks import Ranks


@dataclass(frozen=True)
class Example:
    """A model with one mini-batch: what a factory returns that the command line is pointed at."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[..., Any] | LossKey | LossPath | None = None
    batched: BatchedOption | None = None

    def __post_init__(self) -> None:
        check_arguments(EXAMPLE_FIELDS, vars(self))


MODEL = instance("an nn.Module", nn.Module)

EXAMPLE_FIELDS = {
    "model": MODEL,
    "args": instance("a tuple of the model's arguments", tuple, list),
    "kwargs": instance("a dict of the model's keyword arguments", Mapping),
    "loss_fn": OPTIONS["loss_fn"].rule,
    "batched": OPTIONS["batched"].rule,
}
"""What each field of an ``Example`` must be."""

PROFILE_ARGUMENTS = {
    "example": instance("a pipec.Example", Example),
    "microbatch_size": integer_between(1, 2**63 - 1) | NONE,
    "device": DEVICE,
    "repeats": integer_between(1, 10**6),
    "ranks": integer_between(1, 1024),
    "precision": OPTIONS["precision"].rule,
}
"""What each argument of ``profile`` must be."""


def require_same_options(ranks: Ranks, model: nn.Module, options: Options) -> None:
    """Check that every rank was given the same options and a model of the same structure."""
    compared = {name: getattr(options, name) for name, each in OPTIONS.items() if each.compared}
    if isinstance(options.topology, str):
        compared["topology"] = Path(options.topology)  # whose contents count
    call_description = {name: describe_argument(value) for name, value in compared.items()}
    ranks.exchange.require_same_call(
        "calling pipec.compile", {**call_description, **_model_facts(model)}, _other_arguments
    )


def refuse_scripted(model: nn.Module) -> None:
    """Raise InputError if a module of the model is TorchScript, whose code is not Python."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{path or 'the model'} is a {type(module).__name__} of torch.jit.script or torch.jit.trace, "
                "whose code pipec cannot capture: it has no Python left. Pass the module that was scripted, "
                "as it was before"
            )


def _model_facts(model: nn.Module) -> CallDescription:
    """The tensors that a model has, without their values.

    Raises:
        InputError: some of the values are on other ranks, where another pipeline has left them.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if absent := [name for name, tensor in tensors if is_absent(tensor)]:
        raise InputError(
            f"{absent[0]} and {len(absent) - 1} other tensors of the model are on other ranks, for it is the "
            "model of another pipeline; every rank calls gather_into(model, all_ranks=True) of that pipeline "
            "first, or makes the model again"
        )
    kinds = {name: f"{describe_tensor(x)}{', trained' * x.requires_grad}" for name, x in tensors}
    return {"model": type(model).__qualname__, **kinds}


def _other_arguments(every: Sequence[CallDescription]) -> str:
    return (
        f"the ranks passed different arguments to pipec.compile:\n{describe_differences(every)}\nEvery rank "
        "passes the same; see what in the script depends on the rank, the environment or a random state"
    )


def with_replicas_of_mesh(options: Options, here: World) -> Options:
    """The options with as many replicas as an axis of a mesh has. Raises InputError for other ones."""
    if here.replicas is None:
        return options
    if options.stages is not None or options.replicas not in (1, here.replicas):
        raise InputError(
            f"the mesh has {here.replicas} replicas of {here.size // here.replicas} ranks, but stages is "
            f"{options.stages!r} and replicas is {options.replicas!r}; leave both out, or pass a mesh of one "
            "axis, or its group"
        )
    return replace(options, replicas=here.replicas)


def recorded_options(options: Options) -> dict[str, Any]:
    """The options as an artifact records them: plain values as they are, functions and others by name."""
    return {name: _recorded(getattr(options, name)) for name in OPTIONS}


def _recorded(value: object) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            return [_recorded(each) for each in value]
        case Mapping():
            return {str(key): _recorded(each) for key, each in value.items()}
        case functools.partial():
            arguments = [*value.args, *(f"{name}={each!r}" for name, each in value.keywords.items())]
            return f"partial({', '.join(map(str, [_recorded(value.func), *arguments]))})"
        case float() | Path() | torch.device():
            return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def resolve_topology(
    given: Topology | str | Path | None, ranks: Ranks, model: DeviceModel, elastic: bool = False
) -> Topology:
    """What was given or is in the file, else as many devices as there are ranks, joined as ``model`` is.

    Where the number of ranks shrinks, being ``elastic``, it is as many of the devices that were given. Other
    processes that were started with this one call this too.

    Raises InputError for another number of devices, PlanError for a malformed file.
    """
    num_ranks = ranks.count
    if given is None:
        hosts = ranks.distributed.hosts if ranks.world.is_distributed else [0] * num_ranks
        if all(device.type == "cuda" for device in ranks.devices.values()):
            return gpu_topology(hosts, model, MAX_CTAS if ranks.has_gpu_messages else None)
        return equal_devices(num_ranks, model.link)
    topology = given if isinstance(given, Topology) else read_topology(Path(given))
    if elastic and len({*topology.devices}) == 1 and num_ranks < len(topology.devices):
        return topology.first_devices(num_ranks)
    if len(topology.devices) != num_ranks:
        raise InputError(
            f"the topology has {len(topology.devices)} devices, but there are {num_ranks} ranks; "
            f"list {num_ranks} devices, or pass devices={len(topology.devices)}"
        )
    return topology


def parse_bytes(text: str) -> int:
    """``"16GiB"``, ``"500 MB"`` or ``"1e9"`` as a number of bytes. Raises InputError."""
    match = re.fullmatch(
        r"\s*(\d{1,20}(?:\.\d{0,20})?(?:e\d{1,2})?)\s*([kmgt]?)(i?)b?\s*", text.lower(), re.A
    )
    amount = 0.0
    if match:
        number, prefix, binary = match.groups()
        amount = float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix or " "))
    if not 1 <= amount < 2**63:
        raise InputError(
            f"memory_limit is {short_repr(text)}; expected a number of bytes or text such as '16GiB' or "
            "'500MB'"
        )
    return int(amount)


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
    if offload in ("weights", "all"):
        _check_weights_on_host(options, policy)
    if offload == "optimizer" and options.optimizer is None:
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


def _check_weights_on_host(options: Options, policy: SchedulePolicy) -> None:
    """Refuse weights in host memory that each replica would hold, or that are updated while they are read."""
    offload = options.offload
    if policy.may_be_asynchronous:
        raise InputError(
            f"offload is {offload!r}, but under an asynchronous schedule stages keep several versions of "
            "their weights on the device; pass a synchronous schedule, such as schedule='1f1b', or leave out "
            "offload"
        )
    has_replicas = options.replicas == "auto" or policy.replicas != 1
    if has_replicas and options.shard != ShardingLevel.PARAMETERS:
        raise InputError(
            f"offload is {offload!r}, but each replica of a stage would hold and update all of its weights "
            "in host memory; pass shard='parameters', which divides them, or leave out replicas and stages, "
            "so that all devices load stages in turn"
        )
    if options.shard is not None and not has_replicas:
        raise InputError(
            f"offload is {offload!r}, but shard={options.shard!r} divides what replicas hold, and stages "
            "have none; leave shard out, or pass replicas=..."
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
