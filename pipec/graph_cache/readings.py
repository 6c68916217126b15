"""What the code of a model read while it was captured, looked at again in another process."""

import copy
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipec.graph_cache.marks import UnfaithfulError, class_mark, digest, plain_mark, value_mark
from pipec.torch_compat import CONSTANTS, IDENTITIES, UnknownPlaceError, constant_place, fqn_of, reader

OUTLINE = {
    "DICT_CONTAINS",
    "DICT_CONST_KEYS",
    "DICT_KEYS_MATCH",
    "DICT_NOT_CONTAINS",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "HASATTR",
    "NOT_PRESENT_IN_GENERIC_DICT",
    "SEQUENCE_LENGTH",
    "SET_CONTAINS",
}
"""Kinds of guards that ask what a container holds, or an object has."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One guard: the place that it looks at, its kind and, in the process that captured, its ``mark``."""

    place: str
    kind: str
    mark: str


def readings(read: Iterable[tuple[str, str]], traced: nn.Module) -> list[Reading]:
    """What these guards find now.

    Raises:
        UnfaithfulError: one asks for what no other process can compare.
    """
    asked = list(read)
    marks = marks_of(asked, _look_up([place for place, _ in asked], traced))
    return [Reading(place, kind, mark) for (place, kind), mark in zip(asked, marks, strict=True)]


def _look_up(places: Sequence[str], traced: nn.Module) -> list[Any]:
    try:
        return reader(places, type(traced).forward.__globals__)(traced)
    except UnknownPlaceError as error:
        raise UnfaithfulError(f"a place written as {error}") from error
    except Exception as error:  # whatever attributes of the model's objects raise
        raise UnfaithfulError(f"a place is gone: {error!r}") from error


def marks_of(asked: Sequence[tuple[str, str]], values: Sequence[Any]) -> list[str]:
    """The marks of values that guards of these places and kinds ask for."""
    first: dict[int, int] = {}
    marks = []
    for position, ((place, kind), value) in enumerate(zip(asked, values, strict=True)):
        try:
            same_as = first.setdefault(id(value), position)
            marks.append(f"as {same_as}" if kind == "DUPLICATE_INPUT" else _mark(kind, value))
        except UnfaithfulError as error:
            raise UnfaithfulError(f"{error} at {place}") from error
    return marks


def _mark(kind: str, value: Any) -> str:
    if kind in CONSTANTS or kind in IDENTITIES:
        return value_mark(value)
    if kind == "TYPE_MATCH":
        return class_mark(type(value))
    if kind in OUTLINE:
        return f"{class_mark(type(value))} {digest(map(plain_mark, outline(value)))}"
    raise UnfaithfulError(f"a guard of the kind {kind}")


_MAPPINGS = (dict, OrderedDict)
"""Most mappings are of these types, which are told more quickly."""


def outline(value: Any) -> Sequence[Any]:
    """The keys of a mapping, the names of an object's attributes, the items of a set, or a length."""
    if type(value) in _MAPPINGS or isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list | tuple | range | str):
        return [len(value)]
    if isinstance(value, set | frozenset):
        return sorted(map(plain_mark, value))
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return sorted(vars(value))
    return []


class KeptGuards:
    """Guards of a capture that another process made, which hold in this one.

    ``constants`` are the plain values that they expect, by place. An object that is the same as when it was
    first looked at is not looked at further, but for what a container holds.

    Raises:
        UnfaithfulError: one does not hold, and so the capture is of another model.
    """

    def __init__(self, expected: Sequence[Reading], traced: nn.Module) -> None:
        self._kinds = [each.kind for each in expected]
        self._places = [each.place for each in expected]
        self._values = _look_up(self._places, traced)
        self._read = reader(self._places, type(traced).forward.__globals__)
        asked = [*zip(self._places, self._kinds, strict=True)]
        for reading, mark in zip(expected, marks_of(asked, self._values), strict=True):
            if reading.mark != mark:
                raise UnfaithfulError(f"{reading.place} is another one now")
        self._contents = {
            position: contents
            for position, (kind, value) in enumerate(zip(self._kinds, self._values, strict=True))
            if (contents := _contents(kind, value)) is not None
        }
        self.constants = {
            place: value
            for (name, kind), value in zip(asked, self._values, strict=True)
            if (place := constant_place(name, kind, value))
        }

    def holds(self, module: nn.Module) -> bool:
        return not self.broken(module)

    def broken(self, module: nn.Module) -> str:
        """The first guard that does not hold, in words; empty if all hold."""
        try:
            values = self._read(module)
        except Exception as error:  # whatever attributes of the model's objects raise
            return f"what the model's code reads is gone: {error!r}"
        changed = [
            position
            for position, (now, before) in enumerate(zip(values, self._values, strict=True))
            if now is not before and not _is_alike(self._kinds[position], now, before)
        ]
        changed += [
            position
            for position, contents in self._contents.items()
            if _contents(self._kinds[position], values[position]) != contents
        ]
        return f"{fqn_of(self._places[changed[0]])} is another one now" if changed else ""


def _contents(kind: str, value: Any) -> Any:
    """What may change inside of a value that a guard looks into; None if nothing may."""
    if kind in OUTLINE:
        return outline(value)
    return copy.deepcopy(value) if kind in CONSTANTS and isinstance(value, list | set | dict) else None


def _is_alike(kind: str, now: Any, before: Any) -> bool:
    """Whether an object that took the place of another one is the same to a guard, but for its contents."""
    if kind in OUTLINE or kind == "TYPE_MATCH":
        return type(now) is type(before)
    if kind in CONSTANTS:
        return type(now) is type(before) and bool(now == before)
    return kind != "DUPLICATE_INPUT" and isinstance(now, types.MethodType) and bool(now == before)
