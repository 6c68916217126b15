"""The arguments of the front door: what each must be, what it means, and that all ranks pass the same."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pipec.capture.batch_inputs import BatchedOption
from pipec.cost.profile import Profile
from pipec.errors import InputError
from pipec.hardware.devices import DeviceModel, LinkModel
from pipec.hardware.topology import Topology, equal_devices, read_topology
from pipec.ir import NonFiniteAction, Precision, ShardingLevel
from pipec.ir.argument_checks import (
    FLAG,
    FUNCTION,
    MOST_MICROBATCHES,
    MOST_RANKS,
    NONE,
    SECONDS,
    ArgumentRule,
    check_arguments,
    instance,
    integer_between,
    number,
    one_of,
    short_repr,
)
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_argument,
    describe_differences,
    describe_tensor,
)
from pipec.runtime.processes.launch import DEVICE, DEVICES
from pipec.runtime.stages.kernels import KERNELS
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.microbatch_weight import WEIGHT_NAMES

GRADIENT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Example:
    """A model with one mini-batch: what a factory returns that the command line is pointed at."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[..., Any] | None = None
    batched: BatchedOption | None = None

    def __post_init__(self) -> None:
        check_arguments(EXAMPLE_FIELDS, vars(self))


_PRECISION = one_of(*map(str, Precision)) | NONE
_BATCHED = instance("a dict of arguments to a dimension, a pattern such as '(t b)', or None", Mapping) | NONE
_FILE = instance("the path of its file", str, Path)

EXAMPLE_FIELDS = {
    "model": instance("an nn.Module", nn.Module),
    "args": instance("a tuple of the model's arguments", tuple, list),
    "kwargs": instance("a dict of the model's keyword arguments", Mapping),
    "loss_fn": FUNCTION | NONE,
    "batched": _BATCHED,
}
"""What each field of an ``Example`` must be."""

COMPILE_ARGUMENTS = {
    "model": instance("an nn.Module", nn.Module),
    "devices": DEVICES | NONE,
    "loss_fn": FUNCTION | NONE,
    "schedule": instance("the name of a schedule, a Path to a file of compute orders", str, Path) | FUNCTION,
    "microbatches": integer_between(1, MOST_MICROBATCHES) | NONE,
    "stages": integer_between(1, MOST_RANKS) | NONE,
    "replicas": integer_between(1, MOST_RANKS) | one_of("auto") | instance("a tuple of the numbers", tuple),
    "asynchronous": FLAG,
    "optimizer": ArgumentRule("a function such as functools.partial(torch.optim.AdamW, lr=1e-3)", callable)
    | NONE,
    "clip_grad_norm": number(0, math.inf) | NONE,
    "shard": one_of(*map(str, ShardingLevel), "auto") | NONE,
    "gradient_dtype": one_of(*GRADIENT_DTYPES) | NONE,
    "on_nan": one_of("ignore", *map(str, NonFiniteAction)),
    "batch": one_of("same", "rank0", "local"),
    "batched": _BATCHED,
    "microbatch_weight": one_of(*WEIGHT_NAMES) | FUNCTION | NONE,
    "precision": _PRECISION,
    "kernels": one_of(*KERNELS),
    "fused_gradients": FLAG,
    "recompute": one_of("auto", "none", "full"),
    "memory_limit": number(1, 2**63 - 1) | instance("text such as '16GiB'", str) | NONE,
    "offload": one_of("activations", "optimizer", "all") | NONE,
    "topology": instance("a pipec.Topology", Topology) | _FILE | NONE,
    "device_model": instance("what pipec.calibrate returns", DeviceModel) | NONE,
    "profile": instance("a pipec.Profile", Profile) | _FILE | NONE,
    "dynamic": FLAG,
    "timeout": SECONDS,
}
"""What each argument of ``compile`` must be. What the arguments mean together is checked where they meet."""

PROFILE_ARGUMENTS = {
    "example": instance("a pipec.Example", Example),
    "microbatch_size": integer_between(1, 2**63 - 1) | NONE,
    "device": DEVICE,
    "repeats": integer_between(1, 10**6),
    "ranks": integer_between(1, 1024),
    "precision": _PRECISION,
    "progress": FUNCTION,
}
"""What each argument of ``profile`` must be."""


def require_same_arguments(ranks: Ranks, model: nn.Module, **arguments: object) -> None:
    """Check that every rank was given the same arguments and a model of the same structure."""
    call_description = {name: describe_argument(value) for name, value in arguments.items()}
    ranks.agreement.require_same_call(
        "calling pipec.compile", {**call_description, **_model_facts(model)}, _other_arguments
    )


def _model_facts(model: nn.Module) -> CallDescription:
    """The tensors that a model has, without their values."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kinds = {name: f"{describe_tensor(x)}{', trained' * x.requires_grad}" for name, x in tensors}
    return {"model": type(model).__qualname__, **kinds}


def _other_arguments(every: Sequence[CallDescription]) -> str:
    return (
        f"the ranks passed different arguments to pipec.compile:\n{describe_differences(every)}\nEvery rank "
        "passes the same; see what in the script depends on the rank, the environment or a random state"
    )


def resolve_topology(
    given: Topology | str | Path | None, num_ranks: int, link: LinkModel, elastic: bool = False
) -> Topology:
    """What was given or is in the file, else as many devices with the same link between any two.

    Where the number of ranks shrinks, being ``elastic``, it is as many of the devices that were given.

    Raises InputError for another number of devices, PlanError for a malformed file.
    """
    if given is None:
        return equal_devices(num_ranks, link)
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
