"""All options of ``pipec.compile``: type, default, check, meaning.

The arguments and the documentation of ``compile``, the comparison of ranks, the record in artifacts and the
flags of the command line follow from it. It imports no torch. ``help(pipec.compile)`` prints annotations as
they are written here.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pipec.ir import NonFiniteAction, Precision, ShardingLevel
from pipec.ir.argument_checks import (
    DEVICES,
    FUNCTION,
    KERNELS,
    MICROBATCH_WEIGHT,
    MOST_MICROBATCHES,
    MOST_RANKS,
    NONE,
    OPTIMIZER,
    SECONDS,
    ArgumentRule,
    check_arguments,
    instance,
    integer_between,
    number,
    one_of,
)

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import DeviceMesh, ProcessGroup
    from torch.optim import Optimizer

    from pipec.cost.profile import Profile
    from pipec.hardware.devices import DeviceModel
    from pipec.hardware.topology import Topology
    from pipec.ir import Schedule

T = TypeVar("T")
ModelT = TypeVar("ModelT")
P = ParamSpec("P")


@dataclass(frozen=True)
class Flag:
    """The flag of an option on the command line.

    ``reads`` converts its text; None: the text is one of the choices of the option's rule. Commands that plan
    have the flag if it ``plans``.
    """

    help: str
    reads: type | None = None
    metavar: str | None = None
    plans: bool = True


@dataclass(frozen=True)
class Option:
    """The rule, documentation and flag of an option.

    All ranks must pass the same value if it is ``compared``.
    """

    rule: ArgumentRule
    meaning: str
    flag: Flag | None = None
    compared: bool = True


def option(
    default: T, rule: ArgumentRule, meaning: str, *, flag: Flag | None = None, compared: bool = True
) -> T:
    """A field of ``Options``, which to a type checker is its default."""
    declared = {"option": Option(rule, meaning, flag, compared)}
    return field(default=default, metadata=declared)


def _made_by(expected: str, module: str, name: str) -> ArgumentRule:
    """An object of a class that is imported only where a value has to be checked."""
    return ArgumentRule(expected, lambda x: isinstance(x, getattr(importlib.import_module(module), name)))


def _is_group(value: object) -> bool:
    return bool(importlib.import_module("pipec.runtime.processes.launch").is_group(value))


_FILE = instance("the path of its file", str, Path)

GRADIENT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Torch's names for what ``gradient_dtype`` takes."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``compile`` besides the model.

    Raises InputError for a value that breaks its rule; ``api_arguments`` checks combinations.
    """

    devices: int | Sequence[str | device] | None = option(
        None,
        DEVICES | NONE,
        """The number of ranks, or a list with the device of each. Under ``torchrun`` each process is one
        rank. Default: one rank for each process; without ``torchrun``, one for each GPU, or one.""",
    )
    _: KW_ONLY
    loss_fn: Callable[..., Any] | str | int | tuple[str | int, ...] | None = option(
        None,
        FUNCTION
        | instance("the key, attribute or position of the loss, or a tuple of them", str, int, tuple)
        | NONE,
        """``loss_fn(output, target)``, which returns the loss, or ``(loss, logs)`` with a dict of tensors
        that ``step`` keeps in ``logs``. A key, attribute or position, or a tuple such as ``(1, "total")``,
        names the loss among the model's results. Default: pipec finds the loss in what the model returns.""",
    )
    schedule: str | Path | Callable[[int, int], Schedule] = option(
        "1f1b",
        instance("the name of a schedule, the path of a CSV file of compute orders", str, Path) | FUNCTION,
        """The name of a schedule such as ``"zb-h1"``, ``"auto"`` for the fastest one that fits, or
        ``"auto-async"`` for the fastest one with asynchronous schedules; a CSV file of compute orders, such
        as ``"order.csv"``; or a function of the numbers of ranks and microbatches. See docs/schedules.md.""",
        flag=Flag("A name such as 1f1b or zb-h1, auto, auto-async, or a .csv file of compute orders.", str),
    )
    microbatches: int | None = option(
        None,
        integer_between(1, MOST_MICROBATCHES) | NONE,
        """The number of microbatches in a mini-batch. Default: the number with the fastest simulated step
        within the memory limit.""",
        flag=Flag("Microbatches in a mini-batch; default: the fastest number found.", int),
    )
    stages: int | None = option(
        None,
        integer_between(1, MOST_RANKS) | NONE,
        """The number of stages of a pipeline. With fewer stages than devices, several pipelines share each
        mini-batch and sum their gradients: ``stages=1`` is data parallelism. Default: one pipeline on all
        devices. See docs/replicas.md.""",
        flag=Flag("Stages of a pipeline; with fewer stages than devices, stages have replicas.", int),
    )
    replicas: int | tuple[int, ...] | str = option(
        1,
        integer_between(1, MOST_RANKS) | one_of("auto") | instance("a tuple of the numbers", tuple),
        """The number of ranks that share each stage. A tuple such as ``(3, 2, 1)`` has one number for each
        stage, under ``1f1b`` or ``pipedream``; ``"auto"`` chooses the fastest. Default: 1. See
        docs/replicas.md.""",
        flag=Flag("Ranks that share a stage: 2, one number for each stage such as 3-2-1, or auto.", str),
    )
    optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer | Sequence[Optimizer]] | None = option(
        None,
        OPTIMIZER | NONE,
        """A function from ``(name, parameter)`` pairs to an optimizer, such as
        ``functools.partial(torch.optim.AdamW, lr=1e-3)``. Each step then ends with an update. Default: the
        script makes its own optimizer of ``pipe.parameters()``. See docs/optimizers.md.""",
        flag=Flag(
            "Update in each step, with a class of torch.optim such as AdamW, or module:factory.",
            str,
            metavar="NAME",
        ),
    )
    clip_grad_norm: float | None = option(
        None,
        number(0, math.inf) | NONE,
        """With ``optimizer``, the largest norm of all gradients together; under an asynchronous schedule,
        of each stage's gradients. Default: no clipping. See docs/optimizers.md.""",
        flag=Flag("The largest norm of all gradients together.", float),
    )
    shard: str | None = option(
        None,
        one_of(*map(str, ShardingLevel), "auto") | NONE,
        """With ``optimizer``, the tensors that replicas divide: ``"optimizer"`` its state, ``"gradients"``
        also gradients, ``"parameters"`` also parameters (ZeRO 1, 2 and 3). ``"auto"`` chooses the fastest
        that fits. Default: nothing is divided. See docs/replicas.md.""",
        flag=Flag("The tensors that replicas divide: state, also gradients, also parameters."),
    )
    gradient_dtype: str | None = option(
        None,
        one_of(*GRADIENT_DTYPES) | NONE,
        """``"bf16"`` or ``"fp16"`` for messages and sums of gradients between replicas. Default: the
        gradients' own type. See docs/replicas.md.""",
        flag=Flag("The type of gradients between replicas."),
    )
    on_nan: str = option(
        "ignore",
        one_of("ignore", *map(str, NonFiniteAction)),
        """The reaction to a loss or gradients that are not finite: ``"raise"`` raises NonFiniteError on all
        ranks, ``"skip"`` skips the update and counts it in ``pipe.num_skipped``. Default: ``"ignore"``,
        nothing is checked. See docs/optimizers.md.""",
        flag=Flag("The reaction to a loss or gradients that are not finite."),
    )
    batch: str = option(
        "same",
        one_of("same", "rank0", "local"),
        """The batch that each rank passes to ``step`` under ``torchrun``. ``"same"``, the default: the same
        mini-batch, which every step compares. ``"rank0"``: only rank 0's batch is used; the other ranks may
        pass nothing. ``"local"``: the rows of its replica. See docs/replicas.md.""",
    )
    batched: Mapping[str | int, Any] | None = option(
        None,
        instance("a dict of arguments to a dimension, a pattern such as '(t b)', or None", Mapping) | NONE,
        """The batch dimension of arguments of ``step``, by name or position, such as ``{"x": 1}``; None for
        an argument that every microbatch needs whole; ``"(t b)"`` for a batch that is merged with another
        dimension. Default: dimension 0 of every argument with as many rows as the batch. See
        docs/batch.md.""",
    )
    microbatch_weight: str | Callable[..., Any] | None = option(
        None,
        MICROBATCH_WEIGHT | NONE,
        """The weight of a microbatch's loss in the loss of the batch: ``"rows"`` for its number of rows,
        ``"sum"`` to add losses, or a function of the microbatch's arguments. Default: pipec reads it off the
        graph, and warns where it cannot. See docs/batch.md.""",
    )
    check: str | int = option(
        "first",
        one_of("first", "off", "always") | integer_between(1, MOST_MICROBATCHES),
        """The steps before which a few rows are run by the pipeline and by the model in eager torch, and
        compared. ``"first"``, the default: the first step of each kind of call; ``"always"``: every step;
        ``100``: also every hundredth step; ``"off"``: none. See docs/batch.md.""",
        flag=Flag("Whether the first step is compared with the model in eager torch."),
    )
    precision: str | None = option(
        None,
        one_of(*map(str, Precision)) | NONE,
        """``"bf16-mixed"`` or ``"fp16-mixed"`` computes as ``torch.autocast`` does, with weights and
        gradients in float32; ``"fp16-mixed"`` scales the loss and needs ``optimizer``. Default: the model's
        own types. See docs/precision.md.""",
        flag=Flag("Compute with 16 bits beside float32 weights."),
    )
    kernels: str = option(
        "source",
        KERNELS,
        """``"source"``, the default, runs the generated Python of each stage; ``"inductor"`` compiles it
        with torch's inductor, which sums in another order. See docs/tasks/slow.md.""",
        flag=Flag("Run stages as their source, or compiled by inductor.", plans=False),
    )
    recompute: str = option(
        "auto",
        one_of("auto", "none", "full"),
        """``"auto"``, the default, recomputes only what does not fit into ``memory_limit``; ``"none"`` saves
        every value that the backward reads; ``"full"`` saves only what a stage receives. See
        docs/recompute.md.""",
        flag=Flag("auto recomputes only what does not fit into --memory-limit."),
    )
    memory_limit: int | str | None = option(
        None,
        number(1, 2**63 - 1) | instance("text such as '16GiB'", str) | NONE,
        """Bytes for each device, or text such as ``"16GiB"``; the state of ``optimizer`` counts. Default: the
        memory of a GPU without what CUDA needs; no limit on a CPU. See docs/memory.md.""",
        flag=Flag("Bytes for each device, such as 16GiB.", str),
    )
    offload: str | None = option(
        None,
        one_of("activations", "optimizer", "weights", "all") | NONE,
        """The tensors that wait in host memory: ``"activations"``, as few saved values as ``memory_limit``
        needs; ``"optimizer"``, its state between updates; ``"weights"``, also gradients and the weights of
        stages that do not run; ``"all"``, weights and activations. Default: none; on a GPU ``"weights"``, if
        nothing else fits. See docs/memory.md.""",
        flag=Flag("The tensors that wait in host memory."),
    )
    topology: Topology | str | Path | None = option(
        None,
        _made_by("a pipec.Topology", "pipec.hardware.topology", "Topology") | _FILE | NONE,
        """The speed and memory of the devices and the links between them, or the path of a topology file.
        Default: equal devices on the hosts of the ranks. See docs/planner.md.""",
        flag=Flag("A file with the speed and memory of the devices and the links between them.", Path),
    )
    costs: Profile | DeviceModel | str | Path | None = option(
        None,
        _made_by("a pipec.Profile", "pipec.cost.profile", "Profile")
        | _FILE
        | _made_by("what pipec.calibrate returns", "pipec.hardware.devices", "DeviceModel")
        | NONE,
        """Measured times to plan by: the result of ``pipec.profile`` or ``pipec.calibrate``, or the path of
        a profile. Default: a table of devices. See docs/planner.md.""",
        flag=Flag("A profile, from `pipec profile`; or calibrate, to measure this device first.", str),
        compared=False,
    )
    weights: str | Path | None = option(
        None,
        instance("the path of a folder", str, Path) | NONE,
        """The folder of a transformers model's weights, as ``save_pretrained`` writes it, for a model on the
        meta device: each rank reads the weights of its own stages. Default: the model's own values. See
        docs/checkpoints.md.""",
    )
    group: ProcessGroup | DeviceMesh | None = option(
        None,
        ArgumentRule("a process group of torch, or a DeviceMesh", _is_group) | NONE,
        """The processes that are the ranks: a ``torch.distributed`` process group; or a ``DeviceMesh`` with
        one axis, or with two, ``"pp"`` for stages and one for replicas. Only they call ``compile``. Default:
        all processes. See docs/start/ranks.md.""",
        compared=False,
    )
    timeout: float = option(
        300.0,
        SECONDS,
        """Seconds to wait for another process before giving it up. Default: 300. See docs/reliability.md.""",
        compared=False,
    )

    def __post_init__(self) -> None:
        check_arguments({name: each.rule for name, each in OPTIONS.items()}, vars(self))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options of a call of ``compile``. Raises TypeError for a name that no option has."""
        for name in given:
            if name not in OPTIONS:
                close = get_close_matches(name, OPTIONS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "help(pipec.compile) lists those it has"
                raise TypeError(f"compile() got an unexpected keyword argument {name!r}; {hint}")
        return cls(**given)


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}
"""The declaration of each option, in the order of the arguments of ``compile``."""


def takes_options(
    options: Callable[P, Options],
) -> Callable[[Callable[Concatenate[ModelT, ...], T]], Callable[Concatenate[ModelT, P], T]]:
    """Give a function of a model and ``**options`` the signature and the documentation of the options.

    In its docstring they take the place of ``{options}``.
    """

    def document(function: Callable[Concatenate[ModelT, ...], T]) -> Callable[Concatenate[ModelT, P], T]:
        own = inspect.signature(function)
        declared = inspect.signature(options).parameters
        parameters = [next(iter(own.parameters.values())), *declared.values()]
        function.__signature__ = _ReadableSignature(  # type: ignore[attr-defined]
            [each.replace(annotation=_ReadableType(each.annotation)) for each in parameters],
            return_annotation=_ReadableType(own.return_annotation),
        )
        meanings = (f"{name}: {_indented(each.meaning)}" for name, each in OPTIONS.items())
        function.__doc__ = (function.__doc__ or "").replace("{options}", "\n        ".join(meanings))
        return function

    return document


class _ReadableSignature(inspect.Signature):
    """Prints a parameter a line, as ``help`` does by itself since Python 3.13."""

    def __str__(self) -> str:
        lines = [str(each) for each in self.parameters.values()]
        keyword_only = [each.kind is each.KEYWORD_ONLY for each in self.parameters.values()]
        lines.insert(keyword_only.index(True), "*")
        return "(\n    {}\n) -> {}".format(",\n    ".join(lines), self.return_annotation)


class _ReadableType(str):
    """A type as its source has it, without quotes; a class by its name alone."""

    def __new__(cls, annotation: Any) -> _ReadableType:
        return super().__new__(cls, annotation if isinstance(annotation, str) else annotation.__name__)

    __repr__ = str.__str__


def _indented(meaning: str) -> str:
    return "\n            ".join(line.strip() for line in meaning.splitlines())
