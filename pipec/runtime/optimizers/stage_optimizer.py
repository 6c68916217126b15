"""The optimizer of the parameters of one stage that a rank updates: whole tensors, or pieces of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.optimizers.factory import (
    Factory,
    call_factory,
    dummy_parameter,
    group_names,
    hyperparameters,
    is_elementwise,
    parameter_on,
)
from pipec.runtime.optimizers.state_shards import ParameterState, StateShard, cut, restore_types
from pipec.runtime.stages.flat_bucket import ShardedBucket

# Multiplies a list of tensors in one call; the public API has no such function.
_scale_all = torch._foreach_mul_


class StageOptimizer:
    """Updates the pieces that this rank owns, with the hyperparameters of ``leader``.

    ``owned`` maps each piece to the memory that an update writes: the parameter itself if the piece is all of
    it, else a one-dimensional slice. ``whole`` holds all parameters of the model, or dummies. The factory is
    called with all of them, so that it makes the groups of the whole model; parameters that this rank does
    not own are then removed. With ``on_host``, the state is in host memory between updates. ``shards`` are
    the buckets of which this rank owns a slice. Other ranks count the gradients of the ``uncounted`` whole
    parameters in the global norm: of replicas that have the same, one counts them.

    Raises:
        InputError: the groups differ from those of ``leader``, or an optimizer that is not elementwise would
            update part of a tensor.
    """

    def __init__(
        self,
        leader: Optimizer,
        factory: Factory,
        whole: Mapping[str, Tensor],
        owned: Mapping[ParameterShard, Tensor],
        on_host: bool = False,
        shards: Mapping[int, ShardedBucket] = MappingProxyType({}),
        uncounted: Collection[str] = (),
    ) -> None:
        self._leader, self.shards, self._uncounted = leader, shards, uncounted
        self._pieces = {piece.name: piece for piece in owned}
        self._shapes = {name: whole[name].shape for name in self._pieces}
        self._tensors = {p.name: _updated(tensor, p, whole[p.name]) for p, tensor in owned.items()}
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._host = OffloadedState() if on_host else None
        arguments = {name: self._argument(name, parameter) for name, parameter in whole.items()}
        self._optimizers: list[tuple[Optimizer, list[int]]] = []
        self._take(call_factory(factory, arguments), arguments)
        self._offload_state()

    @property
    def pieces(self) -> tuple[ParameterShard, ...]:
        """The pieces that this rank updates."""
        return tuple(self._pieces.values())

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank updates completely."""
        return {name: each for name, each in self._tensors.items() if isinstance(each, nn.Parameter)}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of whole parameters and of slices, by name."""
        whole = {name: x.grad for name, x in self._tensors.items() if x.grad is not None}
        return whole | {name: x for shard in self.shards.values() for name, x in shard.gradients().items()}

    @property
    def norm_gradients(self) -> dict[str, Tensor]:
        """The gradients, or pieces of them, that this rank counts in the global norm, by name."""
        return {name: x for name, x in self.gradients.items() if name not in self._uncounted}

    def drop_gradients(self) -> None:
        """Drop all gradients, also those in transit."""
        for tensor in self._tensors.values():
            tensor.grad = None
        for shard in self.shards.values():
            shard.drop_gradients()

    def move_to(self, owned: Mapping[ParameterShard, Tensor]) -> None:
        """Move pieces to other memory, which already holds their values."""
        for piece, memory in owned.items():
            if (tensor := self._tensors.get(piece.name)) is not None:
                tensor.data = memory.view(tensor.shape)

    def update(
        self,
        gradients: Mapping[str, Tensor],
        factor: Tensor | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Run one update with the gradients of the pieces, by name, times ``factor``.

        ``groups`` are the hyperparameters of all groups, by default those of the leader. A parameter without
        a gradient keeps its value and its state. Afterwards ``.grad`` is None.
        """
        assert gradients.keys() <= self._tensors.keys()
        if factor is not None and gradients:
            first = next(iter(gradients.values()))
            kind = torch.promote_types(first.dtype, torch.float32)
            _scale_all(list(gradients.values()), factor.to(first.device, kind))
        for name, gradient in gradients.items():
            tensor = self._tensors[name]
            tensor.grad = gradient if gradient.shape == tensor.shape else gradient.view(tensor.shape)
        if groups is None:
            groups = [hyperparameters(group) for group in self._leader.param_groups]
        try:
            for optimizer, indices in self._optimizers:
                for group, index in zip(optimizer.param_groups, indices, strict=True):
                    group.update(groups[index])
                with self._host.on_device(optimizer) if self._host else nullcontext():
                    optimizer.step()
                _require_unchanged(optimizer, [groups[index] for index in indices])
        finally:
            for tensor in self._tensors.values():
                tensor.grad = None
        for shard in self.shards.values():
            shard.forget_gradients()

    def _offload_state(self) -> None:
        if self._host:
            for optimizer, _ in self._optimizers:
                self._host.offload_state(optimizer)

    def parts(self) -> list[StateShard]:
        """The state of each piece that has one."""
        state = [item for optimizer, _ in self._optimizers for item in optimizer.state.items()]
        if unknown := [key for key, _ in state if id(key) not in self._names]:
            raise InputError(
                f"the optimizer keeps state under {unknown[0]!r} that belongs to no parameter; pipec can "
                "merge and split the state of parameters alone. Compile without optimizer=..."
            )
        return [StateShard(self._pieces[self._names[id(key)]], entries) for key, entries in state]

    def load(self, states: Mapping[str, ParameterState]) -> None:
        """Load the state of whole parameters, by name. Parameters without an entry start without state."""
        for optimizer, _ in self._optimizers:
            groups = optimizer.state_dict()["param_groups"]
            numbers = [number for group in groups for number in group["params"]]
            names = [self._names[id(tensor)] for tensor in _parameters(optimizer)]
            optimizer.state.clear()  # first, because two may not fit into memory
            state = {
                number: cut(states[name], self._shapes[name], self._pieces[name])
                for number, name in zip(numbers, names, strict=True)
                if name in states
            }
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            restore_types(optimizer, state)
        self._offload_state()

    def _argument(self, name: str, parameter: Tensor) -> Tensor:
        """The factory's argument for a parameter: itself, or a dummy."""
        own = self.parameters.get(name)
        if own is not None:
            return own
        return dummy_parameter(parameter, self._tensors[name].device if name in self._tensors else "meta")

    def _take(self, optimizers: tuple[Optimizer, ...], arguments: Mapping[str, Tensor]) -> None:
        """Restrict the factory's optimizers to the pieces of this rank."""
        groups = [(each, names) for each in optimizers for names in group_names(each, arguments)]
        self._require_same_groups([names for _, names in groups])
        assert self._pieces.keys() <= {name for _, names in groups for name in names}
        for optimizer in optimizers:
            indices = [i for i, (of, names) in enumerate(groups) if of is optimizer and self._owns(names)]
            if indices:
                self._restrict(optimizer, arguments)
                self._optimizers.append((optimizer, indices))

    def _owns(self, names: list[str]) -> bool:
        return any(name in self._tensors for name in names)

    def _restrict(self, optimizer: Optimizer, arguments: Mapping[str, Tensor]) -> None:
        """Replace the whole parameters by the pieces, in place in the lists of the optimizer."""
        for group, names in zip(optimizer.param_groups, group_names(optimizer, arguments), strict=True):
            own = [name for name in names if name in self._tensors]
            self._require_whole(optimizer, own)
            group["params"][:] = [self._tensors[name] for name in own]
            if "param_names" in group:
                group["param_names"][:] = own
            for name in names:
                entries = optimizer.state.pop(arguments[name], None)
                if entries is not None and name in self._tensors:
                    piece = cut(entries, self._shapes[name], self._pieces[name])
                    optimizer.state[self._tensors[name]] = piece
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

    def _require_same_groups(self, groups: list[list[str]]) -> None:
        expected = [group["param_names"] for group in self._leader.param_groups]
        if groups != expected:
            raise InputError(
                "the optimizer factory made other groups when it was called again with the same parameters: "
                f"{_sizes(groups)} instead of {_sizes(expected)}. Let the groups depend on names, shapes and "
                "requires_grad alone"
            )

    def _require_whole(self, optimizer: Optimizer, names: list[str]) -> None:
        split = [name for name in names if self._pieces[name].size != self._shapes[name].numel()]
        if split and not is_elementwise(optimizer):
            raise InputError(
                f"{type(optimizer).__name__} would get part of {split[0]}, but is not known to be "
                "elementwise. If it updates each element by that element's own gradient and state, declare "
                "this with the class attribute pipec_elementwise = True; if not, it needs whole tensors"
            )


def _require_unchanged(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, expected in zip(optimizer.param_groups, groups, strict=True):
        for key, value in expected.items():
            if group[key] is not value:
                raise InputError(
                    f"{type(optimizer).__name__} changes {key!r} of its parameter groups in step(). "
                    "Each rank would compute another value, from its own parameters; compile without "
                    "optimizer=... to use it"
                )


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _updated(memory: Tensor, piece: ParameterShard, parameter: Tensor) -> Tensor:
    """The tensor in the optimizer's groups for a piece: a parameter, if the piece is all of one."""
    if isinstance(memory, nn.Parameter) or piece.size != parameter.numel():
        return memory
    return parameter_on(memory.view(parameter.shape), parameter)


def _sizes(groups: list[list[str]]) -> str:
    return f"groups of {', '.join(str(len(names)) for names in groups)} parameters"


class OffloadedState:
    """Keeps the tensors of optimizer state on the host, from where an update copies them and back.

    Tensors that an optimizer itself keeps on the host, such as step counts, stay there.
    """

    def __init__(self) -> None:
        self._hosts: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def on_device(self, optimizer: Optimizer) -> Iterator[None]:
        """Copy the state to the device of its parameters for the duration of a ``with`` block."""
        for parameter, entries in _of_parameters(optimizer):
            for key, value in entries.items():
                if isinstance(value, Tensor) and value is self._hosts.get((id(parameter), key)):
                    entries[key] = value.to(parameter.device, copy=True)
        try:
            yield
        finally:
            self.offload_state(optimizer)

    def offload_state(self, optimizer: Optimizer) -> None:
        """Copy the state that is on the device of its parameter to the host."""
        for parameter, entries in _of_parameters(optimizer):
            for key, value in entries.items():
                known = self._hosts.get((id(parameter), key))
                if isinstance(value, Tensor) and value.device == parameter.device and value is not known:
                    entries[key] = self._hosts[id(parameter), key] = self._copied(known, value)

    def _copied(self, host: Tensor | None, value: Tensor) -> Tensor:
        """A copy on the host, in the memory of the previous one if layouts are equal."""
        if host is None or _layout(host) != _layout(value):
            host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
        return host.copy_(value)


def _of_parameters(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, object]]]:
    return [(key, entries) for key, entries in optimizer.state.items() if isinstance(key, Tensor)]


def _layout(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.stride()
