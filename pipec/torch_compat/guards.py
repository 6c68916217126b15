"""Guards: checks that the Python objects a module read while it was traced are still the same.

Dynamo records every attribute, closure and global that its trace depends on, as guards, which torch compiles
into a check that takes some hundred nanoseconds a module. Guards on arguments, sizes, tensors and torch's own
state are left out, because the compile cache compares these itself. Objects that Dynamo records but does not
guard get guards of pipec's own.
"""

import ast
import functools
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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

from pipec.errors import CaptureError
from pipec.torch_compat.value_guards import ValueGuard, ValuePath, constant_guard, parsed

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


def _getter(source: str, module_globals: dict[str, Any]) -> Callable[[torch.nn.Module], Any]:
    """Evaluates a source in Dynamo's notation: ``L['self'].shifts[0]``, or ``___from_numpy(G['table'])``."""
    code = compile(source, "<source of a guard>", "eval")
    scope = {
        **_get_closure_vars(),
        "___from_numpy": _identity,
        "___as_tensor": _identity,
        "G": module_globals,
    }
    return lambda module: eval(code, scope, {"L": {"self": module}})


def _identity(value: Any) -> Any:
    return value


def _value_guards(
    entries: Iterable[GuardFilterEntry],
    codes: Collection[CodeType],
    registered: Collection[int],
    module: torch.nn.Module,
) -> Iterator[ValueGuard]:
    """Guards of objects that Dynamo read at these sources, or that this code reads, and does not guard."""
    yield _methods_guard(codes, module)
    module_globals, by_source = type(module).forward.__globals__, {e.orig_guard.name: e for e in entries}
    functions, reads_environment = list[FunctionType](), False
    for source, entry in by_source.items():
        value = entry.value
        if isinstance(value, torch.Tensor):
            if id(value) not in registered:
                yield constant_guard(fqn_of(source), _getter(source, module_globals), module)
        elif type(value) in _DICTS and not entry.name.endswith(_REGISTRY):
            yield _keys_guard(source, _getter(source, module_globals), module)
        elif isinstance(value, FunctionType) and not _is_defined_by_torch(value):
            functions.append(value)
        reads_environment |= value is os.environ or value is os.getenv
    if reads_environment:
        yield ValueGuard("os.environ", lambda _: dict(os.environ), module)
    if functions:
        yield ValueGuard("an attribute of a function", lambda _: [len(x.__dict__) for x in functions], module)
    own = [code for code in codes if not code.co_filename.startswith(_TORCH)]
    if any("requires_grad" in code.co_names for code in own):
        yield ValueGuard(
            "requires_grad", lambda module: [x.requires_grad for x in module.parameters()], module
        )


def _is_defined_by_torch(function: FunctionType) -> bool:
    """Whether torch defines a function. The module of one made by ``exec`` or ``eval`` may be None."""
    return str(function.__module__).startswith("torch.")


_DICTS = (dict, OrderedDict, defaultdict, Counter)

_REGISTRY = (".__dict__", ".__dict__)", "._modules", "._parameters", "._buffers", "_hooks", "_with_kwargs")
"""Suffixes of the dicts of a module's or object's attributes. Dynamo guards the lookups in these itself."""

_TORCH = str(Path(torch.__file__).parent)


def _keys_guard(source: str, get: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> ValueGuard:
    """A guard on the keys of a dict: Dynamo does not record a failed lookup by a class of the user's."""
    return ValueGuard(f"the keys of {fqn_of(source)}", lambda module: [*get(module)], module)


def _methods_guard(codes: Collection[CodeType], module: torch.nn.Module) -> ValueGuard:
    """A guard on the methods of modules and tensors that this code calls."""
    classes = {base for each in module.modules() for base in type(each).__mro__}
    named = [(vars(base), name) for base in classes for name, x in vars(base).items() if _code_of(x) in codes]
    methods = [space[name] for space, name in named]
    functions = [method for method in methods if isinstance(method, FunctionType)]
    called = {name for code in codes for name in code.co_names if hasattr(torch.Tensor, name)}
    named += [(vars(torch.Tensor), name) for name in called]

    def read(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
        return [space.get(name) for space, name in named], [each.__code__ for each in functions]

    return ValueGuard("a method of a module or of tensors", read, module)


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, of a method of any kind, or of a property's getter."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value.__code__ if isinstance(value, FunctionType) else None


class Guards:
    """The guards of one capture. They are built after the module was restored.

    ``constants`` has the plain values that the guards expect, by path.

    Raises:
        CaptureError: the guards do not hold directly after the capture.
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
        registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._values = [*_value_guards(self._entries, {*output.traced_code}, registered, module)]
        if violation := self.violation(module):
            raise CaptureError(
                f"the model was traced, but its guards do not hold directly afterwards: {violation}. "
                "forward() must not read an attribute or property that differs each time"
            )

    def holds(self, module: torch.nn.Module) -> bool:
        return bool(self._manager.check({"self": module})) and all(x.holds(module) for x in self._values)

    def violation(self, module: torch.nn.Module) -> str:
        """The first guard that does not hold: ``model.drop.p == 0.1 at dropout.py:73``; empty if all hold."""
        check = self._manager.check_verbose({"self": module})
        if not check.result:
            return " and ".join(map(_readable, check.verbose_code_parts[:1]))
        return next((str(guard) for guard in self._values if not guard.holds(module)), "")

    def _filter(self, entries: Sequence[GuardFilterEntry]) -> list[bool]:
        for entry in (own := [entry for entry in entries if not _belongs_to_call(entry)]):
            value = entry.value
            is_compared_by_id = callable(value) or "ID_MATCH" in entry.derived_guard_types
            if is_compared_by_id and not isinstance(value, torch.nn.Module):
                self._references.append(value)  # so that no other object reuses its id
            if path := constant_path(entry.name, entry.guard_type, value):
                self.constants[path] = value
        self._entries = own
        return [not _belongs_to_call(entry) and not _is_on_tensor(entry) for entry in entries]


def _drop_missing(guards: GuardsSet, module_globals: dict[str, Any], module: torch.nn.Module) -> None:
    """Drop guards of objects that the traced call created, and that restoring the module has removed."""

    def exists(guard: Guard) -> bool:
        try:
            _getter(guard.name, module_globals)(module)
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


def constant_path(name: str, kind: str, value: object) -> ValuePath | None:
    """The path of a plain value that a guard compares; None for other guards, and for torch's own values."""
    if kind not in CONSTANT_GUARD_TYPES or not isinstance(value, _PLAIN):
        return None
    return ValuePath.parse(name)


_PLAIN = (int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


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
