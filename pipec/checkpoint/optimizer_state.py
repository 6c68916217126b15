"""The state of optimizers by parameter name, whether a program makes their updates or the script does."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic
import torch
from torch import Tensor
from torch.optim import Optimizer

from pipec.checkpoint.json_values import decode_value, encode_value
from pipec.checkpoint.safetensors_files import tensor_spec
from pipec.checkpoint.shards import TensorShard, unsharded
from pipec.errors import CheckpointError, InputError
from pipec.ir import ParameterShard
from pipec.runtime.messages.call_description import format_names
from pipec.runtime.optimizers import PipelineOptimizer, StateShard
from pipec.runtime.optimizers.factory import hyperparameters
from pipec.runtime.optimizers.state_shards import ParameterState, restore_types

Optimizers = PipelineOptimizer | Sequence[Optimizer]
"""That of the programs, or those of the script."""


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group: the class of its optimizer, its parameters, its numbers as ``encode_value``."""

    optimizer: str
    names: tuple[str, ...]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """What is written of optimizers. ``state`` has by parameter and entry ``[value]``, or a tensor's name."""

    groups: list[ParamGroup]
    state: dict[str, dict[str, list[Any] | str]] = field(default_factory=dict)


_STATE = pydantic.TypeAdapter(OptimizerState)


def parse_state(found: Any) -> OptimizerState:
    """What ``dataclasses.asdict`` made of it."""
    return _STATE.validate_python(found)


def param_groups_of(optimizers: Optimizers, names: Mapping[int, str]) -> list[ParamGroup]:
    """The groups with the names of their parameters. ``names`` has, by ``id``, those of the model.

    Raises:
        InputError: an optimizer has a parameter that is none of the model, or a group holds what is no plain
            value.
    """
    if isinstance(optimizers, PipelineOptimizer):
        kinds = optimizers.kinds
        found = [group["param_names"] for group in optimizers.param_groups]
        groups = optimizers.param_groups
    else:
        kinds = [type(each).__name__ for each in optimizers for _ in each.param_groups]
        groups = [group for each in optimizers for group in each.param_groups]
        found = [[names.get(id(each), "") for each in group["params"]] for group in groups]
    if any("" in each for each in found):
        raise InputError(
            "the optimizer has a parameter that the model does not have; make it of pipe.parameters() or of "
            "the parameters of the model that was compiled, as they are now"
        )
    return [
        ParamGroup(kind, tuple(own), encode_value(hyperparameters(group), f"group {index} of the optimizer"))
        for index, (kind, own, group) in enumerate(zip(kinds, found, groups, strict=True))
    ]


def state_shards(
    optimizers: Optimizers, names: Mapping[int, str], shapes: Mapping[str, torch.Size]
) -> tuple[OptimizerState, list[TensorShard]]:
    """What this process has of the state: a description, and its tensors."""
    made = OptimizerState(param_groups_of(optimizers, names))
    tensors: list[TensorShard] = []
    for part in _state_parts(optimizers, names, shapes):
        name, entries = part.piece.name, made.state.setdefault(part.piece.name, {})
        for key, value in part.entries.items():
            if type(key) is not str:
                raise InputError(f"the optimizer keeps {key!r} of {name}; expected a name that is text")
            if not isinstance(value, Tensor):
                entries[key] = [encode_value(value, f"{key} of {name} in the optimizer")]
                continue
            entries[key] = stored = f"{name}/{key}"
            tensors.append(_part(stored, value, part.piece, shapes[name]))
    return made, tensors


def _part(stored: str, value: Tensor, piece: ParameterShard, shape: torch.Size) -> TensorShard:
    """A slice of what has the shape of its parameter, else all of a tensor of its own shape."""
    is_slice = piece.size != shape.numel() and value.shape == (piece.size,)
    kind = tensor_spec(stored, value.dtype, shape if is_slice else value.shape)
    return (
        TensorShard(stored, kind, piece.start, piece.stop, value)
        if is_slice
        else unsharded(stored, kind, value)
    )


def _state_parts(
    optimizers: Optimizers, names: Mapping[int, str], shapes: Mapping[str, torch.Size]
) -> list[StateShard]:
    if isinstance(optimizers, PipelineOptimizer):
        return optimizers.parts()
    return [
        StateShard(ParameterShard(names[id(parameter)], 0, parameter.numel()), entries)
        for each in optimizers
        for parameter, entries in each.state.items()
        if parameter.shape == shapes[names[id(parameter)]]  # those of other processes were emptied here
    ]


def merge_states(every: Sequence[OptimizerState], order: Sequence[str]) -> OptimizerState:
    """The state of the whole, of what each process has. Each may have that of its own stages alone.

    Raises:
        InputError: the optimizers of the ranks differ in more than their parameters, or two entries of the
            state would be one tensor.
    """
    first = every[0]
    for rank, each in enumerate(every):
        ours, theirs = ([(g.optimizer, g.hyperparameters) for g in x.groups] for x in (first, each))
        if ours != theirs:
            raise InputError(
                f"the optimizer of rank {rank} has other groups than that of rank 0: {_listed(each.groups)} "
                f"instead of {_listed(first.groups)}. Make the same groups on every rank, with the same "
                "numbers; a group may be empty"
            )
    position = {name: index for index, name in enumerate(order)}
    groups = []
    for index, group in enumerate(first.groups):
        names = {name for each in every for name in each.groups[index].names}
        groups.append(
            ParamGroup(group.optimizer, tuple(sorted(names, key=position.__getitem__)), group.hyperparameters)
        )
    made = OptimizerState(groups)
    for each in every:
        for name, entries in each.state.items():
            made.state[name] = {**entries, **made.state.get(name, {})}
    _require_unique(made)
    return made


def require_same_groups(saved: Sequence[ParamGroup], found: Sequence[ParamGroup]) -> None:
    """Raise CheckpointError unless the groups have the same optimizers and parameters, in any order."""
    kinds, expected = ([group.optimizer for group in groups] for groups in (found, saved))
    if kinds != expected:
        raise CheckpointError(
            f"the checkpoint has the state of {_listed(saved)}, and the optimizer to load it is "
            f"{_listed(found)}; make the same optimizer with the same groups"
        )
    for index, (own, theirs) in enumerate(zip(found, saved, strict=True)):
        if other := sorted({*own.names} ^ {*theirs.names}):
            raise CheckpointError(
                f"{format_names(other)} {'is' if len(other) == 1 else 'are'} in group {index} of the "
                "optimizer "
                "in the checkpoint or here alone; give each parameter to the group that it was in. Whoever "
                "freezes parameters before the optimizer is made does so here as there"
            )


def _listed(groups: Sequence[ParamGroup]) -> str:
    return ", ".join(f"{g.optimizer} ({len(g.names)} parameters)" for g in groups) or "no group"


def load_state(
    optimizers: Optimizers, saved: OptimizerState, tensors: Mapping[str, Tensor], names: Mapping[int, str]
) -> None:
    """Let the optimizers go on from what was saved. The groups are known to be the same."""
    if isinstance(optimizers, PipelineOptimizer):
        optimizers.load_state_dict(_state_dict(saved, tensors))
        return
    first = 0
    for each in optimizers:
        groups = saved.groups[first : first + len(each.param_groups)]
        first += len(groups)
        _load_one(each, groups, saved, tensors, names)


def _state_dict(saved: OptimizerState, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state as torch has it, with names. Its tensors are read where they are touched."""
    every = [name for group in saved.groups for name in group.names]
    numbers = {name: number for number, name in enumerate(every)}
    return {
        "state": {numbers[name]: _entries(saved, name, tensors) for name in saved.state},
        "param_groups": [
            {
                **decode_value(group.hyperparameters),
                "params": [numbers[name] for name in group.names],
                "param_names": list(group.names),
            }
            for group in saved.groups
        ],
    }


def _entries(saved: OptimizerState, name: str, tensors: Mapping[str, Tensor]) -> ParameterState:
    return {
        key: tensors[found] if isinstance(found, str) else decode_value(found[0])
        for key, found in saved.state[name].items()
    }


def _load_one(
    optimizer: Optimizer,
    groups: Sequence[ParamGroup],
    saved: OptimizerState,
    tensors: Mapping[str, Tensor],
    names: Mapping[int, str],
) -> None:
    """The state of those parameters that this process has; emptied ones need none."""
    state: dict[int, ParameterState] = {}
    own = optimizer.state_dict()["param_groups"]
    optimizer.state.clear()  # before there is another: two may not fit
    for group, numbered in zip(optimizer.param_groups, own, strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            name = names[id(parameter)]
            if name in saved.state and parameter.numel():
                entries = _entries(saved, name, tensors).items()
                state[number] = {k: x.clone() if isinstance(x, Tensor) else x for k, x in entries}
    kept = ("params", "param_names")
    written = [
        {**{key: numbered[key] for key in kept if key in numbered}, **decode_value(group.hyperparameters)}
        for group, numbered in zip(groups, own, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": written})
    restore_types(optimizer, state)


def tensor_names(saved: OptimizerState) -> list[str]:
    """The names of the tensors that the state refers to."""
    return [found for entries in saved.state.values() for found in entries.values() if isinstance(found, str)]


def _require_unique(saved: OptimizerState) -> None:
    if twice := [name for name, count in Counter(tensor_names(saved)).items() if count > 1]:
        raise InputError(
            f"two entries of the optimizer's state are both called {twice[0]}: a parameter, or an entry of "
            "an optimizer, has a name with a slash; rename it"
        )
