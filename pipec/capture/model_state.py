"""The state that decides a capture besides arguments and guards: modules, tensors and torch's modes."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from pipec.capture.model_snapshot import ModelSnapshot, modules_of
from pipec.ir import Mode
from pipec.torch_compat import SETTINGS, global_hooks, read_settings


class TorchModes(NamedTuple):
    """The part of torch's global state that a forward depends on: modes, defaults and settings."""

    modes: tuple[str, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class ModelState:
    """Equal states of one model may share a compilation, also across processes.

    Modules and tensors are in the order in which the model lists them. A module is its class and its hooks. A
    tensor is its shape and type, the place of its first name, whether it has a hook and, if a step trains,
    whether it has a gradient. ``torch_modes`` are torch's modes and settings that a forward depends on.
    """

    training: tuple[bool, ...]
    modules: tuple[tuple[type, tuple[int, ...]], ...]
    tensors: tuple[tuple[Any, ...], ...]
    torch_modes: TorchModes

    @classmethod
    def of(cls, snapshot: ModelSnapshot, mode: Mode, torch_modes: TorchModes) -> "ModelState":
        """The state of the model and of torch for a call."""
        first: dict[int, int] = {}
        tensors = [
            (
                shape,
                dtype,
                first.setdefault(id(x), place),
                hooked,
                mode is Mode.TRAIN and is_trained,
            )
            for place, (x, (shape, dtype, is_trained), hooked) in enumerate(
                zip(snapshot.tensors, *snapshot.tensor_metadata, strict=True)
            )
        ]
        modules = zip(snapshot.classes, snapshot.hooks, strict=True)
        return cls(snapshot.training, tuple(modules), tuple(tensors), torch_modes)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.training, self.modules, self.tensors, self.torch_modes))

    @functools.cached_property
    def digest(self) -> dict[str, str]:
        """A digest of what ranks must have in common; ``requires_grad`` is not part of it."""
        flags = self.training
        kinds = [f"{kind.__module__}.{kind.__qualname__} {len(hooks)}" for kind, hooks in self.modules]
        tensors = [tensor[:-1] for tensor in self.tensors]
        return {
            "modules in training mode": f"{sum(flags)} of {len(flags)} ({_digest(flags)})",
            "modules": f"{len(kinds)} ({_digest(kinds)})",
            "parameters and buffers": f"{len(tensors)} ({_digest(tensors)})",
            "torch": torch.__version__,
            "autocast and defaults": ", ".join(self.torch_modes.modes),
            **dict(zip(SETTINGS, map(str, self.torch_modes.settings), strict=True)),
        }

    def changes_since(self, before: "ModelState", model: nn.Module) -> str:
        """The differences from ``before``, in words, the most telling first."""
        if len(before.modules) != len(self.modules) or len(before.tensors) != len(self.tensors):
            return "modules or tensors were added or removed"
        named = [*_named(model)]
        paths = [path or "the model" for path, _ in named]
        fqns = [fqn for path, module in named for fqn in _tensor_names(path, module)]
        kinds = [[tensor[:-1] for tensor in state.tensors] for state in (before, self)]
        trained = [[tensor[-1] for tensor in state.tensors] for state in (before, self)]
        changes = {
            "the class or the hooks": _other(paths, before.modules, self.modules),
            "the shape, the type, the names or the hooks": _other(fqns, *kinds),
            "requires_grad": _other(fqns, *trained),
        }
        switched = zip(named, before.training, self.training, strict=True)
        found = _mode_switches([(path, module, now) for (path, module), was, now in switched if was != now])
        found += [f"{what} of {_listed(names)} changed" for what, names in changes.items() if names]
        if before.torch_modes.modes != self.torch_modes.modes:
            found.append(f"{', '.join(before.torch_modes.modes)} became {', '.join(self.torch_modes.modes)}")
        were = zip(SETTINGS, before.torch_modes.settings, self.torch_modes.settings, strict=True)
        found += [f"torch's {name} changed from {was} to {now}" for name, was, now in were if was != now]
        return "; ".join(found)


def _mode_switches(switched: Sequence[tuple[str, nn.Module, bool]]) -> list[str]:
    """Which modules went to training or evaluation mode, and what that turns on or off."""
    found = []
    for training, mode, state in ((False, "eval", "off"), (True, "training", "on")):
        modules = {path or "the model": module for path, module, now in switched if now is training}
        if not modules:
            continue
        names = "the model" if "the model" in modules else _listed([*modules])
        effects = [f"dropout is {state}"] if any(map(_drops, modules.values())) else []
        if any(isinstance(each, _BATCH_NORMS) for each in modules.values()):
            effects.append(f"batch norms use {'batch' if training else 'running'} statistics")
        verb = "were" if " and " in names else "was"
        found.append(f"{names} {verb} switched to {mode} mode{': ' * bool(effects)}{' and '.join(effects)}")
    return found


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values in training: it has a probability to do so."""
    is_dropout = "Dropout" in type(module).__name__
    values = [x for name, x in vars(module).items() if "drop" in name or (is_dropout and name == "p")]
    return any(isinstance(x, int | float) and x > 0 for x in values)


def torch_modes() -> TorchModes:
    """The current autocast of each device type, tensor defaults, global module hooks and settings."""
    autocast = [
        f"autocast to {torch.get_autocast_dtype(kind)} on {kind}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    hooks = [f"{len(global_hooks())} hooks of every module"] if global_hooks() else []
    modes = *(autocast or ["no autocast"]), str(torch.get_default_dtype()), *hooks
    return TorchModes(modes, read_settings())


def _other(names: Sequence[str], before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    return [name for name, one, other in zip(names, before, now, strict=True) if one != other]


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``modules_of``, each with its first name."""
    names = {id(module): name for name, module in model.named_modules()}
    return ((names[id(module)], module) for module in modules_of(model))


def _tensor_names(path: str, module: nn.Module) -> list[str]:
    held = [*module._parameters.items(), *module._buffers.items()]
    return [f"{path}.{name}" if path else name for name, tensor in held if tensor is not None]
