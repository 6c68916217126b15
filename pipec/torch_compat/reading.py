"""The places that Dynamo's guards name, looked up again in this process or in another one.

Dynamo writes a place as an expression, such as ``type(self._modules['model']).__mro__[1].__dict__``. Only
attributes, items and a few functions that compute nothing are followed, so that looking up runs no code but
what the model's own attributes run. Places share most of their beginnings: each of those is looked up once.
"""

import ast
import builtins
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Reader = Callable[[torch.nn.Module], list[Any]]
"""Looks up the values at some places, of a traced module. Fails if one is gone."""

_FUNCTIONS = {
    "type": type,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "getattr": getattr,
    "__import__": sys.modules.__getitem__,
}

_IMPORTED, _BUILTINS = "__import_", "__builtins_dict__"


class UnknownPlaceError(Exception):
    """A guard names a place in a way that is not known here."""


def reader(places: Sequence[str], known: dict[str, Any]) -> Reader:
    """What looks up these places; ``known`` are the globals of the traced function.

    Raises:
        UnknownPlaceError: a place is written in a way that is not known here.
    """
    lines, names = list[str](), dict[str, str]()
    results = [_looked_up(_parsed(place), lines, names) for place in places]
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def read(self):\n{body}    return [{', '.join(results)}]\n"
    space: dict[str, Any] = {**_FUNCTIONS, "G": _Globals(known)}
    exec(compile(source, "<places of guards>", "exec"), space)
    read: Reader = space["read"]
    return read


class _Globals:
    """The globals of a function, and the modules that Dynamo gives names among them."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> Any:
        if name.startswith(_IMPORTED):
            return sys.modules[name.removeprefix(_IMPORTED).replace("_dot_", ".")]
        return vars(builtins) if name.startswith(_BUILTINS) else self._known[name]


def _parsed(place: str) -> ast.expr:
    try:
        return ast.parse(place.replace("L['self']", "self"), mode="eval").body
    except SyntaxError:
        raise UnknownPlaceError(place) from None


def _looked_up(node: ast.expr, lines: list[str], names: dict[str, str]) -> str:
    """The name of the local variable that has the value of an expression; adds the lines that set it."""
    match node:
        case ast.Name(id="self" | "G"):
            return node.id
        case ast.Constant(value=str() | int() | None as value):
            return repr(value)
        case ast.Attribute(value=inner, attr=name):
            text = f"{_looked_up(inner, lines, names)}.{name}"
        case ast.Subscript(value=inner, slice=key):
            text = f"{_looked_up(inner, lines, names)}[{_looked_up(key, lines, names)}]"
        case ast.Call(func=ast.Name(id="dict"), args=[ast.Attribute(attr="__dict__") as inner]):
            return _looked_up(inner, lines, names)  # the copy that Dynamo makes takes long
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="dict" | "list" | "tuple" as kind), attr=method),
            args=given,
            keywords=[],
        ) if method in ("keys", "__getitem__"):
            text = f"{kind}.{method}({', '.join(_looked_up(each, lines, names) for each in given)})"
        case ast.Call(func=ast.Name(id=function), args=given, keywords=[]) if function in _FUNCTIONS:
            text = f"{function}({', '.join(_looked_up(each, lines, names) for each in given)})"
        case _:
            raise UnknownPlaceError(ast.unparse(node))
    if text not in names:
        names[text] = f"x{len(names)}"
        lines.append(f"{names[text]} = {text}")
    return names[text]
