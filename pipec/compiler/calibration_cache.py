"""The device model of the processor at hand: measured once on a machine, and kept for later processes.

The name of the file says what makes it valid: the processor, its number of threads, torch and what is
measured. ``PIPEC_CACHE_DIR`` names another folder than ``~/.cache/pipec``; where it is empty, every process
measures. The figures decide which plan is made, and no value that a plan computes.
"""

import functools
import hashlib
import json
import logging
import math
import os
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipec.console import rank_zero_only
from pipec.hardware.calibration import calibrate
from pipec.hardware.devices import DEVICES, DeviceModel

log = logging.getLogger("pipec")

CACHE_DIR = "PIPEC_CACHE_DIR"

_VERSION = 1
"""Of what ``calibrate`` measures, and how: with another one, all machines are measured again."""

_FIGURES = ("memory_bytes_per_second", "launch_seconds", "attention_efficiency", "other_flops_per_second")


def cached_calibration() -> DeviceModel:
    """The figures that an earlier process measured on this machine, or else those that this one measures.

    What cannot be kept holds for this process. One line on stderr tells of a measurement.
    """
    key = _key(torch.get_num_threads())
    path = _path(key)
    kept = _load(path) if path else None
    if kept is None:
        kept = _measured(key)
        store_calibration(kept)
    return kept


def store_calibration(model: DeviceModel) -> None:
    """Keep the figures of a device model as those of this machine, if anything is kept."""
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
        log.warning("what this processor was measured at cannot be kept in %s: %s", path, error)


def _path(key: str) -> Path | None:
    """The file of this name, which may not exist yet; None if nothing is to be kept."""
    named = os.environ.get(CACHE_DIR)
    if named == "":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named or Path(home) / "pipec") / f"{key}.json"


@functools.cache
def _measured(key: str) -> DeviceModel:
    """Measured once in this process for each ``key``."""
    made = calibrate("cpu")
    rate, moved = made.flops_per_second["float32"] / 1e9, made.memory_bytes_per_second / 1e9
    told = f"{rate:.3g} GFLOP/s, {moved:.3g} GB/s, {1e6 * made.launch_seconds:.3g} us a launch"
    line = f"pipec: calibrated this CPU, for schedule='auto': {told}"
    rank_zero_only(print)(line, file=sys.stderr, flush=True)
    return _model({"flops_per_second": made.flops_per_second, **{n: getattr(made, n) for n in _FIGURES}})


def _load(path: Path) -> DeviceModel | None:
    """The device model that a file holds; None if it holds none."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    try:
        return _read(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        log.warning("what is kept in %s cannot be read, and is measured again: %s", path, error)
        return None


_MOST_BYTES = 2**16


def _read(document: Any) -> DeviceModel | None:
    """The device model of a document; None if it is none."""
    if not isinstance(document, dict) or document.keys() != {"flops_per_second", *_FIGURES}:
        return None
    rates = document["flops_per_second"]
    if not isinstance(rates, dict) or "float32" not in rates:
        return None
    figures = [*rates.values(), *(document[name] for name in _FIGURES)]
    can_be = all(isinstance(each, float) and 0 < each < math.inf for each in figures)
    return _model(document) if can_be else None


def _model(figures: dict[str, Any]) -> DeviceModel:
    base = DEVICES["cpu"]
    source = f"measured on this machine; the link and the host as in {base.name}"
    return replace(base, name=f"{base.name}-calibrated", source=source, **figures)


def _key(num_threads: int) -> str:
    facts = {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": num_threads,
        "torch": torch.__version__,
        "version": _VERSION,
    }
    return f"processor-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"


def _processor() -> str:
    """What the system calls the processor: a model's name, where it tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return ", ".join(named) or platform.processor() or platform.machine()
