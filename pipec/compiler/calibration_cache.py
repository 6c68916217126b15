"""The device model of this processor, measured once on a machine and cached on disk.

The name of the file is a digest of what the figures depend on: the processor, its number of threads, torch's
version and the version of the measurement. ``PIPEC_CACHE_DIR`` names another folder than ``~/.cache/pipec``;
if it is empty, every process measures. The figures decide which plan is chosen, never a computed value.
"""

import functools
import hashlib
import json
import math
import os
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipec.console import logger, notice
from pipec.hardware.calibration import calibrate
from pipec.hardware.devices import DEVICES, DeviceModel

CACHE_DIR = "PIPEC_CACHE_DIR"

_VERSION = 1
"""Version of what ``calibrate`` measures, and how. Raising it makes all machines measure again."""

_FIGURES = ("memory_bytes_per_second", "launch_seconds", "attention_efficiency", "other_flops_per_second")


def cached_calibration() -> DeviceModel:
    """The device model that an earlier process measured on this machine; measured now if there is none.

    A measurement prints one line on stderr. If it cannot be written to disk, only this process uses it.
    """
    key = _key(torch.get_num_threads())
    path = _path(key)
    model = _load(path) if path else None
    if model is None:
        model = _measured(key)
        store_calibration(model)
    return model


def store_calibration(model: DeviceModel) -> None:
    """Write the figures of a device model as those of this machine, unless caching is off."""
    path = _path(_key(torch.get_num_threads()))
    if path is None:
        return
    figures = {name: getattr(model, name) for name in _FIGURES}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            json.dump({"flops_per_second": dict(model.flops_per_second), **figures}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot write the calibration of this processor to %s: %s", path, error)


def _path(key: str) -> Path | None:
    """The file for this key, which may not exist yet; None if caching is off."""
    folder = os.environ.get(CACHE_DIR)
    if folder == "":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder or Path(home) / "pipec") / f"{key}.json"


@functools.cache
def _measured(key: str) -> DeviceModel:
    """The device model measured by this process, once for each ``key``."""
    model = calibrate("cpu")
    rate, bandwidth = model.flops_per_second["float32"] / 1e9, model.memory_bytes_per_second / 1e9
    figures = f"{rate:.3g} GFLOP/s, {bandwidth:.3g} GB/s, {1e6 * model.launch_seconds:.3g} us a launch"
    notice("calibrated this CPU, for schedule='auto': %s", figures)
    return _model({"flops_per_second": model.flops_per_second, **{n: getattr(model, n) for n in _FIGURES}})


def _load(path: Path) -> DeviceModel | None:
    """The device model in a file; None if there is none."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    try:
        return _read(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("cannot read the calibration in %s, measuring again: %s", path, error)
        return None


_MAX_BYTES = 2**16


def _read(document: Any) -> DeviceModel | None:
    """The device model that a document describes; None if the document is malformed."""
    if not isinstance(document, dict) or document.keys() != {"flops_per_second", *_FIGURES}:
        return None
    rates = document["flops_per_second"]
    if not isinstance(rates, dict) or "float32" not in rates:
        return None
    figures = [*rates.values(), *(document[name] for name in _FIGURES)]
    is_valid = all(isinstance(each, float) and 0 < each < math.inf for each in figures)
    return _model(document) if is_valid else None


def _model(figures: dict[str, Any]) -> DeviceModel:
    base = DEVICES["cpu"]
    source = f"measured on this machine; the link and the host as in {base.name}"
    return replace(base, name=f"{base.name}-calibrated", source=source, **figures)


def _key(num_threads: int) -> str:
    dependencies = {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": num_threads,
        "torch": torch.__version__,
        "version": _VERSION,
    }
    return f"processor-{hashlib.sha256(json.dumps(dependencies).encode()).hexdigest()[:32]}"


def _processor() -> str:
    """The processor's model name, or the most specific name that the system gives."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return ", ".join(names) or platform.processor() or platform.machine()
