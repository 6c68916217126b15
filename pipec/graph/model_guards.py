"""Guards on the model and the loss from which a graph was captured."""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from pipec.torch_compat import ValueGuard, ValuePath, constant_guard

if TYPE_CHECKING:  # a rank that captures nothing has none
    from pipec.torch_compat import Guards


@dataclass(frozen=True, eq=False)
class ModelGuards:
    """Guards that are checked before each step, because a step runs none of the model's own code.

    ``traced`` is the captured module. Dynamo's ``guards`` cover every value that its code read. Another front
    end has no ``guards``; then ``attributes``, the result of ``take_snapshot`` at capture, are compared
    instead. ``constant_guards`` are for the tensors of the loss function, which the graph holds as constants.
    """

    traced: nn.Module
    guards: "Guards | None"
    constant_guards: Sequence[ValueGuard]
    take_snapshot: Callable[[nn.Module], Mapping[str, Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traced: nn.Module,
        guards: "Guards | None",
        constants: Iterable[str],
        take_snapshot: Callable[[nn.Module], Mapping[str, Any]],
    ) -> "ModelGuards":
        """The guards of a module that was just captured. ``constants`` are the names of tensors in it."""
        constant_guards = [constant_guard(name, operator.attrgetter(name), traced) for name in constants]
        return cls(traced, guards, constant_guards, take_snapshot, {} if guards else take_snapshot(traced))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelGuards":
        """Itself, because a copied graph belongs to the same model."""
        return self

    @property
    def constants(self) -> dict[ValuePath, Any]:
        """The plain values that the code read from the model and the loss, by place."""
        constants = self.guards.constants if self.guards else {}
        return {place: value for place, value in constants.items() if place.root or place.names[0] in _NAMES}

    def violation(self) -> str:
        """The changes since capture, in words; empty if nothing has changed."""
        for constant_guards in self.constant_guards:
            if not constant_guards.holds(self.traced):
                return str(constant_guards)
        if self.guards is None:
            return _changed(self.attributes, self.take_snapshot(self.traced))
        if self.guards.holds(self.traced):
            return ""
        return describe_changes(self.constants, self.traced) or self.guards.violation(self.traced)


NO_MODEL_GUARDS = ModelGuards(nn.Module(), None, (), lambda _: {})
"""The guards of a graph without a model."""


def describe_changes(constants: Mapping[ValuePath, Any], traced: nn.Module) -> str:
    """The values read at capture that have changed: ``model.drop.p changed from 0.1 to 0.2``."""
    now = {place: _value(place, traced) for place in constants}
    return "" if all(map(_same, constants.values(), now.values())) else _changed(constants, now)


class TracedConstants:
    """The constants that were read at capture, to be compared before each step.

    The common path of ``model.h.0.drop.p`` and ``model.h.0.norm.eps``, ``model.h.0``, is looked up once.
    """

    def __init__(self, constants: Mapping[ValuePath, Any] = MappingProxyType({})) -> None:
        self._constants = constants
        self._roots = [*dict.fromkeys(place.root for place in constants if place.root)]
        self._lookups: list[tuple[int, Callable[[Any, Any], Any], Any]] = []
        positions: dict[tuple[str, tuple[tuple[str, Any], ...]], int] = {
            (root, ()): number for number, root in enumerate(["", *self._roots])
        }
        self._positions = [self._position(place.root, place.steps, positions) for place in constants]

    def _position(self, root: str, steps: tuple[tuple[str, Any], ...], positions: dict[Any, int]) -> int:
        """The index of the lookup for a path, which is added if it is new."""
        if (root, steps) not in positions:
            *before, (kind, key) = steps
            parent = self._position(root, tuple(before), positions)
            positions[root, steps] = len(positions)
            self._lookups.append((parent, getattr if kind == "attribute" else operator.getitem, key))
        return positions[root, steps]

    def changed(self, traced: nn.Module) -> str:
        """The values that have changed, in words; empty if none has."""
        values: list[Any] = [traced, *map(sys.modules.get, self._roots)]
        try:
            for parent, look_up, key in self._lookups:
                values.append(look_up(values[parent], key))
        except (LookupError, AttributeError, TypeError):
            return describe_changes(self._constants, traced)
        now = [values[position] for position in self._positions]
        if all(map(_same, self._constants.values(), now)):
            return ""
        return describe_changes(self._constants, traced)


def _value(place: ValuePath, traced: nn.Module) -> Any:
    try:
        return place.value(traced)
    except (LookupError, AttributeError, TypeError):
        return _ABSENT


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> str:
    changed = [
        f"{name} changed from {before.get(name, _ABSENT)} to {now.get(name, _ABSENT)}"
        for name in {**before, **now}
        if not _same(before.get(name, _ABSENT), now.get(name, _ABSENT))
    ]
    num_omitted = len(changed) - _MAX_DESCRIBED
    return ", ".join(changed[:_MAX_DESCRIBED]) + f", and {num_omitted} more" * (num_omitted > 0)


_MAX_DESCRIBED = 3

_NAMES = ("model", "loss_fn")
"""The names of the model and the loss in the module that capture traces."""


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
