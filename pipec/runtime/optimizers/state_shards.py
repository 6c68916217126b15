"""Splits the optimizer state of a parameter into shards, and merges them.

An entry with the shape of its parameter is split as the parameter is. A number such as ``step`` is copied to
every shard. Optimizers with entries of other shapes, such as Adafactor, update whole tensors.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipec.errors import InputError
from pipec.ir import ParameterShard

ParameterState = dict[str, Any]
"""The optimizer state of one parameter, such as ``{"step": ..., "exp_avg": ...}``."""


@dataclass(frozen=True)
class StateShard:
    """One rank's state for a piece of a parameter."""

    piece: ParameterShard
    entries: ParameterState


def cut(entries: Mapping[str, Any], shape: torch.Size, piece: ParameterShard) -> ParameterState:
    """The state of a piece of a parameter, copied out of the whole parameter's."""
    if piece.size == shape.numel():
        return {key: _copied(value) for key, value in entries.items()}
    return {key: _copied(_part(value, shape, piece)) for key, value in entries.items()}


def merge(
    parts: Iterable[Iterable[StateShard]], shapes: Mapping[str, torch.Size]
) -> dict[str, ParameterState]:
    """The state of each whole parameter, by name, from the shards of every rank.

    Replicas that each update the whole tensor have equal shards; the first one is used.
    """
    pieces: dict[str, dict[tuple[int, int], StateShard]] = {}
    for part in (part for rank in parts for part in rank):
        found = pieces.setdefault(part.piece.name, {})
        found.setdefault((part.piece.start, part.piece.stop), part)
    return {
        name: _whole(name, [found[key] for key in sorted(found)], shapes[name])
        for name, found in pieces.items()
    }


def concatenated_state_dict(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict with the groups of several optimizers."""
    state: dict[int, ParameterState] = {}
    groups: list[dict[str, Any]] = []
    for each in state_dicts:
        first = sum(len(group["params"]) for group in groups)
        state |= {first + number: entries for number, entries in each["state"].items()}
        groups += [
            {**group, "params": [first + number for number in group["params"]]}
            for group in each["param_groups"]
        ]
    return {"state": state, "param_groups": groups}


def restore_types(optimizer: Optimizer, state: Mapping[int, ParameterState]) -> None:
    """Restore the dtypes of the state that ``load_state_dict`` was just given.

    Torch casts state to the dtype of its parameter, so that 32-bit state of 16-bit parameters loses bits.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in state.get(number, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _whole(name: str, parts: list[StateShard], shape: torch.Size) -> ParameterState:
    bounds = [0, *(part.piece.stop for part in parts)]
    starts = [*(part.piece.start for part in parts), shape.numel()]
    if bounds != starts:
        ranges = ", ".join(f"{part.piece.start} to {part.piece.stop}" for part in parts)
        raise InputError(
            f"of the {shape.numel()} elements of {name} the optimizers of all ranks have state for {ranges}; "
            "expected all of them once. Every rank calls state_dict(), after the same number of steps"
        )
    if len(parts) == 1:
        return parts[0].entries
    return {key: _merged([part.entries[key] for part in parts], parts, shape) for key in parts[0].entries}


def _merged(values: list[Any], parts: list[StateShard], shape: torch.Size) -> Any:
    if all(_has_shape(value, (part.piece.size,)) for value, part in zip(values, parts, strict=True)):
        device = values[0].device
        return torch.cat([value.to(device) for value in values]).view(shape)
    return _copied(values[0])


def _part(value: Any, shape: torch.Size, piece: ParameterShard) -> Any:
    return value.reshape(-1)[piece.start : piece.stop] if _has_shape(value, shape) else value


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
