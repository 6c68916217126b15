"""Values that a trace read: paths to them in Dynamo's notation, and what a later call compares of them."""

import array
import ast
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from pipec.torch_compat.module_contents import num_changes

ARRAYS = (np.ndarray, np.generic, array.array, bytearray)
"""Classes of mutable values that are compared by their bytes."""


class ValuePath(NamedTuple):
    """The path to a value: attributes and items from the traced module or an imported Python module.

    ``root`` is empty for the traced module, else the name of the imported one.
    """

    root: str
    steps: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, source: str) -> "ValuePath | None":
        """The path of a source in Dynamo's notation, ``self.model.h[0].p``; None for other expressions.

        An attribute of a class, ``dict(type(self.model).__dict__)['scale']``, becomes one of its object. The
        functions of a property do not: the object computes the property.
        """
        steps: list[tuple[str, Any]] = []
        if _PROPERTY.search(source):
            return None
        source = re.sub(r"dict\(type\((.*)\)(\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"\1.\3", source)
        node = parsed(source.replace("L['self']", "self"))
        while not isinstance(node, ast.Name):
            match node:
                case ast.Attribute(value=inner, attr=name):
                    steps.append(("attribute", name))
                case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=str(name))):
                    if not name.startswith(_IMPORTED):
                        return None
                    module = name.removeprefix(_IMPORTED).replace("_dot_", ".")
                    return cls(module, tuple(reversed(steps)))
                case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                    steps.append(("item", key))
                case _:
                    return None
            node = inner
        return cls("", tuple(reversed(steps))) if node.id == "self" else None

    @property
    def names(self) -> list[str]:
        """The names of modules, attributes and items along the path."""
        return [self.root] * bool(self.root) + [str(key) for _, key in self.steps if key not in _REGISTRIES]

    def __str__(self) -> str:
        """The path with dots: ``model.h.0.p``."""
        return ".".join(self.names)


_IMPORTED = "__import_"
_PROPERTY = re.compile(r"\.f(get|set|del)\b")
_REGISTRIES = ("_modules", "_parameters", "_buffers")


def by_name(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """These pairs as a dict. A second value of the same name, as written, gets a longer one."""
    named = dict[str, Any]()
    for name, value in found:
        while name in named:
            name += "'"
        named[name] = value
    return named


def parsed(source: str) -> ast.expr:
    """The syntax tree of an expression; an empty one if names in it, which may be any text, break it."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return ast.Constant(None)


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
