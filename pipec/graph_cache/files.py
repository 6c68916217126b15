"""The files of the modules that a process has imported, and whether they are what it imported."""

import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

PINNED = (
    "torch",
    "numpy",
    "sympy",
    "mpmath",
    "scipy",
    "networkx",
    "pydantic",
    "pydantic_core",
    "safetensors",
)
"""Packages that pipec itself needs. Their versions stand for their files."""


def is_pinned(name: str | None) -> bool:
    """Whether a module is known by the version of its package, or of Python."""
    return name is not None and (name.partition(".")[0] in (*PINNED, "pipec") or is_of_python(name))


def is_of_python(name: str) -> bool:
    """Whether a module is Python's own, and no file of the user's that has its name."""
    if name.partition(".")[0] not in sys.stdlib_module_names or name not in sys.modules:
        return False
    path = _path(sys.modules[name])
    return path is None or (path.startswith(_PYTHON) and not _INSTALLED.intersection(Path(path).parts))


_INSTALLED = {"site-packages", "dist-packages"}

_PYTHON = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{sysconfig.get_path('platstdlib')}{os.sep}")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that are known by their versions."""
    found = {name: importlib.metadata.version(name) for name in _distributions()}
    return {**found, "python": sys.version, "platform": sysconfig.get_platform()}


def _distributions() -> list[str]:
    present = {each.metadata["Name"].replace("-", "_").lower() for each in importlib.metadata.distributions()}
    return [name for name in PINNED if name in present]


def imported() -> set[str]:
    """The names of modules whose files decide what they are."""
    modules = dict(sys.modules)
    found = {name for name, module in modules.items() if not is_pinned(name) and _path(module) is not None}
    return found - {"__mp_main__"}  # another name of __main__


def path_of(name: str) -> str:
    """The file of an imported module."""
    path = _path(sys.modules[name])
    assert path is not None, name
    return path


def _path(module: ModuleType | None) -> str | None:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else None


def digests(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of the file of each module; empty for a file that is gone."""
    return {name: file_digest(path_of(name)) for name in sorted(names)}


def file_digest(path: str) -> str:
    """The SHA-256 of a file; empty if it is gone."""
    try:
        state = os.stat(path)
    except OSError:
        return ""
    return _digest(path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


@functools.lru_cache(maxsize=1 << 14)
def _digest(path: str, *state: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def changed_since_start(names: Iterable[str]) -> list[str]:
    """Modules whose files were changed since this process began, so that it may run what they were before."""
    started = _started_ns()
    own = [
        name for name in list(sys.modules) if name.partition(".")[0] == "pipec" and _path(sys.modules[name])
    ]
    return [name for name in [*names, *own] if _changed_ns(path_of(name)) >= started]


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_ctime_ns
    except OSError:
        return sys.maxsize


@functools.cache
def _started_ns() -> int:
    """When this process began, by the clock that dates files; 0 where nothing tells."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        after_boot = int(fields[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + after_boot
    except (OSError, AttributeError):
        return 0


def pipec_digest() -> str:
    """The mark of pipec's own sources."""
    folder = Path(__file__).parents[1]
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()
