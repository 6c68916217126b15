"""Dataclasses as JSON, and back, with every type checked.

An object of a dataclass is a JSON object with a key for each field. Lists and tuples are arrays, mappings are
objects, and a member of an enumeration is its value. Reading follows the annotations of the fields: fields
that are absent have their defaults, a number without a fraction may stand for a float, and stays an integer.
"""

import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from pipec.ir.argument_checks import short_repr

T = TypeVar("T")


def dump_json(value: Any, indent: int | None = None) -> str:
    """The JSON of a dataclass's object."""
    return json.dumps(value, default=_plain, indent=indent)


def parse_json(kind: type[T], text: str | bytes) -> T:
    """The object of dataclass ``kind`` that ``dump_json`` wrote. Raises ValueError as ``read_plain`` does."""
    return read_plain(kind, json.loads(text))


def read_plain(kind: type[T], found: Any) -> T:
    """The object of dataclass ``kind`` with these plain values: what ``json.loads`` or ``asdict`` returns.

    Raises:
        ValueError: a field is missing or unknown, or has a value of another type; the path to it is told.
    """
    return cast(T, _reader(cast(Any, kind))(found, "the file"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"{short_repr(value)} has no form in JSON")


_Reader = Callable[[Any, str], Any]
"""Takes a plain value and the path to it; returns what it stands for."""


@functools.cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda found, path: found
    if origin in (typing.Union, types.UnionType):
        return _union(kind, [_reader(each) for each in arguments])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed_tuple([_reader(each) for each in arguments])
    if origin in (list, tuple, Sequence):
        return _array(list if origin is list else tuple, _reader(arguments[0]))
    if origin in (dict, Mapping):
        return _mapping(*map(_reader, arguments))
    if is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return _scalar(kind)


def _refuse(expected: str, found: Any, path: str) -> ValueError:
    return ValueError(f"{path}: expected {expected}, found {short_repr(found)}")


def _scalar(kind: type) -> _Reader:
    assert kind in (bool, int, float, str, types.NoneType), kind
    accepted = (int, float) if kind is float else (kind,)

    def read(found: Any, path: str) -> Any:
        if type(found) not in accepted:
            raise _refuse(kind.__name__, found, path)
        if kind is float and type(found) is int and abs(found) > sys.float_info.max:
            raise _refuse("a float", found, path)
        return found

    return read


def _member(kind: type[Enum]) -> _Reader:
    def read(found: Any, path: str) -> Any:
        try:
            return kind(found)
        except ValueError:
            raise _refuse(f"one of {[each.value for each in kind]}", found, path) from None

    return read


def _union(kind: Any, readers: Sequence[_Reader]) -> _Reader:
    def read(found: Any, path: str) -> Any:
        deepest: ValueError | None = None
        for reader in readers:
            try:
                return reader(found, path)
            except ValueError as error:
                if not str(error).startswith(f"{path}: "):
                    deepest = error  # inside a value of the right kind
        raise deepest or _refuse(str(kind), found, path)

    return read


def _items(found: Any, path: str) -> Sequence[Any]:
    if not isinstance(found, list | tuple):
        raise _refuse("a list", found, path)
    return found


def _array(make: Callable[[Any], Any], read_item: _Reader) -> _Reader:
    return lambda found, path: make(
        [read_item(each, _below(path, k)) for k, each in enumerate(_items(found, path))]
    )


def _fixed_tuple(readers: Sequence[_Reader]) -> _Reader:
    def read(found: Any, path: str) -> Any:
        if len(_items(found, path)) != len(readers):
            raise _refuse(f"{len(readers)} items", found, path)
        pairs = enumerate(zip(readers, found, strict=True))
        return tuple(reader(each, _below(path, k)) for k, (reader, each) in pairs)

    return read


def _mapping(read_key: _Reader, read_value: _Reader) -> _Reader:
    def read(found: Any, path: str) -> Any:
        if not isinstance(found, Mapping):
            raise _refuse("an object", found, path)
        return {read_key(key, path): read_value(value, _below(path, key)) for key, value in found.items()}

    return read


def _dataclass(kind: Any) -> _Reader:
    @functools.cache  # resolved late: annotations may name later classes
    def readers() -> Mapping[str, _Reader]:
        hints = typing.get_type_hints(kind)
        return {each.name: _reader(hints[each.name]) for each in fields(kind)}

    required = [x.name for x in fields(kind) if x.default is MISSING and x.default_factory is MISSING]

    def read(found: Any, path: str) -> Any:
        if not isinstance(found, Mapping):
            raise _refuse("an object", found, path)
        if unknown := [name for name in found if name not in readers()]:
            raise ValueError(f"{path}: {kind.__name__.strip('_')} has no field {short_repr(unknown[0])}")
        if missing := [name for name in required if name not in found]:
            raise ValueError(f"{_below(path, missing[0])}: the field is missing")
        return kind(**{name: readers()[name](value, _below(path, name)) for name, value in found.items()})

    return read


def _below(path: str, part: object) -> str:
    return str(part) if path == "the file" else f"{path}.{part}"
