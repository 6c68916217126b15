"""A sharded bucket's parameters as the script sees them, and may change them between steps."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.ir import Bucket, ParameterShard
from pipec.runtime.absent_tensors import hold, is_absent, release_sharded
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import StageOptimizer
from pipec.runtime.stages.flat_bucket import FlatBucket, flatten_parameters

GroupOf = Callable[[int, int], CollectiveGroup]
"""The replicas of a stage as a rank sees them."""


class ShardedBucket:
    """Lets the shards of this process follow what a script does to ``parameter.data`` and ``parameter.grad``.

    ``members`` has, by rank, a shard and the optimizer that updates it; in one process, all ranks share the
    parameters. A parameter whose gradient is added up in shards has a mark in ``.grad``: NaN in its shape, in
    the memory of one element. To take the mark away drops the gradient; to write zeros into it, or to put
    another tensor in its place, sets the gradient, as without shards.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        members: Mapping[int, tuple[FlatBucket, StageOptimizer]],
    ) -> None:
        self._bucket, self._members = bucket, members
        self._parameters = {name: parameters[name] for name in bucket.names}
        self._shards = [shard for shard, _ in members.values()]
        self._marks: dict[str, Tensor] = {}
        self._note_addresses()
        self._follow_gradients()

    @property
    def names(self) -> Sequence[str]:
        return self._bucket.names

    @property
    def keeps_parameters(self) -> bool:
        """Whether the parameters are whole between steps."""
        return self._shards[0].keeps_parameters

    def owned(self) -> dict[ParameterShard, Tensor]:
        """The memory of this process's shards."""
        return {piece: memory for shard in self._shards for piece, memory in shard.owned().items()}

    def follow_script(self) -> None:
        """Apply the script's changes since the last step.

        Raises:
            InputError: it has given a parameter or a gradient other than what a shard can be taken of.
        """
        self._follow_gradients()
        if not self.keeps_parameters:
            self._shard_new_values()
        elif any(x.data_ptr() != address or not x.is_contiguous() for x, address in self._addresses):
            self._move()
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Show the script which parameters have a gradient."""
        present = self._shards[0].names_with_gradient
        for name in present | self._marks.keys():
            if name not in present:
                del self._marks[name]
                self._parameters[name].grad = None
            elif name not in self._marks:
                self._marks[name] = self._parameters[name].grad = _mark(self._parameters[name])

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for shard in self._shards:
            shard.drop_gradients()
        self.mark_gradients()

    def unshard(self, group_of: GroupOf) -> None:
        """Gather the parameters."""
        if self.keeps_parameters:
            return
        self._shard_new_values()
        for rank, (shard, _) in self._members.items():
            shard.start_gather(group_of(rank, self._bucket.stage))
            for name, tensor in shard.finish_gather().items():
                hold(self._parameters[name], tensor)

    def reshard(self) -> None:
        """Keep the shards of the current parameters, and free the rest."""
        if not self.keeps_parameters:
            for shard in self._shards:
                shard.reshard_updated()
            for name, parameter in self._parameters.items():
                release_sharded(name, parameter)

    def release(self, group_of: GroupOf) -> None:
        """Gather parameters and gradients for good. All ranks call this."""
        self._follow_gradients()
        self.unshard(group_of)
        waits = [
            shard.start_gather_gradients(group_of(rank, self._bucket.stage))
            for rank, (shard, _) in self._members.items()
            if shard.names_with_gradient
        ]
        gradients = {name: gradient for wait in waits for name, gradient in wait().items()}
        self.drop_gradients()
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def _note_addresses(self) -> None:
        self._addresses = [(each, each.data_ptr()) for each in self._parameters.values()]

    def _follow_gradients(self) -> None:
        changed = [
            (name, parameter)
            for name, parameter in self._parameters.items()
            if parameter.grad is not (mark := self._marks.get(name)) or (mark is not None and mark._version)
        ]
        for name, parameter in changed:
            if parameter.grad is not None and parameter.grad.numel() != self._size(name):
                raise InputError(
                    f"the gradient of {name} is kept in shards, so that .grad is empty here, and what is "
                    "written there reaches no rank; set it to None, as zero_grad(set_to_none=True) does, to "
                    "drop the gradient, and compile with another shard=... to set it"
                )
        for name, parameter in changed:
            for shard in self._shards:
                shard.set_gradient(name, parameter.grad)
            self._marks.pop(name, None)
            parameter.grad = None

    def _move(self) -> None:
        """Let the parameters lie together again, in new memory: the script may hold what was theirs."""
        for name in self._parameters:
            self._require_like_shards(name)
        flat = flatten_parameters(self._bucket, self._shards[0].sharding, self._parameters)
        for shard, optimizer in self._members.values():
            shard.move_to(flat)
            optimizer.move_to(shard.owned())
        self._note_addresses()

    def _shard_new_values(self) -> None:
        """Take the shards of parameters that the script has given whole values."""
        for name, parameter in self._parameters.items():
            if is_absent(parameter):
                continue
            self._require_like_shards(name)
            for shard in self._shards:
                shard.set_parameter(name, parameter)
            release_sharded(name, parameter)

    def _size(self, name: str) -> int:
        sharding = self._shards[0].sharding
        return sharding.sizes[sharding.names.index(name)]

    def _require_like_shards(self, name: str) -> None:
        """Raise InputError if a parameter has another dtype or size than its shards."""
        parameter, dtype, size = self._parameters[name], self._shards[0].dtype, self._size(name)
        if parameter.dtype != dtype or parameter.numel() != size:
            raise InputError(
                f"{name}.data is now of {parameter.dtype} and shape {list(parameter.shape)}, but the shards "
                f"of {name} have {size} elements of {dtype}; give it a whole tensor of that type, or call "
                "pipe.load_state_dict(...), and change types with the pipeline's own methods"
            )


def _mark(parameter: Tensor) -> Tensor:
    """The mark in ``.grad`` for a gradient that is held as shards."""
    nan = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)
