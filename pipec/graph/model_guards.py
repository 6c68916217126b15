"""The guards of a captured graph on the model and the loss that it was captured from."""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from pipec.torch_compat import Guards, ValueGuard, ValuePath, constant_guard


@dataclass(frozen=True, eq=False)
class ModelGuards:
    """Checked before each step, because a step runs what was captured and none of the model's code.

    ``traced`` is the module that was captured. Dynamo's ``guards`` know every value that its code read. Where
    another front end captured it there are none, and ``attributes`` stand for them: what ``take_snapshot``
    found at capture. ``constant_guards`` are the tensors of the loss function, which the graph holds as
    constants.
    """

    traced: nn.Module
    guards: Guards | None
    constant_guards: Sequence[ValueGuard]
    take_snapshot: Callable[[nn.Module], Mapping[str, Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traced: nn.Module,
        guards: Guards | None,
        constants: Iterable[str],
        take_snapshot: Callable[[nn.Module], Mapping[str, Any]],
    ) -> "ModelGuards":
        """The guards of a module that was just captured. ``constants`` are names of tensors below it."""
        constant_guards = [constant_guard(name, operator.attrgetter(name), traced) for name in constants]
        return cls(traced, guards, constant_guards, take_snapshot, {} if guards else take_snapshot(traced))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelGuards":
        """Itself: a copied graph is of the same model."""
        return self

    @property
    def constants(self) -> dict[ValuePath, Any]:
        """The plain values that were read of the model and the loss, by place."""
        constants = self.guards.constants if self.guards else {}
        return {place: value for place, value in constants.items() if place.root or place.names[0] in _NAMES}

    def violation(self) -> str:
        """What has changed since capture, in words; empty if nothing has."""
        for constant_guards in self.constant_guards:
            if not constant_guards.holds(self.traced):
                return str(constant_guards)
        if self.guards is None:
            return _changed(self.attributes, self.take_snapshot(self.traced))
        if self.guards.holds(self.traced):
            return ""
        return describe_changes(self.constants, self.traced) or self.guards.violation(self.traced)


NO_MODEL_GUARDS = ModelGuards(nn.Module(), None, (), lambda _: {})
"""Those of a graph that was made without a model."""


def describe_changes(constants: Mapping[ValuePath, Any], traced: nn.Module) -> str:
    """The values read at capture that have changed: ``model.drop.p was 0.1 and is 0.2``."""
    now = {place: _found(place, traced) for place in constants}
    return "" if all(map(_same, constants.values(), now.values())) else _changed(constants, now)


class TracedConstants:
    """The constants that were read, looked up again before each step, sharing lookups on common paths.

    ``model.h.0.drop.p`` and ``model.h.0.norm.eps`` are five lookups and four more.
    """

    def __init__(self, constants: Mapping[ValuePath, Any] = MappingProxyType({})) -> None:
        self._constants = constants
        self._roots = [*dict.fromkeys(place.root for place in constants if place.root)]
        self._lookups: list[tuple[int, Callable[[Any, Any], Any], Any]] = []
        known: dict[tuple[str, tuple[tuple[str, Any], ...]], int] = {
            (root, ()): number for number, root in enumerate(["", *self._roots])
        }
        self._positions = [self._position(place.root, place.steps, known) for place in constants]

    def _position(self, root: str, steps: tuple[tuple[str, Any], ...], known: dict[Any, int]) -> int:
        """The index of the lookup for a path, added if it is new."""
        if (root, steps) not in known:
            *before, (kind, key) = steps
            parent = self._position(root, tuple(before), known)
            known[root, steps] = len(known)
            self._lookups.append((parent, getattr if kind == "attribute" else operator.getitem, key))
        return known[root, steps]

    def changed(self, traced: nn.Module) -> str:
        """The values that have changed, in words; empty if none has."""
        found: list[Any] = [traced, *map(sys.modules.get, self._roots)]
        try:
            for parent, look_up, key in self._lookups:
                found.append(look_up(found[parent], key))
        except (LookupError, AttributeError, TypeError):
            return describe_changes(self._constants, traced)
        now = [found[position] for position in self._positions]
        if all(map(_same, self._constants.values(), now)):
            return ""
        return describe_changes(self._constants, traced)


def _found(place: ValuePath, traced: nn.Module) -> Any:
    try:
        return place.value(traced)
    except (LookupError, AttributeError, TypeError):
        return _MISSING


class _Missing:
    def __repr__(self) -> str:
        return "gone"


_MISSING = _Missing()


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> str:
    changed = [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, _MISSING)}"
        for name in {**before, **now}
        if not _same(before.get(name, _MISSING), now.get(name, _MISSING))
    ]
    rest = len(changed) - _MOST
    return ", ".join(changed[:_MOST]) + f", and {rest} more" * (rest > 0)


_MOST = 3

_NAMES = ("model", "loss_fn")
"""What capture calls the model and the loss in the module that it traces."""


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
