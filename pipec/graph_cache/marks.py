"""Marks: short texts that tell, in any process, whether a value or a piece of code is the same.

Where no text can tell, ``UnfaithfulError`` says so: a graph is kept only if all that decided it has marks.
"""

import enum
import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipec.graph_cache.files import is_of_python
from pipec.torch_compat import OpOverload, runs_while_traced

MOST_BYTES = 1 << 24
"""Tensors that are larger are not compared."""

_TORCH_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, OpOverload)

_SINGLE = (type(None), type(...), type(NotImplemented))


class UnfaithfulError(Exception):
    """Nothing tells whether another process would have the same here."""


def digest(parts: Iterable[str]) -> str:
    """One mark of many, in their order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)}:".encode())
        found.update(part.encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def value_mark(value: Any) -> str:
    """The mark of all that is in a value.

    Raises:
        UnfaithfulError: it holds an object that is known by its identity alone.
    """
    try:
        return _mark(value, object_mark)
    except RecursionError:
        raise UnfaithfulError(f"a {name_of(type(value))} that holds itself") from None


def plain_mark(value: Any) -> str:
    """As ``value_mark``; of what holds objects, classes or functions, the name of its class alone."""
    try:
        return _mark(value, _refused)
    except (UnfaithfulError, RecursionError):
        return name_of(type(value))


def _refused(value: Any) -> str:
    raise UnfaithfulError(f"a {name_of(type(value))}")


def _mark(value: Any, of_object: Callable[[Any], str]) -> str:
    kind, mark = type(value), functools.partial(_mark, of_object=of_object)
    if kind in (bool, int, float, complex, str, bytes) or kind in _SINGLE or kind in _TORCH_NAMES:
        return f"{kind.__name__} {value!r}"
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        return f"{kind.__name__} {value!r}"
    if issubclass(kind, enum.Enum):
        return f"{name_of(kind)}.{value.name}"
    if kind in (tuple, list):
        return f"{kind.__name__} {[*map(mark, value)]}"
    if kind in (set, frozenset):
        return f"{kind.__name__} {sorted(map(mark, value))}"
    if kind is dict:
        return f"dict {[(mark(key), mark(item)) for key, item in value.items()]}"
    if issubclass(kind, Tensor):
        return tensor_mark(value)
    return of_object(value)


def object_mark(value: Any) -> str:
    """The mark of a function, a class or a module; of a class, of what it defines.

    Raises:
        UnfaithfulError: the value is no such thing.
    """
    match value:
        case types.ModuleType() | types.BuiltinFunctionType() | types.MethodDescriptorType():
            return f"{type(value).__name__} {name_of(value)}"
        case types.WrapperDescriptorType() | types.MethodWrapperType() | types.GetSetDescriptorType():
            return f"{type(value).__name__} {value.__objclass__.__qualname__}.{value.__name__}"
        case types.CodeType():
            return code_mark(value)
        case types.FunctionType():
            if runs_while_traced(value):
                raise UnfaithfulError(f"{name_of(value)}, which runs while the model is traced")
            return f"{name_of(value)} {code_mark(value.__code__)}"
        case types.MethodType():
            return f"method of {class_mark(type(value.__self__))} {object_mark(value.__func__)}"
        case type():
            return class_mark(value)
        case functools.partial():
            return f"partial {value_mark([value.func, list(value.args), dict(value.keywords)])}"
    if type(value) in _TORCH_NAMES:
        return str(value)
    return _refused(value)


def tensor_mark(tensor: Tensor) -> str:
    """The mark of shape, type and values."""
    about = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"
    if tensor.is_meta:
        return about
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes > MOST_BYTES:
        raise UnfaithfulError(f"a large or unusual tensor: {about}")
    return f"{about} {hashlib.sha256(tensor_bytes(tensor)).hexdigest()}"


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor, in order, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def name_of(value: Any) -> str:
    names = (
        getattr(value, "__module__", None),
        getattr(value, "__qualname__", getattr(value, "__name__", "")),
    )
    return ".".join(map(str, filter(None, names)))


_marks: dict[type, str] = {}


def class_mark(kind: type) -> str:
    """The mark of a class: its name, and what it and the classes that it inherits from define.

    It is kept until ``forget_classes``, because models have many objects of few classes.
    """
    bases = [base for base in kind.__mro__ if not is_of_python(base.__module__)]
    if kind not in _marks:
        _marks[kind] = f"{name_of(kind)} {digest(map(_own_mark, bases))}"
    return _marks[kind]


def forget_classes() -> None:
    """Look at classes anew, which anyone may have changed meanwhile."""
    _marks.clear()


def _own_mark(kind: type) -> str:
    """What a class itself defines: its functions, and the values that are plain."""
    parts = [name_of(kind)]
    for name, value in vars(kind).items():
        codes = [code_mark(code) for code in codes_of(value)]
        parts.append(f"{name} {codes or plain_mark(value)}")
    return digest(parts)


def codes_of(value: Any, depth: int = 4) -> Iterator[types.CodeType]:
    """The code that runs if a value is called, or read as an attribute. Nothing runs to find it."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value.__code__
        for cell in (value.__closure__ or ()) if depth else ():
            yield from codes_of(_content(cell), depth - 1)
    elif kind in (staticmethod, classmethod, types.MethodType):
        yield from codes_of(value.__func__, depth)
    elif kind is property:
        for function in (value.fget, value.fset, value.fdel):
            yield from codes_of(function, depth)
    elif kind in (functools.partial, functools.partialmethod, functools.cached_property):
        yield from codes_of(value.func, depth)
    elif kind is functools._lru_cache_wrapper:
        yield from codes_of(value.__wrapped__, depth)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


@functools.lru_cache(maxsize=1 << 16)
def code_mark(code: types.CodeType) -> str:
    """The mark of the code of a function and of those within it, wherever its file lies."""
    consts = [code_mark(x) if isinstance(x, types.CodeType) else _constant(x) for x in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    lines = (code.co_firstlineno, code.co_linetable, code.co_exceptiontable)
    return digest([code.co_qualname, code.co_code.hex(), *consts, repr((names, counts, lines))])


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else f"{type(value)} {value!r}"
