"""Paths to values that a trace read, and guards that compare a value. Other ranks have them too."""

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipec.torch_compat.module_contents import num_changes


@dataclass(frozen=True)
class ValuePath:
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

    def value(self, module: torch.nn.Module) -> Any:
        """The current value. Raises LookupError or AttributeError if the path does not exist any more."""
        current: Any = sys.modules[self.root] if self.root else module
        for kind, key in self.steps:
            current = getattr(current, key) if kind == "attribute" else current[key]
        return current

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


class ValueGuard:
    """Compares the value that ``read`` returns for a traced module with its value at construction."""

    def __init__(self, name: str, read: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> None:
        self._name, self._read = name, read
        self._expected = read(module)

    def __str__(self) -> str:
        return f"{self._name} changed: it is another object, or has other values"

    def holds(self, module: torch.nn.Module) -> bool:
        try:
            return bool(self._read(module) == self._expected)
        except Exception:  # attributes of the model's objects may raise any error
            return False


def constant_guard(name: str, get: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> ValueGuard:
    """A guard that the tensor or array that ``get`` returns, a constant of a graph, has not changed.

    For a tensor, torch counts the changes in place. An array is compared by its values.
    """
    value = get(module)
    original = value if isinstance(value, torch.Tensor) else None  # a reference, so that none reuses its id

    def read(module: torch.nn.Module) -> Any:
        current = get(module)
        if isinstance(current, torch.Tensor):
            is_plain = type(current) is torch.Tensor and current.layout is torch.strided
            return current is original, num_changes(current), current.data_ptr() if is_plain else 0
        if isinstance(current, np.ndarray | np.generic):
            return type(current), current.dtype, current.shape, current.tobytes()
        return type(current), current

    return ValueGuard(name, read, module)


def parsed(source: str) -> ast.expr:
    """The syntax tree of an expression; an empty one if names in it, which may be any text, break it."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return ast.Constant(None)
