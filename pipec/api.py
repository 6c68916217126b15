"""The front door: compile a model, load a saved artifact, describe an example for the command line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipec.compiler import Compiler, Target
from pipec.cost.machine import default_device_model
from pipec.errors import InputError
from pipec.pipeline import Pipeline
from pipec.runtime.execution import Ranks
from pipec.runtime.holder import ModelTensors
from pipec.runtime.launch import Devices
from pipec.schedules import make_schedule

RECOMPUTE = ("auto", "none", "full")


@dataclass(frozen=True)
class Example:
    """A model with one mini-batch: what a factory returns that the command line is pointed at."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[..., Any] | None = None


def compile(
    model: nn.Module,
    devices: Devices,
    *,
    loss_fn: Callable[..., Any] | None = None,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    recompute: str = "auto",
    memory_limit: int | str | None = None,
    timeout: float = 300.0,
) -> Pipeline:
    """Make a pipeline of ``model``; compilation itself happens at the first step, or in ``prepare``.

    Args:
        model: any module, on the CPU, on a GPU or on meta. Neither its code nor its structure is changed; its
            parameters are trained in place where they already are on their stage's device.
        devices: how many ranks, or the device of each. Under ``torchrun`` each process is one rank.
        loss_fn: ``loss_fn(output, target)``, one floating-point number. None: the model returns its loss, as
            a tensor, as ``.loss`` or under ``"loss"``.
        schedule: a name: ``gpipe`` or ``1f1b``.
        microbatches: how many a mini-batch is split into. None: up to four a rank.
        recompute: ``"none"`` keeps every value the backward needs; ``"full"`` keeps only what a stage
            received and computes the rest again; ``"auto"`` does so where ``memory_limit`` forces it to.
        memory_limit: bytes per device, or text such as ``"16GiB"``. Optimizer state is not counted.
        timeout: seconds to wait for another process before giving it up.

    Raises:
        InputError: an argument does not fit, or ``devices`` contradicts the number of processes started.
    """
    if recompute not in RECOMPUTE:
        raise InputError(f"recompute is {recompute!r}; expected one of {', '.join(map(repr, RECOMPUTE))}")
    if microbatches is not None and microbatches < 1:
        raise InputError(f"microbatches is {microbatches}; expected at least 1, or None to let pipec choose")
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    ranks = Ranks(devices, timeout)
    make_schedule(schedule, ranks.count, microbatches or ranks.count)
    tensors = ModelTensors.of(model)
    device = next(iter(ranks.devices.values()))
    target = Target(default_device_model(device), recompute, limit)
    compiler = Compiler(model, loss_fn, schedule, ranks.count, target, device, tensors.canonical)
    return Pipeline(compiler, tensors, ranks, microbatches)


def parse_bytes(text: str) -> int:
    """``"16GiB"``, ``"500 MB"`` or ``"1e9"`` as a number of bytes. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not match:
        raise InputError(
            f"memory_limit is {text!r}; expected a number of bytes or text such as '16GiB' or '500MB'"
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix or " ")))
