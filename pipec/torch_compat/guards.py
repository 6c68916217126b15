"""Guards: checks that the Python objects a module read while it was traced are still the same.

Dynamo records every attribute, closure and global that its trace depends on, as guards, which torch compiles
into a check that takes some hundred nanoseconds a module. Guards on arguments, sizes, tensors and torch's own
state are left out, because the key of a compiled call has these. What Dynamo records and does not guard is
compared by its values.
"""

import ast
import functools
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch._dynamo.utils import dynamo_timed, get_metrics_context

from pipec.torch_compat.compared_values import Compared, by_name, comparable, evaluate, fqn_of

CONSTANT_GUARD_TYPES = {"CONSTANT_MATCH", "EQUALS_MATCH"}
"""Kinds of guards that compare a value."""

CALL_GUARD_TYPES = {
    "DETERMINISTIC_ALGORITHMS",
    "FSDP_TRAINING_STATE",
    "GLOBAL_STATE",
    "GRAD_MODE",
    "SHAPE_ENV",
}
"""Kinds of guards on sizes and on torch's own state, which are part of the key of a compiled call."""

TENSOR_GUARD_TYPES = {"DUPLICATE_INPUT", "TENSOR_MATCH", "TYPE_MATCH"}
"""Kinds of guards on the metadata of tensors."""

PYTREE = ("G['pytree']", "G['__import_torch_dot_utils_dot__pytree']", "__import__('torch').utils._pytree")
"""Prefixes of paths in torch's registry of container types, whose growth has no effect."""

Read = Callable[[torch.nn.Module], Any]
"""Reads a value that belongs to a traced module, as it is now."""


class Guards:
    """The guards of one capture. They are built after the module was restored.

    ``constants`` has the plain values that the guards expect, by the expression that reads them in every
    process. ``unguarded`` has functions that read what Dynamo does not guard, by name.
    """

    def __init__(self, capture: Any, module: torch.nn.Module) -> None:
        forward, output = type(module).forward, capture.graph_capture_output
        entries = list[Any]()

        def kept(found: Sequence[Any]) -> list[bool]:
            entries[:] = [entry for entry in found if not _belongs_to_call(entry)]
            return [
                not _belongs_to_call(entry)
                and not (isinstance(entry.value, torch.Tensor) and entry.guard_type in TENSOR_GUARD_TYPES)
                for entry in found
            ]

        build = functools.partial(
            output.build_guards, forward.__code__, SimpleNamespace(guard_filter_fn=kept, guard_fail_fn=None)
        )
        with get_metrics_context(), dynamo_timed("build_guards", log_pt2_compile_event=True):
            try:
                built = build()
            except (AssertionError, AttributeError, LookupError, TypeError) as error:
                _drop_missing(output.output_graph.guards, build, module, isinstance(error, AssertionError))
                built = build()
        self._manager = built.guard_manager
        self._references = [entry.value for entry in entries if _is_compared_by_id(entry)]
        constants = {_of_object(entry.orig_guard.name): entry.value for entry in entries if _is_plain(entry)}
        self.constants = {source: x for source, x in constants.items() if evaluate(source, module) == x}
        codes = {*output.traced_code}
        self.unguarded = by_name(
            [
                *_of_classes(codes, entries, module),
                *_unguarded(entries, codes, module, _scope(built, module)),
                *((fqn_of(source), _written(source)) for source, x in self.constants.items() if _has_zero(x)),
            ]
        )
        vars(built).clear()  # torch refers to it as long as what it guards exists

    def hold(self, module: torch.nn.Module) -> bool:
        """Whether Dynamo's guards hold."""
        return bool(self._manager.check({"self": module}))

    def failure(self, module: torch.nn.Module) -> str:
        """Dynamo's guard that does not hold: ``model.drop.p == 0.1, which dropout.py:73 reads``."""
        check = self._manager.check_verbose({"self": module})
        return " and ".join(map(_readable, check.verbose_code_parts[:1]))


def _is_compared_by_id(entry: Any) -> bool:
    """Whether a value must be held, so that no other object gets its id. The traced module holds modules."""
    is_compared = callable(entry.value) or "ID_MATCH" in entry.derived_guard_types
    return is_compared and not isinstance(entry.value, torch.nn.Module)


def _has_zero(value: object) -> bool:
    """Whether a guard on a value holds for another sign: 0.0 equals -0.0."""
    if isinstance(value, tuple):
        return any(map(_has_zero, value))
    if isinstance(value, complex):
        return not (value.real and value.imag)
    return isinstance(value, float) and not value


def _written(source: str) -> Read:
    """Reads a number as text, with its sign."""
    return lambda module: repr(evaluate(source, module))


def _is_plain(entry: Any) -> bool:
    """Whether a guard compares a plain value that can be read without running code of the model."""
    is_of_property = _PROPERTY.search(entry.orig_guard.name) is not None
    return not is_of_property and entry.guard_type in CONSTANT_GUARD_TYPES and isinstance(entry.value, _PLAIN)


_PROPERTY = re.compile(r"\.f(get|set|del)\b")
"""The functions of a property, of which ``_of_object`` would make what the property computes."""


_PLAIN = (int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


def _of_classes(
    codes: Collection[CodeType], entries: Iterable[Any], module: torch.nn.Module
) -> Iterator[tuple[str, Read]]:
    """What reads the attributes of classes that this code uses.

    These are the methods of modules that it calls, with their code, and the plain attributes that it names of
    classes that it reads, which Dynamo of torch 2.11 does not guard.
    """
    named = {name for code in codes for name in code.co_names}
    of_modules = {base for each in module.modules() for base in type(each).__mro__}
    read = [entry.value for entry in entries if isinstance(entry.value, type)]
    of_others = {base for each in read if not _is_of_torch(each) for base in each.__mro__}
    for kind in of_modules | of_others:
        names = [name for name, x in vars(kind).items() if _code_of(x) in codes]
        if kind in of_others:
            names += [x for x in named & vars(kind).keys() if x != "__module__" and _is_value(vars(kind)[x])]
        if names:
            methods = [x for x in map(vars(kind).get, names) if isinstance(x, FunctionType)]
            yield kind.__qualname__, _attributes(vars(kind), names, methods)
    of_tensors = [name for name in named if hasattr(torch.Tensor, name)]
    yield "Tensor", _attributes(vars(torch.Tensor), of_tensors)


def _attributes(
    space: Mapping[str, Any], names: Sequence[str], functions: Sequence[FunctionType] = ()
) -> Read:
    """Reads the attributes of these names in the dict of a class, and the code of these functions."""
    code = [(f"{each.__name__}.__code__", each) for each in functions]
    return lambda module: {
        **{name: space.get(name) for name in names},
        **{name: each.__code__ for name, each in code},
    }


def _is_value(value: object) -> bool:
    """Whether an attribute of a class is neither a method nor computed."""
    return not callable(value) and not hasattr(value, "__get__")


def _defaults(function: FunctionType, module: torch.nn.Module) -> tuple[Any, ...]:
    return function.__defaults__, function.__kwdefaults__, *function.__dict__


def _is_of_torch(definition: FunctionType | type) -> bool:
    """Whether torch defines it. The module of a function made by ``exec`` or ``eval`` may be None."""
    return str(definition.__module__).startswith("torch.")


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, of a method of any kind, or of a property's getter."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value.__code__ if isinstance(value, FunctionType) else None


def _unguarded(
    entries: Iterable[Any], codes: Collection[CodeType], module: torch.nn.Module, scope: dict[str, Any]
) -> Iterator[tuple[str, Read]]:
    """What reads objects that Dynamo read at these sources, or that this code reads, and does not guard."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    functions = dict[FunctionType, str]()
    for source, entry in {entry.orig_guard.name: entry for entry in entries}.items():
        value, name = entry.value, fqn_of(_of_object(source))
        if isinstance(value, torch.Tensor):
            if id(value) not in registered:
                yield name, _reader(source, scope, comparable)
        elif type(value) in _DICTS and not entry.name.endswith(_REGISTRY):
            # Dynamo does not record a failed lookup by a class of the user's
            yield f"the keys of {name}", _reader(source, scope, list)
        elif isinstance(value, FunctionType) and not _is_of_torch(value):
            functions.setdefault(value, name)
        if value is os.environ or value is os.getenv:
            yield "os.environ", lambda module: Compared(("the environment", dict(os.environ)))
    for function, name in functions.items():
        yield f"the defaults and attributes of {name}", functools.partial(_defaults, function)
    own = [code for code in codes if not code.co_filename.startswith(_TORCH)]
    if any("requires_grad" in code.co_names for code in own):
        yield "requires_grad", lambda module: [x.requires_grad for x in module.parameters()]


_DICTS = (dict, OrderedDict, defaultdict, Counter)

_REGISTRY = (".__dict__", ".__dict__)", "._modules", "._parameters", "._buffers", "_hooks", "_with_kwargs")
"""Suffixes of the dicts of a module's or object's attributes. Dynamo guards the lookups in these itself."""

_TORCH = str(Path(torch.__file__).parent)


def _of_object(source: str) -> str:
    """An attribute of a class, ``dict(type(self.model).__dict__)['scale']``, as one of its object."""
    return re.sub(r"dict\(type\((.*)\)(\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"\1.\3", source)


def _identity(value: Any) -> Any:
    return value


def _scope(built: Any, module: torch.nn.Module) -> dict[str, Any]:
    """The names in Dynamo's expressions, but for arguments. Arrays stay arrays."""
    arrays = {"___from_numpy": _identity, "___as_tensor": _identity}
    return {**built.guard_manager.closure_vars, **arrays, "G": type(module).forward.__globals__}


def _reader(source: str, scope: dict[str, Any], convert: Callable[[Any], Any] = _identity) -> Read:
    """Evaluates a source in Dynamo's notation: ``L['self'].shifts[0]``, or ``___from_numpy(G['table'])``."""
    code = compile(source, "<source of a guard>", "eval")
    return lambda module: convert(eval(code, scope, {"L": {"self": module}}))


def _drop_missing(guards: Any, build: Callable[[], Any], module: torch.nn.Module, remade: bool) -> None:
    """Drop guards of objects that the traced call created, and that restoring the module has removed.

    With ``remade``, also of those that a property makes at each read, which torch 2.11 cannot guard.
    """
    found, collection = [*guards], type(guards.inner)
    guards.inner = collection()
    scope = _scope(build(), module)

    def exists(guard: Any) -> bool:
        try:
            read = _reader(guard.name, scope)
            value = read(module)
        except (AttributeError, LookupError, TypeError):
            return False
        return not remade or read(module) is value or isinstance(value, _PLAIN)

    guards.inner = collection(
        [guard for guard in found if not guard.name or _is_on_arguments(guard) or exists(guard)]
    )


def _belongs_to_call(entry: Any) -> bool:
    return (
        entry.guard_type in CALL_GUARD_TYPES
        or _is_on_arguments(entry.orig_guard)
        or entry.name.startswith(PYTREE)
    )


def _is_on_arguments(guard: Any) -> bool:
    """Whether a guard reads an argument of the traced call or a part of one, or compares objects with it."""
    compared = guard.code_list or [] if guard.create_fn_name() == "DUPLICATE_INPUT" else []
    return any(not _roots(text) <= {"self"} for text in (guard.name, *compared))


@functools.lru_cache(maxsize=100_000)
def _roots(source: str) -> frozenset[str]:
    """The locals of the traced function with which sources in an expression of Dynamo's begin."""
    if source.startswith("L['self']") and source.count("L[") == 1:  # nearly all, so they are not parsed
        return frozenset({"self"})
    return frozenset(
        str(ast.literal_eval(node.slice))
        for node in ast.walk(_parsed(source))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "L"
    )


def _parsed(source: str) -> ast.expr:
    """The syntax tree of an expression; an empty one if names in it, which may be any text, break it."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return ast.Constant(None)


def _readable(text: str) -> str:
    """Torch's text of a guard, with the path in dots and the file name without folders."""
    condition, *comments = text.split("  # ")
    condition = re.sub(r"^___check_(?:obj|type)_id\((.*?), \d+\).*", r"\1 changed", condition)
    source, space, rest = condition.partition(" ")
    line = comments[-1].split(" in ")[0].rsplit("/", 1)[-1] if comments else ""
    return f"{fqn_of(source)}{space}{rest}" + f", which {line} reads" * bool(line)
