"""Values that a trace read: expressions of Dynamo's for them, and what a later call compares of them."""

import array
import importlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch

from pipec.torch_compat.module_contents import num_changes

ARRAYS = (np.ndarray, np.generic, array.array, bytearray)
"""Classes of mutable values that are compared by their bytes."""


class _Imports(dict[str, Any]):
    """The modules that Dynamo names in the globals of a traced function: ``__import_a_dot_b`` is ``a.b``."""

    def __missing__(self, name: str) -> Any:
        if not name.startswith(_IMPORTED):
            raise KeyError(name)
        self[name] = importlib.import_module(name.removeprefix(_IMPORTED).replace("_dot_", "."))
        return self[name]


_IMPORTED = "__import_"
_imports = _Imports()


def evaluate(source: str | CodeType, traced: torch.nn.Module) -> Any:
    """The value of an expression of Dynamo's, such as ``L['self'].model.h[0].p``; ABSENT if there is none.

    The same in every process: the expression begins at the traced module or at an imported Python module.
    """
    try:
        return eval(source, {"L": {"self": traced}, "G": _imports})
    except Exception:  # attributes of the model's objects may raise any error
        return ABSENT


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def fqn_of(source: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``getattr(L['self'].model.h, '0')`` as ``model.h.0``."""
    source = re.sub(r"^___(from_numpy|as_tensor)\((.*)\)$", r"\2", source)
    dotted, changed = re.sub(rf"G\['{_IMPORTED}(\w+)'\]", lambda x: x[1].replace("_dot_", "."), source), 1
    while changed:
        dotted, changed = re.subn(r"getattr\(([^()]*), '(.*?)'\)", r"\1.\2", dotted)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    dotted = re.sub(r"\.(__dict__|_modules)\b", "", dotted)
    return dotted.removeprefix("L.self").removeprefix(".")


def by_name(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """These pairs as a dict. A second value of the same name, as written, gets a longer one."""
    named = dict[str, Any]()
    for name, value in found:
        while name in named:
            name += "'"
        named[name] = value
    return named


@dataclass(frozen=True)
class Compared:
    """The parts of a value that are compared, the first of which says what it is.

    The value is held, so that no other one gets its ``id``.
    """

    parts: tuple[Any, ...]
    held: object = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.parts[0]} ({zlib.crc32(repr(self.parts).encode()):08x})"


def comparable(value: Any) -> Any:
    """What a later call compares of a value: of a tensor that it is the same one, not changed in place."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        address = value.data_ptr() if is_plain else 0
        return Compared(("a tensor", id(value), num_changes(value), address), value)
    if isinstance(value, np.ndarray | np.generic):
        return Compared((f"{type(value).__name__} {value.dtype}{list(value.shape)}", value.tobytes()))
    if isinstance(value, array.array | bytearray):
        return Compared((type(value).__name__, bytes(value)))
    return frozenset(value) if isinstance(value, set) else value
