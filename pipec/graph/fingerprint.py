"""What a later call compares of the model, its loss and torch: values by path, of which two can be compared.

A walk over the modules in Python costs some microseconds for each. So an unchanged model is not walked again:
the contents of the modules of the last walk are read in loops of torch and Python, and compared.
"""

import functools
import hashlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipec.errors import CaptureError
from pipec.ir import Mode
from pipec.torch_compat.compared_values import (
    ABSENT,
    SETTINGS,
    comparable,
    evaluate,
    fqn_of,
    module_contents,
    num_global_hooks,
    read_settings,
    tensor_contents,
)

if TYPE_CHECKING:  # a rank that captures nothing has none
    from pipec.torch_compat.guards import Guards

Values = Mapping[str, Any]
"""Values by path. The text of a path names the value: ``model.drop.p``, ``training of model.drop``."""


def difference(before: Values, now: Values, name: Callable[[str], str] = str) -> str:
    """The first value that has changed, and how many others: ``model.drop.p changed from 0.1 to 0.2``.

    ``name`` makes a text of a path.
    """
    if [*before] == [*now] and _same([*before.values()], [*now.values()]):
        return ""
    pairs = ((path, before.get(path, ABSENT), now.get(path, ABSENT)) for path in {**before, **now})
    changed = [_change(name(path), one, other) for path, one, other in pairs if not _same([one], [other])]
    return "".join(changed[:1]) + f", and {len(changed) - 1} more" * (len(changed) > 1)


def _change(path: str, one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        return difference(one, other, lambda key: f"{path}.{key}")
    return f"{path} changed from {_text(one)} to {_text(other)}"


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether values are the same, or equal and of one type."""
    try:
        return some == others and [*map(type, some)] == [*map(type, others)]
    except Exception:  # comparing the model's objects may raise any error
        return False


def _text(value: Any) -> str:
    text = value.__qualname__ if isinstance(value, type) else str(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


_MAX_LENGTH = 80


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The values of a model and of torch that decide a capture, besides those that the model's code reads."""

    values: Values

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Fingerprint) and self.values == other.values)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(self.values.items()))

    def without(self, *kinds: str) -> "Fingerprint":
        """Without these kinds of values of modules and tensors."""
        return Fingerprint({path: x for path, x in self.values.items() if _kind(path) not in kinds})

    @functools.cached_property
    def digest(self) -> dict[str, str]:
        """Texts that are equal in all processes with equal values, except for ``requires_grad``."""
        texts, of_model = dict[str, str](), defaultdict[str, list[Any]](list)
        for path, value in self.without("requires_grad").values.items():
            if (kind := _kind(path)) == path:
                texts[path] = str(value)
            else:
                of_model[kind].append((path, _portable(kind, value)))
        return texts | {
            f"{kind} of the model": f"{len(found)} ({_hash_of(found)})" for kind, found in of_model.items()
        }


_OF_MODULES = "class", "training", "hooks"
_OF_TENSORS = "shape", "dtype", "requires_grad", "gradient hooks", "name"
"""What is compared of every module, and of every tensor that a module has registered."""


def _kind(path: str) -> str:
    """``class`` for ``class of model.drop``; the whole path for a setting of torch."""
    kind = path.partition(" of model")[0]
    return kind if kind in (*_OF_MODULES, *_OF_TENSORS) else path


def _portable(kind: str, value: Any) -> Any:
    """A value as other processes have it, too."""
    if kind == "class":
        return f"{value.__module__}.{value.__qualname__}"
    return len(value) if kind == "hooks" else value


def _hash_of(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def torch_values() -> tuple[tuple[str, Any], ...]:
    """torch's modes and settings on which a forward depends, by name."""
    autocast = [
        f"autocast to {torch.get_autocast_dtype(kind)} on {kind}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return (
        ("torch", torch.__version__),
        ("autocast", ", ".join(autocast) or "none"),
        ("default dtype", torch.get_default_dtype()),
        ("hooks of every module", num_global_hooks()),
        *zip(SETTINGS, read_settings(), strict=True),
    )


class ModelSnapshot:
    """The modules and tensors of a model at a moment. A tensor with two names appears twice."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [*model.modules()]
        self._values, self._objects = module_contents(self._modules)
        self.tensors = [each for each in self._objects if isinstance(each, Tensor)]
        self._tensor_values = tensor_contents(self.tensors)
        self._fingerprints: dict[Any, Fingerprint] = {}

    def current(self) -> "ModelSnapshot":
        """The model as it is now: this snapshot itself if nothing has changed."""
        values, objects = module_contents(self._modules)
        is_current = (
            values == self._values
            and same_objects(objects, self._objects)
            and tensor_contents(self.tensors) == self._tensor_values
        )
        return self if is_current else ModelSnapshot(self._model)

    def fingerprint(self, mode: Mode, of_torch: tuple[tuple[str, Any], ...]) -> Fingerprint:
        """The values that decide a capture. ``of_torch`` are those of ``torch_values`` for the call."""
        trains = mode.trains
        if (trains, of_torch) not in self._fingerprints:
            found = Fingerprint(dict(of_torch) | dict(self._by_name()))
            self._fingerprints[trains, of_torch] = found if trains else found.without("requires_grad")
        return self._fingerprints[trains, of_torch]

    def _by_name(self) -> Iterator[tuple[str, Any]]:
        named = [*self._model.named_modules(prefix="model")]
        training, hooks, classes, *_ = self._values
        for (path, _), *values in zip(named, classes, training, hooks or repeat(()), strict=False):
            yield from zip((f"{kind} of {path}" for kind in _OF_MODULES), values, strict=True)
        names = [
            name
            for registered in (nn.Module.named_parameters, nn.Module.named_buffers)
            for path, module in named
            for name, _ in registered(module, path, recurse=False, remove_duplicate=False)
        ]
        metadata, hooked = self._tensor_values
        first = dict[int, str]()
        for name, tensor, values, has_hook in zip(
            names, self.tensors, metadata, hooked or repeat(False), strict=False
        ):
            found = *values, has_hook, first.setdefault(id(tensor), name)
            yield from zip((f"{kind} of {name}" for kind in _OF_TENSORS), found, strict=True)


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, by identity."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class PlainValues:
    """Plain values that code read when it was captured. Every rank compares them before each step.

    ``before`` has them by the expression that reads each of them from a traced module.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._before = before
        self._all = compile(f"[{', '.join(before)}]", "<plain values>", "eval")

    def difference(self, traced: nn.Module) -> str:
        """The values that have changed, in words; empty if none has."""
        found = evaluate(self._all, traced)
        now = [evaluate(each, traced) for each in self._before] if found is ABSENT else found
        return difference(self._before, dict(zip(self._before, now, strict=True)), fqn_of)


@dataclass(frozen=True, eq=False)
class ReadValues:
    """The values that the code of a model and its loss read at capture. A step runs none of that code.

    ``traced`` is the captured module. ``read`` reads the values that are compared before each step. Dynamo's
    ``guards`` compare the others; another front end has none.
    """

    traced: nn.Module
    guards: "Guards | None" = None
    read: Callable[[nn.Module], Values] = lambda traced: {}
    before: Values = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traced: nn.Module,
        guards: "Guards | None",
        constants: Sequence[str],
        readable: Callable[[nn.Module], Values],
    ) -> "ReadValues":
        """The values that a module that was just captured read.

        ``constants`` are the names of tensors in it that the graph holds, and ``readable`` returns the values
        that its code could read, for a capture without guards.

        Raises:
            CaptureError: the values differ directly after the capture, or cannot be read.
        """
        tensors = {name: functools.partial(_tensor, name) for name in constants}
        functions = {**tensors, **guards.unguarded} if guards else tensors

        def read(traced: nn.Module) -> Values:
            try:
                values = {name: each(traced) for name, each in functions.items()}
            except Exception:
                values = {name: _read(each, traced) for name, each in functions.items()}
            return values if guards else {**values, **readable(traced)}

        found = cls(traced, guards, read, read(traced))
        lost = (f"{name} cannot be read" for name, value in found.before.items() if value is ABSENT)
        if guards and (changed := found.difference() or next(lost, "")):
            raise CaptureError(
                f"the model was traced, but what it read is not the same directly afterwards: {changed}. "
                "forward() must not read an attribute or property that differs each time"
            )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadValues":
        """Itself, because a copied graph belongs to the same model."""
        return self

    @functools.cached_property
    def plain(self) -> dict[str, Any]:
        """The plain values that Dynamo's guards compare, and other ranks too, by expression."""
        constants = self.guards.constants if self.guards else {}
        return {
            source: value
            for source, value in constants.items()
            if source.startswith("G") or fqn_of(source).startswith(_NAMES)
        }

    def difference(self) -> str:
        """The changes since capture, in words; empty if nothing has changed."""
        changed = difference(self.before, self.read(self.traced))
        if changed or self.guards is None or self.guards.hold(self.traced):
            return changed
        return PlainValues(self.plain).difference(self.traced) or self.guards.failure(self.traced)


NOTHING_READ = ReadValues(nn.Module())
"""Of a graph without a model."""

_NAMES = ("model.", "loss_fn.")
"""The names of the model and the loss in the module that capture traces."""


def _tensor(name: str, traced: nn.Module) -> Any:
    return comparable(operator.attrgetter(name)(traced))


def _read(read: Callable[[nn.Module], Any], traced: nn.Module) -> Any:
    try:
        return read(traced)
    except Exception:  # attributes of the model's objects may raise any error
        return ABSENT
