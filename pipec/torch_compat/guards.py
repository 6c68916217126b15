"""What Dynamo took for granted of the objects that a module read while it was traced, to be checked again.

Dynamo notes every attribute, closure and global that decided what it traced. Torch compiles these notes, the
guards, into a check that takes some hundred nanoseconds a module. Guards on arguments, on sizes, on tensors
and on torch's own state are left out: whoever keeps a graph knows those of its calls. What Dynamo noted, but
does not look at again, has guards of its own here.
"""

import ast
import functools
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._guards import Guard, GuardsSet

from pipec.errors import CaptureError
from pipec.torch_compat.module_state import num_changes

CONSTANT_GUARD_TYPES = {"CONSTANT_MATCH", "EQUALS_MATCH"}
"""Kinds of guards that compare a value."""

CALL_GUARD_TYPES = {
    "DETERMINISTIC_ALGORITHMS",
    "FSDP_TRAINING_STATE",
    "GLOBAL_STATE",
    "GRAD_MODE",
    "SHAPE_ENV",
}
"""Kinds of guards on sizes, and on torch's own state, which is part of what a call is compiled for."""

TENSOR_GUARD_TYPES = {"DUPLICATE_INPUT", "TENSOR_MATCH", "TYPE_MATCH"}
"""Kinds of guards on what a tensor is."""

PYTREE = ("G['pytree']", "G['__import_torch_dot_utils_dot__pytree']", "__import__('torch').utils._pytree")
"""How the places begin that belong to torch's registry of containers, which grows without any effect."""


@dataclass(frozen=True)
class ValuePath:
    """Where a value is found: attributes and items, one after the other, from the traced module or a global.

    ``root`` is empty for the module, else the name of an imported module.
    """

    root: str
    steps: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, source: str) -> "ValuePath | None":
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


class ValueGuard:
    """Compares what ``read`` finds below a traced module with what it found when this was made."""

    def __init__(self, place: str, read: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> None:
        self._place, self._read = place, read
        self._expected = read(module)

    def __str__(self) -> str:
        return f"{self._place} was another one, or had other values"

    def holds(self, module: torch.nn.Module) -> bool:
        try:
            return bool(self._read(module) == self._expected)
        except Exception:  # whatever attributes of the model's objects raise
            return False


def constant_guard(place: str, find: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> ValueGuard:
    """Expects the tensor or the array that ``find`` finds, which a graph holds as a constant, unchanged.

    Torch counts the changes of a tensor. Of an array there are the values alone.
    """
    value = find(module)
    kept = value if isinstance(value, torch.Tensor) else None  # so that no other gets its address

    def read(module: torch.nn.Module) -> Any:
        found = find(module)
        if isinstance(found, torch.Tensor):
            is_plain = type(found) is torch.Tensor and found.layout is torch.strided
            return found is kept, num_changes(found), found.data_ptr() if is_plain else 0
        if isinstance(found, np.ndarray | np.generic):
            return type(found), found.dtype, found.shape, found.tobytes()
        return type(found), found

    return ValueGuard(place, read, module)


def _finder(source: str, known: dict[str, Any]) -> Callable[[torch.nn.Module], Any]:
    """Looks up what Dynamo writes as ``L['self'].shifts[0]``, or ``___from_numpy(G['table'])``, an array."""
    code = compile(source, "<place of a guard>", "eval")
    scope = {**_get_closure_vars(), "___from_numpy": _itself, "___as_tensor": _itself, "G": known}
    return lambda module: eval(code, scope, {"L": {"self": module}})


def _itself(value: Any) -> Any:
    return value


def _value_guards(
    entries: Iterable[GuardFilterEntry],
    codes: Collection[CodeType],
    registered: Collection[int],
    module: torch.nn.Module,
) -> Iterator[ValueGuard]:
    """Guards of what Dynamo found at these places, or this code reads, and Dynamo does not look at again."""
    yield _methods_guard(codes, module)
    known, found = type(module).forward.__globals__, {entry.orig_guard.name: entry for entry in entries}
    functions, reads_environment = list[FunctionType](), False
    for source, entry in found.items():
        value = entry.value
        if isinstance(value, torch.Tensor):
            if id(value) not in registered:
                yield constant_guard(fqn_of(source), _finder(source, known), module)
        elif type(value) in _DICTS and not entry.name.endswith(_REGISTRY):
            yield _keys_guard(source, _finder(source, known), module)
        elif isinstance(value, FunctionType) and not _is_torchs(value):
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


def _is_torchs(function: FunctionType) -> bool:
    """Whether torch defines a function. One that ``exec`` or ``eval`` has made may be of no module."""
    return str(function.__module__).startswith("torch.")


_DICTS = (dict, OrderedDict, defaultdict, Counter)

_REGISTRY = (".__dict__", ".__dict__)", "._modules", "._parameters", "._buffers", "_hooks", "_with_kwargs")
"""How places end that hold what a module or an object has: what Dynamo looks for there it looks for again."""

_TORCH = str(Path(torch.__file__).parent)


def _keys_guard(source: str, find: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> ValueGuard:
    """Expects the keys of a dict: Dynamo does not note a key that a class of the user's looks for in vain."""
    return ValueGuard(f"the keys of {fqn_of(source)}", lambda module: [*find(module)], module)


def _methods_guard(codes: Collection[CodeType], module: torch.nn.Module) -> ValueGuard:
    """Expects the methods that modules and tensors have by their classes, where this code calls them."""
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
    """The code of a function, of a method of any kind, or of what a property computes."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value.__code__ if isinstance(value, FunctionType) else None


class Guards:
    """The guards of one capture, made once the module is again as it was before.

    ``constants`` are the plain values they expect, by place. What Dynamo does not look at again is compared
    besides.

    Raises:
        CaptureError: they do not hold although nothing has happened since the capture.
    """

    def __init__(self, capture: CaptureOutput, module: torch.nn.Module) -> None:
        self.constants: dict[ValuePath, Any] = {}
        self._alive: list[object] = []
        self._entries: list[GuardFilterEntry] = []
        forward, found = type(module).forward, capture.graph_capture_output
        build = functools.partial(found.build_guards, forward.__code__, Hooks(guard_filter_fn=self._filtered))
        with get_metrics_context(), dynamo_timed("build_guards", log_pt2_compile_event=True):
            try:
                built = build()
            except (AttributeError, LookupError):
                _drop_undone(found.output_graph.guards, forward.__globals__, module)
                built = build()
        self._manager = built.guard_manager
        registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._values = [*_value_guards(self._entries, {*found.traced_code}, registered, module)]
        if broken := self.violation(module):
            raise CaptureError(
                f"the model was traced, but nothing would tell when to trace it again, for directly after it "
                f"{broken}: see that forward() reads no attribute or property that is another one each time"
            )

    def holds(self, module: torch.nn.Module) -> bool:
        return bool(self._manager.check({"self": module})) and all(x.holds(module) for x in self._values)

    def violation(self, module: torch.nn.Module) -> str:
        """The first guard that does not hold: ``model.drop.p == 0.1 at dropout.py:73``; empty if all hold."""
        found = self._manager.check_verbose({"self": module})
        if not found.result:
            return " and ".join(map(_readable, found.verbose_code_parts[:1]))
        return next((str(guard) for guard in self._values if not guard.holds(module)), "")

    def _filtered(self, entries: Sequence[GuardFilterEntry]) -> list[bool]:
        for entry in (own := [entry for entry in entries if not _of_the_call(entry)]):
            value = entry.value
            is_kept = callable(value) or "ID_MATCH" in entry.derived_guard_types
            if is_kept and not isinstance(value, torch.nn.Module):
                self._alive.append(value)  # guards know it by its address, which another could be given
            if place := constant_path(entry.name, entry.guard_type, value):
                self.constants[place] = value
        self._entries = own
        return [not _of_the_call(entry) and not _of_a_tensor(entry) for entry in entries]


def _drop_undone(guards: GuardsSet, known: dict[str, Any], module: torch.nn.Module) -> None:
    """Drop guards of what only the first call of the model has made, which is undone after the capture."""

    def exists(guard: Guard) -> bool:
        try:
            _finder(guard.name, known)(module)
        except (AttributeError, LookupError):
            return False
        return True

    kept = [guard for guard in guards if not guard.name or _of_arguments(guard) or exists(guard)]
    guards.inner = type(guards.inner)(kept)


def _of_the_call(entry: GuardFilterEntry) -> bool:
    return (
        entry.guard_type in CALL_GUARD_TYPES
        or _of_arguments(entry.orig_guard)
        or entry.name.startswith(PYTREE)
    )


def _of_a_tensor(entry: GuardFilterEntry) -> bool:
    return isinstance(entry.value, torch.Tensor) and entry.guard_type in TENSOR_GUARD_TYPES


def constant_path(name: str, kind: str, value: object) -> ValuePath | None:
    """The place of a plain value that a guard compares; None of another guard, or of torch's own values."""
    if kind not in CONSTANT_GUARD_TYPES or not isinstance(value, _PLAIN):
        return None
    return ValuePath.parse(name)


_PLAIN = (int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


def _of_arguments(guard: Guard) -> bool:
    """Whether a guard looks at an argument of the traced call or a part of one, or tells others from it."""
    compared = guard.code_list or [] if guard.create_fn_name() == "DUPLICATE_INPUT" else []
    return any(root != "self" for text in (guard.name, *compared) for root in _roots(text))


def _parsed(source: str) -> ast.expr:
    """The expression; an empty one if the names in it, which may be any text, make it none."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return ast.Constant(None)


def _roots(source: str) -> Iterator[str]:
    """The locals of the traced function that an expression of Dynamo's begins with."""
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "L":
            yield str(ast.literal_eval(node.slice))


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
