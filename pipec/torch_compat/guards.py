"""What Dynamo took for granted of the objects that a module read while it was traced, to be checked again.

Dynamo notes every attribute, closure and global that decided what it traced. Torch compiles these notes, the
guards, into a check that takes some hundred nanoseconds a module. Guards on arguments, on sizes, on tensors
and on the modes around a call are left out: whoever keeps a graph knows those of its calls.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import dynamo_timed

CONSTANTS = {"CONSTANT_MATCH", "EQUALS_MATCH"}
"""Kinds of guards that compare a value."""

OWN = ("G['torch']", "G['__import_torch", "__import__('torch')", "G['__builtins_dict__")
"""How the places begin that belong to torch and Python, whose registries grow without any effect."""


SET_BY_CAPTURE = ("use_cache",)
"""Names of attributes that pipec sets as it needs them while it traces, whatever they are otherwise."""


@dataclass(frozen=True)
class Place:
    """Where a value is found: attributes and items, one after the other, from the traced module or a global.

    ``root`` is empty for the module, else the name of an imported module.
    """

    root: str
    steps: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, source: str) -> "Place | None":
        """The place that Dynamo writes as ``self.model.h[0].p``; None if it is written in another way.

        An attribute of a class, ``dict(type(self.model).__dict__)['scale']``, is one of its object. What a
        property is made of is not: the object computes the property.
        """
        steps: list[tuple[str, Any]] = []
        if _PROPERTY.search(source):
            return None
        source = re.sub(r"dict\(type\((.*)\)(\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"\1.\3", source)
        node = _parsed(source.replace("L['self']", "self"))
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

    @classmethod
    def of(cls, fqn: str) -> "Place":
        """The place of a tensor or module below the traced module."""
        return cls("", tuple(("attribute", name) for name in fqn.split(".")))

    def value(self, module: torch.nn.Module) -> Any:
        """What is there now. Raises LookupError or AttributeError if the place is gone."""
        found: Any = sys.modules[self.root] if self.root else module
        for kind, key in self.steps:
            found = getattr(found, key) if kind == "attribute" else found[key]
        return found

    @property
    def names(self) -> list[str]:
        """The names of modules, attributes and items on the way."""
        return [self.root] * bool(self.root) + [str(key) for _, key in self.steps if key not in _REGISTRIES]

    def __str__(self) -> str:
        """As a person would write it: ``model.h.0.p``"""
        return ".".join(self.names)


_IMPORTED = "__import_"
_PROPERTY = re.compile(r"\.f(get|set|del)\b")
_REGISTRIES = ("_modules", "_parameters", "_buffers")


class Guards:
    """The guards of one capture. ``constants`` are the plain values they expect, by place.

    ``tensors`` are those that the graph holds as constants, because no module has them registered.
    """

    def __init__(self, capture: CaptureOutput, module: torch.nn.Module) -> None:
        registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.constants: dict[Place, Any] = {}
        self.tensors: dict[Place, torch.Tensor] = {}
        self._own = OWN + tuple(
            f"G[{name!r}]" for name, x in type(module).forward.__globals__.items() if x is torch
        )
        self._alive: list[object] = []
        with dynamo_timed("build_guards", log_pt2_compile_event=True):
            built = capture.graph_capture_output.build_guards(
                type(module).forward.__code__,
                Hooks(guard_filter_fn=lambda entries: [self._keeps(entry, registered) for entry in entries]),
            )
        self._manager = built.guard_manager

    def holds(self, module: torch.nn.Module) -> bool:
        return bool(self._manager.check({"self": module}))

    def broken(self, module: torch.nn.Module) -> str:
        """The first guard that does not hold: ``model.drop.p == 0.1 at dropout.py:73``; empty if all hold."""
        found = self._manager.check_verbose({"self": module})
        return "" if found.result else " and ".join(map(_readable, found.verbose_code_parts[:1]))

    def _keeps(self, entry: GuardFilterEntry, registered: set[int]) -> bool:
        if not entry.name or _of_arguments(entry.name):
            return False
        if entry.name.startswith(self._own):
            return False
        if re.search(rf"\b({'|'.join(SET_BY_CAPTURE)})\b", entry.name):
            return False
        value = entry.value
        if isinstance(value, torch.Tensor):
            if id(value) not in registered and (place := Place.parse(entry.name)):
                self.tensors[place] = value
            return False
        if callable(value) and not isinstance(value, torch.nn.Module):
            self._alive.append(value)  # guards know a function by its address, which another could be given
        if place := constant_place(entry.name, entry.guard_type, value):
            self.constants[place] = value
        return True


def constant_place(name: str, kind: str, value: object) -> Place | None:
    """The place of a plain value that a guard compares; None of another guard, or of torch's own values."""
    if kind not in CONSTANTS or not isinstance(value, _PLAIN) or name.startswith(OWN):
        return None
    return Place.parse(name)


_PLAIN = (int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


def _of_arguments(name: str) -> bool:
    """Whether the value at this place is an argument of the traced call, or found in one."""
    return any(root in ("args", "kwargs", "target") for root in _roots(name))


def _parsed(source: str) -> ast.expr:
    """The expression; an empty one if the names in it, which may be any text, make it none."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return ast.Constant(None)


def _roots(name: str) -> Iterator[str]:
    for node in ast.walk(_parsed(name)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "L":
            yield str(ast.literal_eval(node.slice))
        elif isinstance(node, ast.Name):
            yield node.id


def _readable(text: str) -> str:
    """Torch's text of a guard, with the place as a person writes it and the file without its folders."""
    condition, *comments = text.split("  # ")
    place, space, rest = condition.partition(" ")
    line = comments[-1].split(" in ")[0].rsplit("/", 1)[-1] if comments else ""
    return f"{fqn_of(place)}{space}{rest}" + f", which {line} reads" * bool(line)


def fqn_of(source: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``getattr(L['self'].model.h, '0')`` as ``model.h.0``."""
    dotted, changed = source, 1
    while changed:
        dotted, changed = re.subn(r"getattr\(([^()]*), '(.*?)'\)", r"\1.\2", dotted)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    dotted = re.sub(r"\.(__dict__|_modules)\b", "", dotted)
    return dotted.removeprefix("L.self").removeprefix(".")
