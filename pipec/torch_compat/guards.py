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
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._guards import Guard, GuardsSet

from pipec.torch_compat.values import Compared, ValuePath, by_name, comparable, parsed

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

    ``constants`` has the plain values that the guards expect, by path. ``unguarded`` has functions that read
    what Dynamo does not guard, by name.
    """

    def __init__(self, capture: CaptureOutput, module: torch.nn.Module) -> None:
        self.constants: dict[ValuePath, Any] = {}
        self._references: list[object] = []
        self._entries: list[GuardFilterEntry] = []
        forward, output = type(module).forward, capture.graph_capture_output
        build = functools.partial(output.build_guards, forward.__code__, Hooks(guard_filter_fn=self._filter))
        with get_metrics_context(), dynamo_timed("build_guards", log_pt2_compile_event=True):
            try:
                built = build()
            except (AttributeError, LookupError):
                _drop_missing(output.output_graph.guards, forward.__globals__, module)
                built = build()
        self._manager = built.guard_manager
        codes = {*output.traced_code}
        self.unguarded = by_name(
            [
                *_methods(codes, module),
                *_class_attributes(codes, self._entries),
                *_unguarded(self._entries, codes, module),
            ]
        )

    def hold(self, module: torch.nn.Module) -> bool:
        """Whether Dynamo's guards hold."""
        return bool(self._manager.check({"self": module}))

    def failure(self, module: torch.nn.Module) -> str:
        """Dynamo's guard that does not hold: ``model.drop.p == 0.1, which dropout.py:73 reads``."""
        check = self._manager.check_verbose({"self": module})
        return " and ".join(map(_readable, check.verbose_code_parts[:1]))

    def _filter(self, entries: Sequence[GuardFilterEntry]) -> list[bool]:
        self._entries = [entry for entry in entries if not _belongs_to_call(entry)]
        for entry in self._entries:
            value = entry.value
            is_compared_by_id = callable(value) or "ID_MATCH" in entry.derived_guard_types
            if is_compared_by_id and not isinstance(value, torch.nn.Module):
                self._references.append(value)  # so that no other object reuses its id
            is_constant = entry.guard_type in CONSTANT_GUARD_TYPES and isinstance(value, _PLAIN)
            if is_constant and (path := ValuePath.parse(entry.name)):
                self.constants[path] = value
        return [not _belongs_to_call(entry) and not _is_on_tensor(entry) for entry in entries]


_PLAIN = (int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


def _methods(codes: Collection[CodeType], module: torch.nn.Module) -> Iterator[tuple[str, Read]]:
    """What reads the methods of modules and tensors that this code calls, and the code of these methods."""
    for kind in _bases(map(type, module.modules())):
        for name, method in vars(kind).items():
            if _code_of(method) in codes:
                yield f"{kind.__qualname__}.{name}", functools.partial(_item, vars(kind), name)
                if isinstance(method, FunctionType):
                    yield f"the code of {kind.__qualname__}.{name}", functools.partial(_code, method)
    for name in {name for code in codes for name in code.co_names if hasattr(torch.Tensor, name)}:
        yield f"Tensor.{name}", functools.partial(_item, vars(torch.Tensor), name)


def _class_attributes(
    codes: Collection[CodeType], entries: Iterable[GuardFilterEntry]
) -> Iterator[tuple[str, Read]]:
    """What reads the plain attributes of classes that this code names. Dynamo of torch 2.11 guards none."""
    named = {name for code in codes for name in code.co_names if not name.startswith("__")}
    read = (entry.value for entry in entries if isinstance(entry.value, type))
    for kind in _bases(each for each in read if not _is_of_torch(each)):
        for name in named & vars(kind).keys():
            if not callable(value := vars(kind)[name]) and not hasattr(value, "__get__"):
                yield f"{kind.__qualname__}.{name}", functools.partial(_item, vars(kind), name)


def _bases(classes: Iterable[type]) -> Iterable[type]:
    return dict.fromkeys(base for each in classes for base in each.__mro__)


def _defaults(function: FunctionType, module: torch.nn.Module) -> tuple[Any, ...]:
    return function.__defaults__, function.__kwdefaults__, *function.__dict__


def _item(space: Mapping[str, Any], name: str, module: torch.nn.Module) -> Any:
    return space.get(name)


def _code(function: FunctionType, module: torch.nn.Module) -> CodeType:
    return function.__code__


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
    entries: Iterable[GuardFilterEntry], codes: Collection[CodeType], module: torch.nn.Module
) -> Iterator[tuple[str, Read]]:
    """What reads objects that Dynamo read at these sources, or that this code reads, and does not guard."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    module_globals = type(module).forward.__globals__
    for source, entry in {entry.orig_guard.name: entry for entry in entries}.items():
        value, name = entry.value, str(ValuePath.parse(source) or fqn_of(source))
        if isinstance(value, torch.Tensor):
            if id(value) not in registered:
                yield name, _reader(source, module_globals, comparable)
        elif type(value) in _DICTS and not entry.name.endswith(_REGISTRY):
            # Dynamo does not record a failed lookup by a class of the user's
            yield f"the keys of {name}", _reader(source, module_globals, list)
        elif isinstance(value, FunctionType) and not _is_of_torch(value):
            yield f"the defaults and attributes of {name}", functools.partial(_defaults, value)
        if value is os.environ or value is os.getenv:
            yield "os.environ", lambda module: Compared(("the environment", dict(os.environ)))
    own = [code for code in codes if not code.co_filename.startswith(_TORCH)]
    if any("requires_grad" in code.co_names for code in own):
        yield "requires_grad", lambda module: [x.requires_grad for x in module.parameters()]


_DICTS = (dict, OrderedDict, defaultdict, Counter)

_REGISTRY = (".__dict__", ".__dict__)", "._modules", "._parameters", "._buffers", "_hooks", "_with_kwargs")
"""Suffixes of the dicts of a module's or object's attributes. Dynamo guards the lookups in these itself."""

_TORCH = str(Path(torch.__file__).parent)


def _identity(value: Any) -> Any:
    return value


def _reader(source: str, module_globals: dict[str, Any], convert: Callable[[Any], Any] = _identity) -> Read:
    """Evaluates a source in Dynamo's notation: ``L['self'].shifts[0]``, or ``___from_numpy(G['table'])``."""
    code = compile(source, "<source of a guard>", "eval")
    arrays = {"___from_numpy": _identity, "___as_tensor": _identity}
    scope = {**_get_closure_vars(), **arrays, "G": module_globals}
    return lambda module: convert(eval(code, scope, {"L": {"self": module}}))


def _drop_missing(guards: GuardsSet, module_globals: dict[str, Any], module: torch.nn.Module) -> None:
    """Drop guards of objects that the traced call created, and that restoring the module has removed."""

    def exists(guard: Guard) -> bool:
        try:
            _reader(guard.name, module_globals)(module)
        except (AttributeError, LookupError):
            return False
        return True

    existing = [guard for guard in guards if not guard.name or _is_on_arguments(guard) or exists(guard)]
    guards.inner = type(guards.inner)(existing)


def _belongs_to_call(entry: GuardFilterEntry) -> bool:
    return (
        entry.guard_type in CALL_GUARD_TYPES
        or _is_on_arguments(entry.orig_guard)
        or entry.name.startswith(PYTREE)
    )


def _is_on_tensor(entry: GuardFilterEntry) -> bool:
    return isinstance(entry.value, torch.Tensor) and entry.guard_type in TENSOR_GUARD_TYPES


def _is_on_arguments(guard: Guard) -> bool:
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
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "L"
    )


def _readable(text: str) -> str:
    """Torch's text of a guard, with the path in dots and the file name without folders."""
    condition, *comments = text.split("  # ")
    source, space, rest = condition.partition(" ")
    line = comments[-1].split(" in ")[0].rsplit("/", 1)[-1] if comments else ""
    return f"{fqn_of(source)}{space}{rest}" + f", which {line} reads" * bool(line)


def fqn_of(source: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``getattr(L['self'].model.h, '0')`` as ``model.h.0``."""
    dotted, changed = source, 1
    while changed:
        dotted, changed = re.subn(r"getattr\(([^()]*), '(.*?)'\)", r"\1.\2", dotted)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    dotted = re.sub(r"\.(__dict__|_modules)\b", "", dotted)
    return dotted.removeprefix("L.self").removeprefix(".")
