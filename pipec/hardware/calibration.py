"""The device model of a torch device: an entry found by its name, or figures that are measured on request."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from pipec.errors import InputError, PlanError
from pipec.hardware.devices import DEVICES, DeviceModel, find_device
from pipec.ir.arguments import shown

FALLBACK_GPU = "a100"
"""Stands for accelerators without an entry: where to cut depends on ratios, which differ less than speeds."""

_MATMUL_SIZE = {"cpu": 512, "accelerator": 4096}
_COPY_BYTES = {"cpu": 1 << 25, "accelerator": 1 << 28}
"""Large enough for a core, or a whole GPU, to reach the speed it has on large operators, out of cache."""

_ROUND_SECONDS = 0.02
_ROUNDS = 5


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
    """Measure a device in a second or two: matrix products, copies, launches and memory, but not its link.

    The launch time is that of a small matrix product between two views, as stages run it. The CPU is measured
    with torch's current number of threads.

    Raises:
        InputError: that is no device, or this machine has none like it.
        PlanError: it is ``meta``.
    """
    device = usable_device(device)
    if device.type == "meta":
        raise PlanError("the meta device computes nothing: calibrate on the device that will train the model")
    kind = "cpu" if device.type == "cpu" else "accelerator"
    base = default_device_model(device)
    small, bias = torch.ones(2, 2, 4, device=device), torch.ones(4, device=device)
    weight = torch.ones(4, 4, device=device)
    source = torch.ones(_COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    return replace(
        base,
        name=f"{base.name}-calibrated",
        flops_per_second={
            str(dtype).removeprefix("torch."): _matmul_flops_per_second(_MATMUL_SIZE[kind], dtype, device)
            for dtype in (torch.float32, torch.bfloat16)
        },
        memory_bytes_per_second=2 * _COPY_BYTES[kind] / _seconds(lambda: target.copy_(source), device),
        launch_seconds=_seconds(lambda: torch.addmm(bias, small.view(4, 4), weight.t()), device),
        memory_bytes=_memory_bytes(device, base),
        source=f"measured, {torch.get_num_threads()} threads; the link as in {base.name}",
    )


def usable_device(device: torch.device | str) -> torch.device:
    """The device, with its index. Raises InputError unless it exists here."""
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError("expected a torch device such as 'cpu' or 'cuda:1'")
        return torch.empty(1, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device is {shown(device)}, which cannot be used here: {reason}") from error


def _matmul_flops_per_second(size: int, dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return float(2 * size**3 / _seconds(lambda: matrix @ matrix, device))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of one call among calls back to back, whose launches overlap as in a step."""
    num_calls = 1
    while _round_seconds(run, num_calls, device) < _ROUND_SECONDS:
        num_calls *= 2
    return statistics.median(_round_seconds(run, num_calls, device) for _ in range(_ROUNDS)) / num_calls


def _round_seconds(run: Callable[[], object], num_calls: int, device: torch.device) -> float:
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
