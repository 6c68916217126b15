"""The state of optimizers by parameter name, whether a program or the script updates the weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipec.checkpoint.plain_values import describe, plain
from pipec.checkpoint.shards import TensorShard, TensorSpec, tensor_spec, unsharded
from pipec.errors import CheckpointError, InputError
from pipec.ir import ParameterShard
from pipec.runtime.absent_tensors import is_absent
from pipec.runtime.messages.call_description import format_names
from pipec.runtime.optimizers import PipelineOptimizer, StateShard
from pipec.runtime.optimizers.factory import hyperparameters
from pipec.runtime.optimizers.state_shards import ParameterState, restore_types

Optimizers = PipelineOptimizer | Sequence[Optimizer]
"""The optimizer of the programs, or the optimizers of the script."""


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group: the class of its optimizer, its parameters, and the plain hyperparameters."""

    optimizer: str
    names: tuple[str, ...]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The saved optimizers. ``state`` has, by parameter and entry, ``[value]`` or a tensor's name."""

    groups: list[ParamGroup]
    state: dict[str, dict[str, list[Any] | str]] = field(default_factory=dict)


def param_groups_of(optimizers: Optimizers, names: Mapping[int, str]) -> list[ParamGroup]:
    """The groups with the names of their parameters. ``names`` has the model's parameters by ``id``.

    Raises:
        InputError: an optimizer has a parameter that is not in the model, or a group has a value that is not
            plain.
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
            "the optimizer has a parameter that is not in the model; create it from pipe.parameters(), or "
            "from the current parameters of the model that was compiled"
        )
    return [
        ParamGroup(kind, tuple(own), plain(hyperparameters(group), f"group {index} of the optimizer"))
        for index, (kind, own, group) in enumerate(zip(kinds, found, groups, strict=True))
    ]


def state_shards(
    optimizers: Optimizers, names: Mapping[int, str], specs: Mapping[str, TensorSpec]
) -> tuple[OptimizerState, list[TensorShard]]:
    """This process's part of the state: a description, and its tensors."""
    made = OptimizerState(param_groups_of(optimizers, names))
    tensors: list[TensorShard] = []
    for part in _state_parts(optimizers, names):
        piece, name = part.piece, part.piece.name
        entries, whole = made.state.setdefault(name, {}), specs[name]
        for key, value in part.entries.items():
            if type(key) is not str:
                raise InputError(f"the optimizer's state of {name} has the key {key!r}; expected text")
            if not isinstance(value, Tensor):
                entries[key] = [plain(value, f"{key} of {name} in the optimizer")]
                continue
            entries[key] = stored = f"{name}/{key}"
            if piece.size != whole.num_elements and value.shape == (piece.size,):
                spec = tensor_spec(stored, value.dtype, whole.shape)
                tensors.append(TensorShard(stored, spec, piece.start, piece.stop, value))
            else:  # of the whole parameter, or of another shape
                tensors.append(unsharded(stored, tensor_spec(stored, value.dtype, value.shape), value))
    return made, tensors


def _state_parts(optimizers: Optimizers, names: Mapping[int, str]) -> list[StateShard]:
    if isinstance(optimizers, PipelineOptimizer):
        return optimizers.parts()
    return [
        StateShard(ParameterShard(names[id(parameter)], 0, parameter.numel()), entries)
        for each in optimizers
        for parameter, entries in each.state.items()
        if not is_absent(parameter)
    ]


def merge_states(every: Sequence[OptimizerState], order: Sequence[str]) -> OptimizerState:
    """The state of the whole model, merged from the processes; each may have its own stages' alone.

    Raises:
        InputError: the optimizers of the ranks differ in more than their parameters, or two entries of the
            state would be one tensor.
    """
    first = every[0]
    for rank, each in enumerate(every):
        ours, theirs = ([(g.optimizer, describe(g.hyperparameters)) for g in x.groups] for x in (first, each))
        if ours != theirs:
            raise InputError(
                f"the optimizer of rank {rank} has other groups than rank 0's: {_format_groups(each.groups)} "
                f"instead of {_format_groups(first.groups)}. Make the same groups on every rank, with "
                "the same hyperparameters; a group may be empty"
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
    if twice := [name for name, count in Counter(tensor_names(made)).items() if count > 1]:
        raise InputError(
            f"two entries of the optimizer's state are both called {twice[0]}: a parameter, or an entry of "
            "an optimizer, has a name with a slash; rename it"
        )
    return made


def require_same_groups(saved: Sequence[ParamGroup], found: Sequence[ParamGroup]) -> None:
    """Raise CheckpointError unless the groups have the same optimizers and parameters, in any order."""
    kinds, expected = ([group.optimizer for group in groups] for groups in (found, saved))
    if kinds != expected:
        raise CheckpointError(
            f"the checkpoint has the state of {_format_groups(saved)}, and the optimizer to load it is "
            f"{_format_groups(found)}; make the same optimizer with the same groups"
        )
    for index, (own, theirs) in enumerate(zip(found, saved, strict=True)):
        if other := sorted({*own.names} ^ {*theirs.names}):
            raise CheckpointError(
                f"{format_names(other)} {'is' if len(other) == 1 else 'are'} in group {index} of the "
                "optimizer either in the checkpoint or here, not in both; put each parameter into the group "
                "that it was in. Parameters that were frozen before the optimizer was created must be frozen "
                "here, too"
            )


def _format_groups(groups: Sequence[ParamGroup]) -> str:
    return ", ".join(f"{g.optimizer} ({len(g.names)} parameters)" for g in groups) or "no group"


def load_state(
    optimizers: Optimizers, saved: OptimizerState, tensors: Mapping[str, Tensor], names: Mapping[int, str]
) -> None:
    """Load the saved state. The groups were checked to be the same."""
    if isinstance(optimizers, PipelineOptimizer):
        every = [name for group in saved.groups for name in group.names]
        numbers = {name: number for number, name in enumerate(every)}
        groups = [
            {
                **group.hyperparameters,
                "params": [numbers[name] for name in group.names],
                "param_names": list(group.names),
            }
            for group in saved.groups
        ]
        state = {numbers[name]: state_entries(saved, name, tensors) for name in saved.state}
        optimizers.load_state_dict({"state": state, "param_groups": groups})
        return
    remaining = iter(saved.groups)
    for each in optimizers:
        _load_one(each, [next(remaining) for _ in each.param_groups], saved, tensors, names)


def state_entries(saved: OptimizerState, name: str, tensors: Mapping[str, Tensor]) -> ParameterState:
    """The state of a parameter. ``tensors`` are those that the state refers to."""
    entries = saved.state[name].items()
    return {key: tensors[found] if isinstance(found, str) else found[0] for key, found in entries}


def _load_one(
    optimizer: Optimizer,
    groups: Sequence[ParamGroup],
    saved: OptimizerState,
    tensors: Mapping[str, Tensor],
    names: Mapping[int, str],
) -> None:
    """Load the state of this process's parameters; absent ones need none."""
    state: dict[int, ParameterState] = {}
    own = optimizer.state_dict()["param_groups"]
    optimizer.state.clear()  # first, since two states may not fit into memory
    for group, numbered in zip(optimizer.param_groups, own, strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            name = names[id(parameter)]
            if name in saved.state and not is_absent(parameter):
                entries = state_entries(saved, name, tensors).items()
                state[number] = {k: x.clone() if isinstance(x, Tensor) else x for k, x in entries}
    written = [
        {key: numbered[key] for key in ("params", "param_names") if key in numbered} | group.hyperparameters
        for group, numbered in zip(groups, own, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": written})
    restore_types(optimizer, state)


def tensor_names(saved: OptimizerState) -> list[str]:
    """The names of the tensors that the state refers to."""
    return [entry for entries in saved.state.values() for entry in entries.values() if isinstance(entry, str)]
