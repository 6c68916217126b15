"""The state of an optimizer by parameter: cut into pieces, put together again.

An entry that has the shape of its parameter is cut as the parameter is. A number such as ``step`` is copied
to every piece. ParameterState of other shapes, such as Adafactor's rows and columns, stay with whole tensors.
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
"""What an optimizer keeps for one parameter, such as ``{"step": ..., "exp_avg": ...}``."""


@dataclass(frozen=True)
class StateShard:
    """One rank's state for a piece of a parameter."""

    piece: ParameterShard
    entries: ParameterState


def cut(entries: Mapping[str, Any], shape: torch.Size, piece: ParameterShard) -> ParameterState:
    """The state of a piece of a parameter, cut from the whole's, in memory of its own."""
    if piece.size == shape.numel():
        return {key: _copied(value) for key, value in entries.items()}
    return {key: _copied(_part(value, shape, piece)) for key, value in entries.items()}


def merge(
    parts: Iterable[Iterable[StateShard]], shapes: Mapping[str, torch.Size]
) -> dict[str, ParameterState]:
    """The state of each whole parameter, by name, from the parts of every rank.

    Replicas that each update the whole tensor all have the same part; the first one speaks for them.
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
    """The state dicts of several optimizers as that of one which has the groups of all of them."""
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
    """Let the state that ``load_state_dict`` was just given have its own types again.

    torch gives it the type of its parameter, by which 32-bit state of 16-bit parameters would lose bits.
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
        held = ", ".join(f"{part.piece.start} to {part.piece.stop}" for part in parts)
        raise InputError(
            f"of the {shape.numel()} elements of {name} the optimizers of all ranks have state for {held}; "
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
