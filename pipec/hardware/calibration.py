"""The device model of a torch device: the entry of its name, or figures measured on request."""

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
"""Plans that are made without a GPU are made for this one."""

UNKNOWN_GPU = "a100-pcie"
"""Used for GPUs without an entry: cuts depend on ratios of speeds, which differ less than speeds. Most cards
without an entry have no NVLink."""

_REPEAT_SECONDS = 0.002
_REPEATS = 40
"""Every repeat measures all figures, so that a slow moment of the machine does not spoil every repeat of one.
A repeat is shorter than the time slice of a process on a busy system."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the operators to measure: products of ``rows`` and square weights, one weight after the other.

    The weights together, and ``copied_bytes``, exceed the caches next to a core. In attention, ``heads``
    heads have ``tokens`` queries and as many keys each, of the type in which a model usually runs there.
    """

    rows: int
    width: int
    num_weights: int
    copied_bytes: int
    heads: int
    tokens: int
    attention_dtype: str


_CPU = _Sizes(
    rows=256, width=512, num_weights=24, copied_bytes=1 << 24, heads=8, tokens=128, attention_dtype="float32"
)
_ACCELERATOR = _Sizes(
    rows=4096,
    width=4096,
    num_weights=1,
    copied_bytes=1 << 28,
    heads=16,
    tokens=2048,
    attention_dtype="bfloat16",
)

_HEAD_WIDTH = 64
_OTHER_FLOPS = 8 + 20 + 20 + 14
"""FLOPs per element of ``_other_operators``, as ``pipec/cost/operator_tables.py`` counts them."""


def default_device_model(device: torch.device) -> DeviceModel:
    """The entry for a device. Nothing is measured, so that every rank and every run makes the same plan.

    A GPU has the memory that it reports: products of one name differ in it, and so do slices of one GPU. Its
    rate of float32 is TF32's where torch uses TF32 (``torch.backends.cuda.matmul.fp32_precision``).

    A CPU is always the ``cpu`` entry, which describes one core: more threads speed up all operators equally.
    A GPU without an entry is taken for ``UNKNOWN_GPU``, and ``meta`` for ``FALLBACK_GPU``.
    """
    if device.type == "cpu":
        return DEVICES["cpu"]
    if device.type == "cuda" and torch.cuda.is_available():
        entry = find_device(torch.cuda.get_device_name(device)) or DEVICES[UNKNOWN_GPU]
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            entry = entry.with_tf32()
        return replace(entry, memory_bytes=_memory_bytes(device, entry))
    return DEVICES[FALLBACK_GPU]


def calibrate(device: torch.device | str) -> DeviceModel:
    """The measured figures of a device: its arithmetic, copies, launches and memory, but not its link.

    Takes a second or two. Products are measured in float32 and bfloat16, with weights that are not in a
    core's own cache, as in a step; attention in bfloat16 on GPUs, as most models run there. Other arithmetic
    is a layer norm, a GELU with its gradient and a softmax. The launch time is measured with a small matrix
    product and two views, as stages run it. The fastest of several repeats counts, because other load on the
    machine only makes repeats slower. A CPU is measured with torch's current number of threads.

    Raises:
        InputError: ``device`` is not a device, or this machine has no such device.
        PlanError: ``device`` is ``meta``.
    """
    device = resolve_device(device)
    if device.type == "meta":
        raise PlanError("the meta device computes nothing: calibrate on the device that will train the model")
    sizes = _CPU if device.type == "cpu" else _ACCELERATOR
    base = default_device_model(device)
    workloads = {
        "launch": _launch(device),
        "copy": _copy(sizes, device),
        "attention": _attention(sizes, device),
        "others": _other_operators(sizes, device),
        **{dtype: _products(sizes, getattr(torch, dtype), device) for dtype in ("float32", "bfloat16")},
    }
    with torch.no_grad():
        seconds = _fastest(workloads, device)
    launch = seconds["launch"]
    product_flops = 2 * sizes.rows * sizes.width**2
    attention_flops = 4 * sizes.heads * sizes.tokens**2 * _HEAD_WIDTH
    other_flops = _OTHER_FLOPS * sizes.rows * sizes.width
    rates = {
        dtype: product_flops / _without_launches(seconds[dtype], launch) for dtype in ("float32", "bfloat16")
    }
    attention_rate = attention_flops / _without_launches(seconds["attention"], launch)
    return replace(
        base,
        name=f"{base.name}-calibrated",
        flops_per_second=rates,
        memory_bytes_per_second=2 * sizes.copied_bytes / seconds["copy"],
        launch_seconds=launch,
        memory_bytes=_memory_bytes(device, base),
        source=f"measured, {torch.get_num_threads()} threads; the link and the host as in {base.name}",
        attention_efficiency=min(1.0, attention_rate / rates[sizes.attention_dtype]),
        other_flops_per_second=other_flops / _without_launches(seconds["others"], 4 * launch),
    )


def resolve_device(device: torch.device | str) -> torch.device:
    """The device, with its index. Raises InputError unless this machine has it."""
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError("expected a torch device such as 'cpu' or 'cuda:1'")
        return torch.empty(1, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device is {short_repr(device)}, which cannot be used here: {reason}") from error


Run = Callable[[], object]


def _floats(*shape: int, device: torch.device) -> torch.Tensor:
    """Ones of float32, whatever the default type is."""
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
    endless_weights = itertools.cycle(weights)
    return lambda: rows @ next(endless_weights)


def _attention(sizes: _Sizes, device: torch.device) -> Run:
    dtype = getattr(torch, sizes.attention_dtype)
    q, k, v = _floats(3, 1, sizes.heads, sizes.tokens, _HEAD_WIDTH, device=device).to(dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _other_operators(sizes: _Sizes, device: torch.device) -> Run:
    x = _floats(sizes.rows, sizes.width, device=device)

    def run() -> None:
        F.layer_norm(x, (sizes.width,))
        F.gelu(x)
        torch.ops.aten.gelu_backward(x, x)
        torch.softmax(x, -1)

    return run


def _without_launches(seconds: float, launch: float) -> float:
    """``seconds`` of operators less the time of their launches, but at least a tenth of ``seconds``."""
    return max(seconds - launch, seconds / 10)


def _fastest(workloads: Mapping[str, Run], device: torch.device) -> dict[str, float]:
    """Seconds of one call of each workload. Calls run back to back: their launches overlap as in a step."""
    counts = {name: _num_calls(run, device) for name, run in workloads.items()}
    repeats = [
        {name: _repeat_seconds(run, counts[name], device) / counts[name] for name, run in workloads.items()}
        for _ in range(_REPEATS)
    ]
    return {name: min(each[name] for each in repeats) for name in workloads}


def _num_calls(run: Run, device: torch.device) -> int:
    """The number of calls that fill a repeat even where no call is interrupted."""
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
