"""Every option of ``pipec.compile``, once: its type, its default, what it must be and what it means.

All else is derived from here: the arguments and the documentation of ``compile``, its errors, what ranks
compare, what an artifact records, and the flags of the command line. So this file loads no torch.
Annotations are text, which ``help(pipec.compile)`` prints as it is: types are written out.
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

    Its text is read by ``reads``; None: it is one of the choices of the option's rule, or a switch. Commands
    that plan have the flag if it ``plans``.
    """

    help: str
    reads: type | None = None
    metavar: str | None = None
    plans: bool = True


@dataclass(frozen=True)
class Option:
    """What is declared of an option besides its name, type and default.

    Ranks must pass the same if it is ``compared``; of others rank 0's count, or each rank's own.
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


_FILE = instance("the path of its file", str, Path)

GRADIENT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Torch's names for what ``gradient_dtype`` takes."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``compile`` besides the model, each checked by itself.

    What they mean together is checked in ``option_conflicts``.

    Raises InputError for a value that is not of its kind.
    """

    devices: int | Sequence[str | device] | None = option(
        None,
        DEVICES | NONE,
        """how many ranks, or the device of each. Under ``torchrun`` each process is one rank. None: as
        many ranks as there are processes; in one process alone, as many as it has GPUs, or one.""",
    )
    _: KW_ONLY
    loss_fn: Callable[..., Any] | None = option(
        None,
        FUNCTION | NONE,
        """``loss_fn(output, target)``, one floating-point number; or ``(loss, logs)``, logs being
        tensors by name, per row or reduced, which ``step`` keeps in ``logs``. None: the model returns its
        loss, as a tensor, as ``.loss`` or under ``"loss"``, or as the only number that requires a
        gradient.""",
    )
    loss_key: str | int | tuple[str | int, ...] | None = option(
        None,
        instance("the key, attribute or position of the loss, or a tuple of them", str, int, tuple) | NONE,
        """which of several results of the model is its loss: a key, an attribute, a position, or a tuple of
        these, such as ``(1, "total")`` for ``output[1]["total"]``. None: it is found; an error asks where
        several numbers may be the loss.""",
    )
    schedule: str | Path | Callable[[int, int], Schedule] = option(
        "1f1b",
        instance("the name of a schedule, a Path to a file of compute orders", str, Path) | FUNCTION,
        """a name, such as ``1f1b`` or ``zb-h1``; ``"auto"`` for the fastest one found for the model's
        costs within the memory limit; a ``Path`` to a file of compute orders; or a function of the number
        of ranks and of microbatches that returns a ``Schedule``. See docs/schedules.md. ``pipedream`` and
        its kin have no flush: train with ``pipe.stream``, and see docs/streams.md. ``"auto-async"`` is
        ``"auto"`` among these, too.""",
        flag=Flag("A name such as 1f1b or zb-h1, auto, auto-async, or a .txt file of compute orders.", str),
    )
    microbatches: int | None = option(
        None,
        integer_between(1, MOST_MICROBATCHES) | NONE,
        """how many a mini-batch is split into. None: as many as the simulated step is fastest
        with, within the memory limit.""",
        flag=Flag("How many a mini-batch is split into; default: the fastest found.", int),
    )
    stages: int | None = option(
        None,
        integer_between(1, MOST_RANKS) | NONE,
        """how many each pipeline has. None: as many as the schedule has on all devices. With fewer there
        are several pipelines side by side: they take the microbatches in turn and sum their gradients.
        ``stages=1`` is data parallelism.""",
        flag=Flag("Stages of a pipeline; with fewer than devices, they have replicas.", int),
    )
    replicas: int | tuple[int, ...] | str = option(
        1,
        integer_between(1, MOST_RANKS) | one_of("auto") | instance("a tuple of the numbers", tuple),
        """how many ranks share each stage: 2 makes two pipelines of half as many stages. ``(3, 2, 1)``
        puts the first of three stages on three ranks and so on, under ``1f1b`` or
        ``pipedream``. ``"auto"``: as many as the simulated step is fastest with.""",
        flag=Flag("Ranks that share a stage: 2, those of each stage such as 3-2-1, or auto.", str),
    )
    optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer | Sequence[Optimizer]] | None = option(
        None,
        OPTIMIZER | NONE,
        """makes the optimizer of ``(name, parameter)`` pairs, such as
        ``functools.partial(torch.optim.AdamW, lr=1e-3)``; every step then ends with its update, and
        ``pipe.optimizer`` is there for LR schedulers and checkpoints. See docs/optimizers.md. None: you
        step an optimizer of your own, made of ``pipe.parameters()``.""",
        flag=Flag(
            "Let the program update: a class of torch.optim such as AdamW, or module:factory.",
            str,
            metavar="NAME",
        ),
    )
    clip_grad_norm: float | None = option(
        None,
        number(0, math.inf) | NONE,
        """with ``optimizer``, the most that the norm of the whole model's gradients may be; of
        each stage's, where there is no flush.""",
        flag=Flag("The most that the norm of all gradients may be.", float),
    )
    shard: str | None = option(
        None,
        one_of(*map(str, ShardingLevel), "auto") | NONE,
        """with ``optimizer``, what replicas divide among themselves: ``"optimizer"`` its state,
        ``"gradients"`` their sums, too, ``"parameters"`` everything (ZeRO 1, 2 and 3). ``"auto"``: what
        the simulated step is fastest with, within the memory limit.""",
        flag=Flag("What replicas keep only a share of, besides what stands before it."),
    )
    gradient_dtype: str | None = option(
        None,
        one_of(*GRADIENT_DTYPES) | NONE,
        """``"bf16"`` or ``"fp16"`` lets gradients travel between replicas, and be summed there,
        with fewer bits. None: as they are.""",
        flag=Flag("Let gradients travel between replicas with fewer bits."),
    )
    on_nan: str = option(
        "ignore",
        one_of("ignore", *map(str, NonFiniteAction)),
        """the reaction to a step whose loss is NaN or whose gradients are not all finite. ``"raise"``: all
        ranks raise NonFiniteError. ``"skip"``: the step updates nothing, and ``pipe.num_skipped`` counts it.
        ``"ignore"``: values are not checked. See docs/optimizers.md.""",
        flag=Flag("The reaction to a step whose loss or gradients are not finite."),
    )
    batch: str = option(
        "same",
        one_of("same", "rank0", "local"),
        """what each rank passes to ``step`` under ``torchrun``. ``"same"``: the same whole mini-batch,
        which every step compares: shapes, types, values up to 64 kB, 4,096 values of a larger tensor.
        ``"rank0"``: anything or nothing, because every rank gets what rank 0 passes, and the rest is
        dropped: not for loaders that give each rank a part. ``"local"``: the
        part of the batch of its replica, ``pipe.replica`` of ``pipe.num_replicas``, with any number of
        rows; see docs/replicas.md.""",
    )
    batched: Mapping[str | int, Any] | None = option(
        None,
        instance("a dict of arguments to a dimension, a pattern such as '(t b)', or None", Mapping) | NONE,
        """how arguments of ``step`` are split, by name or position: the dimension that is the batch,
        or None for one that every microbatch needs whole, such as ``{"x": 1, "table": None}``; for an
        argument of several tensors a structure of these. A dimension in which the batch is merged with
        another one is written as in einops, with ``b`` for the batch: ``{"target": "(t b)"}``. The model
        gets its arguments as they are passed, of fewer rows. Arguments that are left out are split along
        dimension 0 if they have as many rows as the batch, unless that is wrong; see docs/batch.md.""",
    )
    microbatch_weight: str | Callable[..., Any] | None = option(
        None,
        MICROBATCH_WEIGHT | NONE,
        """how much the loss of a microbatch counts, where the model does not show it: a
        function of what ``step`` takes, called with a microbatch's rows of it, that returns a number. The
        loss is then the mean with these weights. ``"rows"`` is the mean by rows, and ``"sum"`` adds
        losses up. None: read off the graph, and a warning says where that cannot be.""",
    )
    check: str | int = option(
        "first",
        one_of("first", "off", "always") | integer_between(1, MOST_MICROBATCHES),
        """which steps are compared with the model itself. ``"first"``: before the first step of each kind
        of call, a few of its rows are run in microbatches and by the model in eager torch, and loss,
        outputs and gradients must agree. ``"always"``: before every step, and ``100``: before every
        hundredth, too. ``"off"``: nothing is compared. See docs/batch.md.""",
        flag=Flag("Whether the first step is compared with the model in eager torch."),
    )
    precision: str | None = option(
        None,
        one_of(*map(str, Precision)) | NONE,
        """``"bf16-mixed"`` or ``"fp16-mixed"`` lets operators compute in bfloat16 or float16 where
        ``torch.autocast`` does, with weights and gradients in float32. With ``"fp16-mixed"`` the loss is
        scaled, as by ``torch.amp.GradScaler``; it needs ``optimizer``. None: the model's own types. See
        docs/precision.md.""",
        flag=Flag("Let operators compute with 16 bits beside float32 weights."),
    )
    kernels: str = option(
        "source",
        KERNELS,
        """how a rank runs its stages: ``"source"``, the generated Python; or ``"inductor"``, compiled by
        torch's inductor at the first step of each size, to sums in another order. See docs/kernels.md.""",
        flag=Flag("How ranks run their stages: as their source, or compiled by inductor.", plans=False),
    )
    recompute: str = option(
        "auto",
        one_of("auto", "none", "full"),
        """``"none"`` keeps every value the backward needs; ``"full"`` keeps only what a stage
        received and computes the rest again; ``"auto"`` computes again as little as lets every device
        stay within ``memory_limit``. See docs/recompute.md.""",
        flag=Flag("auto recomputes as little as --memory-limit lets it."),
    )
    memory_limit: int | str | None = option(
        None,
        number(1, 2**63 - 1) | instance("text such as '16GiB'", str) | NONE,
        """bytes per device, or text such as ``"16GiB"``. The state of ``optimizer`` counts; that
        of an optimizer outside the programs does not. None: on a GPU its memory less what CUDA and
        its libraries need, which the plan shows; on a CPU no limit.""",
        flag=Flag("Bytes per device, such as 16GiB.", str),
    )
    offload: str | None = option(
        None,
        one_of("activations", "optimizer", "all") | NONE,
        """``"activations"`` lets values that wait for the backward do so in host memory, as few as let
        every device stay within ``memory_limit``, chosen together with ``recompute``. See
        docs/memory.md. ``"optimizer"`` keeps the state of ``optimizer`` there between updates. ``"all"``
        does both. None: all stays on its device.""",
        flag=Flag("What waits in host memory; activations as --memory-limit asks."),
    )
    topology: Topology | str | Path | None = option(
        None,
        _made_by("a pipec.Topology", "pipec.hardware.topology", "Topology") | _FILE | NONE,
        """how fast the devices are, how much they hold and how they are joined, or the file that says
        so; see docs/planner.md. Rank r is its device r. Without ``devices`` it may have more than there
        are, all of them alike. None: devices that are alike, on the hosts where ranks run; the plan
        shows what is assumed of GPUs.""",
        flag=Flag("How fast devices are, what they hold and how they are joined: a TOML or JSON file.", Path),
    )
    costs: Profile | DeviceModel | str | Path | None = option(
        None,
        _made_by("a pipec.Profile", "pipec.cost.profile", "Profile")
        | _FILE
        | _made_by("what pipec.calibrate returns", "pipec.hardware.devices", "DeviceModel")
        | NONE,
        """measured times to plan by: what ``pipec.profile`` or ``pipec.calibrate`` returns, or the file of
        a profile. None: a table of devices; with ``schedule="auto"`` a CPU is measured, once on a machine.
        See docs/planner.md.""",
        flag=Flag("A profile, from `pipec profile`; or calibrate, to measure this device first.", str),
        compared=False,
    )
    weights: str | Path | None = option(
        None,
        instance("the path of a folder", str, Path) | NONE,
        """for a model of transformers on meta, the folder of its weights, as ``save_pretrained`` writes it.
        Each rank reads those of its own stages, in the first call. What the folder lacks is initialised as
        transformers does.""",
    )
    timeout: float = option(
        300.0,
        SECONDS,
        """seconds to wait for another process before giving it up.""",
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
"""What is declared of each option, in the order of the arguments of ``compile``."""


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
