"""The device model of a torch device: an entry found by its name, or figures that are measured on request."""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pipec.errors import InputError, PlanError
from pipec.hardware.devices import DEVICES, DeviceModel, find_device
from pipec.ir.argument_checks import short_repr

FALLBACK_GPU = "a100"
"""Stands for accelerators without an entry: where to cut depends on ratios, which differ less than speeds."""

_REPEAT_SECONDS = 0.002
_REPEATS = 40
"""Every repeat measures everything, so that a slow moment of the machine does not meet a figure in all. It is
shorter than what a busy system gives a process at a time."""


@dataclass(frozen=True)
class _Sizes:
    """What is measured of a kind of device: products of ``rows`` and square weights, several in turn.

    ``copied_bytes`` and the weights together are more than caches next to a core hold. ``heads`` attend to as
    many ``tokens`` each.
    """

    rows: int
    width: int
    num_weights: int
    copied_bytes: int
    heads: int
    tokens: int


_CPU = _Sizes(rows=256, width=512, num_weights=24, copied_bytes=1 << 24, heads=8, tokens=128)
_ACCELERATOR = _Sizes(rows=4096, width=4096, num_weights=1, copied_bytes=1 << 28, heads=16, tokens=2048)

_HEAD_WIDTH = 64
_OTHERS = 8 + 20 + 20 + 14
"""Operations per element of what ``_others`` runs, as ``pipec/cost/operator_tables.py`` counts them."""


def default_device_model(device: torch.device) -> DeviceModel:
    """The entry for a device. Nothing is measured, so that every rank and every run makes the same plan.

    The memory is what the GPU says that it has: products of one name differ in it, and so do slices of one.
    Its float32 is TF32 where torch makes products so (``torch.backends.cuda.matmul.fp32_precision``).

    A CPU is always the ``cpu`` entry, which describes one core: more threads speed up all operators alike.
    Plans for ``meta`` and for accelerators without an entry are made for ``FALLBACK_GPU``.
    """
    if device.type == "cpu":
        return DEVICES["cpu"]
    if device.type == "cuda" and torch.cuda.is_available():
        entry = find_device(torch.cuda.get_device_name(device)) or DEVICES[FALLBACK_GPU]
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            entry = entry.with_tf32()
        return replace(entry, memory_bytes=_memory_bytes(device, entry))
    return DEVICES[FALLBACK_GPU]


def calibrate(device: torch.device | str) -> DeviceModel:
    """Measure a device in a second or two: its arithmetic, copies, launches and memory, but not its link.

    Products are of float32 and bfloat16, of weights that no core has in its own cache, as in a step; the rest
    of arithmetic is that of a layer norm, a GELU with its gradient and a softmax. The launch time is that of
    a small matrix product between two views, as stages run it. Of several repeats the fastest counts: what
    else the machine does makes none faster. The CPU is measured with torch's current number of threads.

    Raises:
        InputError: that is no device, or this machine has none like it.
        PlanError: it is ``meta``.
    """
    device = resolve_device(device)
    if device.type == "meta":
        raise PlanError("the meta device computes nothing: calibrate on the device that will train the model")
    sizes = _CPU if device.type == "cpu" else _ACCELERATOR
    base = default_device_model(device)
    work = {
        "launch": _launch(device),
        "copy": _copy(sizes, device),
        "attention": _attention(sizes, device),
        "others": _others(sizes, device),
        **{dtype: _products(sizes, getattr(torch, dtype), device) for dtype in ("float32", "bfloat16")},
    }
    with torch.no_grad():
        seconds = _fastest(work, device)
    launch = seconds["launch"]
    flops = 2 * sizes.rows * sizes.width**2
    rates = {dtype: flops / _without(seconds[dtype], launch) for dtype in ("float32", "bfloat16")}
    attended = 4 * sizes.heads * sizes.tokens**2 * _HEAD_WIDTH / _without(seconds["attention"], launch)
    return replace(
        base,
        name=f"{base.name}-calibrated",
        flops_per_second=rates,
        memory_bytes_per_second=2 * sizes.copied_bytes / seconds["copy"],
        launch_seconds=launch,
        memory_bytes=_memory_bytes(device, base),
        source=f"measured, {torch.get_num_threads()} threads; the link and the host as in {base.name}",
        attention_efficiency=min(1.0, attended / rates["float32"]),
        other_flops_per_second=_OTHERS * sizes.rows * sizes.width / _without(seconds["others"], 4 * launch),
    )


def resolve_device(device: torch.device | str) -> torch.device:
    """The device, with its index. Raises InputError unless it exists here."""
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError("expected a torch device such as 'cpu' or 'cuda:1'")
        return torch.empty(1, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device is {short_repr(device)}, which cannot be used here: {reason}") from error


Run = Callable[[], object]


def _floats(*shape: int, device: torch.device) -> torch.Tensor:
    """Of float32, whatever the default type is."""
    return torch.ones(shape, device=device, dtype=torch.float32)


def _launch(device: torch.device) -> Run:
    small, bias, weight = (_floats(*shape, device=device) for shape in ((2, 2, 4), (4,), (4, 4)))
    return lambda: torch.addmm(bias, small.view(4, 4), weight.t())


def _copy(sizes: _Sizes, device: torch.device) -> Run:
    source = _floats(sizes.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _products(sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    rows = torch.ones(sizes.rows, sizes.width, device=device, dtype=dtype)
    weights = torch.ones(sizes.num_weights, sizes.width, sizes.width, device=device, dtype=dtype)
    turns = itertools.cycle(weights)
    return lambda: rows @ next(turns)


def _attention(sizes: _Sizes, device: torch.device) -> Run:
    q, k, v = _floats(3, 1, sizes.heads, sizes.tokens, _HEAD_WIDTH, device=device)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _others(sizes: _Sizes, device: torch.device) -> Run:
    x = _floats(sizes.rows, sizes.width, device=device)

    def run() -> None:
        F.layer_norm(x, (sizes.width,))
        F.gelu(x)
        torch.ops.aten.gelu_backward(x, x)
        torch.softmax(x, -1)

    return run


def _without(seconds: float, launch: float) -> float:
    """The time of operators without their launches, but no less than a tenth of it."""
    return max(seconds - launch, seconds / 10)


def _fastest(work: Mapping[str, Run], device: torch.device) -> dict[str, float]:
    """The seconds of one call of each, among calls back to back, whose launches overlap as in a step."""
    counts = {name: _num_calls(run, device) for name, run in work.items()}
    repeats = [
        {name: _repeat_seconds(run, counts[name], device) / counts[name] for name, run in work.items()}
        for _ in range(_REPEATS)
    ]
    return {name: min(each[name] for each in repeats) for name in work}


def _num_calls(run: Run, device: torch.device) -> int:
    """As many as fill a repeat, also where one of them is interrupted."""
    num_calls = 1
    while min(_repeat_seconds(run, num_calls, device) for _ in range(4)) < _REPEAT_SECONDS:
        num_calls *= 2
    return num_calls


def _repeat_seconds(run: Run, num_calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _memory_bytes(device: torch.device, base: DeviceModel) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return base.memory_bytes
