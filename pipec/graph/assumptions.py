"""What a captured graph takes for granted of the model and the loss that it was captured from."""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from pipec.torch_compat import Guards, Place, ValueGuard, constant_guard


@dataclass(frozen=True, eq=False)
class Assumptions:
    """Checked before each step, because a step runs what was captured and none of the model's code.

    ``traced`` is the module that was captured. Dynamo's ``guards`` know every value that its code read. Where
    another front end captured it there are none, and ``attributes`` stand for them: what ``snapshot`` found
    at capture. ``held`` are the tensors of the loss function, which the graph holds as constants.
    """

    traced: nn.Module
    guards: Guards | None
    held: Sequence[ValueGuard]
    snapshot: Callable[[nn.Module], Mapping[str, Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traced: nn.Module,
        guards: Guards | None,
        constants: Iterable[str],
        snapshot: Callable[[nn.Module], Mapping[str, Any]],
    ) -> "Assumptions":
        """What holds now, of a module that was just captured. ``constants`` are names of tensors below it."""
        held = [constant_guard(name, operator.attrgetter(name), traced) for name in constants]
        return cls(traced, guards, held, snapshot, {} if guards else snapshot(traced))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Assumptions":
        """Itself: a copied graph is of the same model."""
        return self

    @property
    def constants(self) -> dict[Place, Any]:
        """The numbers, strings and the like that were read of the model and the loss, and where."""
        constants = self.guards.constants if self.guards else {}
        return {place: value for place, value in constants.items() if place.root or place.names[0] in _NAMES}

    def broken(self) -> str:
        """What has changed since capture, in words; empty if nothing has."""
        for held in self.held:
            if not held.holds(self.traced):
                return str(held)
        if self.guards is None:
            return _changed(self.attributes, self.snapshot(self.traced))
        if self.guards.holds(self.traced):
            return ""
        return changed_constants(self.constants, self.traced) or self.guards.broken(self.traced)


NOTHING = Assumptions(nn.Module(), None, (), lambda _: {})
"""Those of a graph that was made without a model."""


def changed_constants(constants: Mapping[Place, Any], traced: nn.Module) -> str:
    """Which of the values that were read are others now: ``model.drop.p was 0.1 and is 0.2``."""
    now = {place: _found(place, traced) for place in constants}
    return "" if all(map(_same, constants.values(), now.values())) else _changed(constants, now)


class ReadConstants:
    """Values that were read, looked up time after time: what is on the way to several is taken once.

    ``model.h.0.drop.p`` and ``model.h.0.norm.eps`` are five lookups and four more.
    """

    def __init__(self, constants: Mapping[Place, Any] = MappingProxyType({})) -> None:
        self._constants = constants
        self._roots = [*dict.fromkeys(place.root for place in constants if place.root)]
        self._lookups: list[tuple[int, Callable[[Any, Any], Any], Any]] = []
        known: dict[tuple[str, tuple[tuple[str, Any], ...]], int] = {
            (root, ()): number for number, root in enumerate(["", *self._roots])
        }
        self._positions = [self._position(place.root, place.steps, known) for place in constants]

    def _position(self, root: str, steps: tuple[tuple[str, Any], ...], known: dict[Any, int]) -> int:
        """Which lookup finds what is there after these steps; it is added if it is new."""
        if (root, steps) not in known:
            *before, (kind, key) = steps
            parent = self._position(root, tuple(before), known)
            known[root, steps] = len(known)
            self._lookups.append((parent, getattr if kind == "attribute" else operator.getitem, key))
        return known[root, steps]

    def changed(self, traced: nn.Module) -> str:
        """Which of the values are others now, in words; empty if none is."""
        found: list[Any] = [traced, *map(sys.modules.get, self._roots)]
        try:
            for parent, look_up, key in self._lookups:
                found.append(look_up(found[parent], key))
        except (LookupError, AttributeError, TypeError):
            return changed_constants(self._constants, traced)
        now = [found[position] for position in self._positions]
        if all(map(_same, self._constants.values(), now)):
            return ""
        return changed_constants(self._constants, traced)


def _found(place: Place, traced: nn.Module) -> Any:
    try:
        return place.value(traced)
    except (LookupError, AttributeError, TypeError):
        return _GONE


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> str:
    changed = [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, _GONE)}"
        for name in {**before, **now}
        if not _same(before.get(name, _GONE), now.get(name, _GONE))
    ]
    rest = len(changed) - _MOST
    return ", ".join(changed[:_MOST]) + f", and {rest} more" * (rest > 0)


_MOST = 3

_NAMES = ("model", "loss_fn")
"""What capture calls the model and the loss in the module that it traces."""


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
