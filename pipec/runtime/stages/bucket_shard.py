"""A replica's shard of a bucket: its slice of gradients, optimizer state and parameters.

The parameters of a bucket are views of one flat tensor, which has an equal slice for each replica. Each
replica updates its slice; the slices are then gathered, immediately or before use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.ir import Bucket, ParameterShard, Sharding
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait


def flatten_parameters(bucket: Bucket, sharding: Sharding, parameters: Mapping[str, Tensor]) -> Tensor:
    """Move the parameters of a bucket into one flat tensor, and make them views of it.

    Raises:
        InputError: a parameter is not contiguous.
    """
    first = parameters[bucket.names[0]]
    flat = torch.zeros(sharding.width * sharding.num_replicas, dtype=first.dtype, device=first.device)
    for name, view in views(sharding, parameters, flat).items():
        parameter = parameters[name]
        if not parameter.is_contiguous():
            raise InputError(
                f"{name} has strides {parameter.stride()}, but sharded parameters must be contiguous; call "
                ".contiguous(), or compile without shard=..."
            )
        parameter.data = view.copy_(parameter.detach())
    return flat


def views(sharding: Sharding, shapes: Mapping[str, Tensor], flat: Tensor) -> dict[str, Tensor]:
    """The parameters of a bucket as views of ``flat``, with the shapes of ``shapes``."""
    places = zip(sharding.names, sharding.offsets, sharding.sizes, strict=True)
    return {name: flat[at : at + size].view(shapes[name].shape) for name, at, size in places}


@dataclass(frozen=True)
class ShardGradient:
    """The sums of a shard's gradients, and the names of the parameters that have one."""

    sums: Tensor
    names: frozenset[str]


class BucketShard:
    """The shard of replica ``index`` of a bucket whose parameters are views of ``flat``.

    If it ``keeps_parameters``, ``flat`` stays. Otherwise only the replica's slice stays, and the parameters
    are empty until they are gathered. ``like`` holds meta tensors with the shapes of the parameters.
    Gradients are reduced as ``gradient_dtype`` if it is given.
    """

    def __init__(
        self,
        sharding: Sharding,
        index: int,
        flat: Tensor,
        like: Mapping[str, Tensor],
        keeps_parameters: bool,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.sharding = sharding
        self._reduced_as = gradient_dtype or flat.dtype
        self._index, self._like = index, like
        self._first = index * sharding.width
        self._flat: Tensor | None = flat if keeps_parameters else None
        self._keeps = keeps_parameters
        own = flat[self._first : self._first + sharding.width]
        self._own = own if keeps_parameters else own.clone()
        self._gradient: Tensor | None = None
        self._with_gradient: frozenset[str] = frozenset()
        self._summing: tuple[Tensor, CollectiveWait] | None = None
        self._gathering: CollectiveWait | None = None

    def move_to(self, flat: Tensor) -> None:
        """Use other memory for parameters that are kept whole; it already holds their values."""
        assert self._keeps, "parameters that are gathered before use have no lasting memory"
        self._flat, self._own = flat, flat[self._first : self._first + self._own.numel()]

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    def owned(self) -> dict[ParameterShard, Tensor]:
        """The memory of each piece that this replica updates."""
        return {piece: self._part(self._own, piece) for piece in self.sharding.shards_of(self._index)}

    def start_reduce(self, totals: Mapping[str, Tensor | None], group: CollectiveGroup) -> None:
        """Start the reduction over replicas. The gradients are copied: their memory may be freed.

        The gradients of a replica without a microbatch in a round are None.
        """
        assert self._summing is None, "a reduction is awaited before the next one"
        size = self.sharding.width * self.sharding.num_replicas
        flat = self._own.new_empty(size, dtype=self._reduced_as)
        for name, view in views(self.sharding, self._like, flat).items():
            total = totals[name]
            if total is None:
                view.zero_()
            else:
                view.copy_(total)
        part = torch.empty_like(self._own, dtype=self._reduced_as)
        self._summing = part, group.reduce_scatter(part, flat)

    def finish_reduce(self) -> None:
        """Wait for the reduction, and add this replica's slice of the sums to its gradient."""
        if self._summing is not None:
            (part, wait), self._summing = self._summing, None
            wait()
            part = part.to(self._own.dtype)
            self._gradient = part if self._gradient is None else self._gradient.add_(part)
            self._with_gradient = frozenset(self.sharding.names)

    def gradients(self) -> dict[str, Tensor]:
        """The sums of the gradients of the pieces that this replica updates."""
        if self._gradient is None:
            return {}
        pieces = self.sharding.shards_of(self._index)
        return {p.name: self._part(self._gradient, p) for p in pieces if p.name in self._with_gradient}

    @property
    def names_with_gradient(self) -> frozenset[str]:
        """The parameters that have a gradient, equal on all replicas."""
        return self._with_gradient

    def take_gradient(self) -> "ShardGradient | None":
        """The gradient, which this shard has no longer; None if it has none."""
        if self._gradient is None:
            return None
        taken = ShardGradient(self._gradient, self._with_gradient)
        self.forget_gradients()
        return taken

    def add_gradient(self, added: "ShardGradient") -> None:
        """Add a gradient, which may become the memory of this shard's."""
        self._gradient = added.sums if self._gradient is None else self._gradient.add_(added.sums)
        self._with_gradient |= added.names

    def set_parameter(self, name: str, whole: Tensor) -> None:
        """Set this replica's piece of a parameter from the whole one."""
        self._set(self._own, name, whole)

    def set_gradient(self, name: str, whole: Tensor | None) -> None:
        """Replace the gradient of a parameter; None removes it."""
        self._with_gradient = self._with_gradient - {name} if whole is None else self._with_gradient | {name}
        if not self._with_gradient:
            self._gradient = None
        elif self._gradient is None:
            self._gradient = torch.zeros_like(self._own)
        if self._gradient is not None:
            self._set(self._gradient, name, whole)

    def _set(self, slice_: Tensor, name: str, whole: Tensor | None) -> None:
        if piece := self.sharding.owners(name).get(self._index):
            own = self._part(slice_, piece)
            own.zero_() if whole is None else own.copy_(whole.detach().reshape(-1)[piece.start : piece.stop])

    def start_gather_gradients(self, group: CollectiveGroup) -> Callable[[], dict[str, Tensor]]:
        """Start to gather the gradients; returns a function that waits for the whole ones."""
        assert self._gradient is not None, "only reduced gradients are gathered"
        flat = self._own.new_empty(self.sharding.width * self.sharding.num_replicas)
        wait = group.all_gather(flat, self._gradient)

        def gathered() -> dict[str, Tensor]:
            wait()
            whole = views(self.sharding, self._like, flat)
            return {name: whole[name] for name in self._with_gradient}

        return gathered

    def forget_gradients(self) -> None:
        self._gradient, self._with_gradient = None, frozenset()

    def drop_gradients(self) -> None:
        """Drop all gradients, including a reduction that an aborted step has started."""
        self._summing = None
        self.forget_gradients()

    def start_gather(self, group: CollectiveGroup) -> None:
        """Start to gather the parameters of all replicas."""
        if self._flat is None:
            self._flat = self._own.new_empty(self.sharding.width * self.sharding.num_replicas)
        self._gathering = group.all_gather(self._flat, self._own)

    def finish_gather(self) -> dict[str, Tensor]:
        """Wait for the gathering; returns the whole parameters."""
        wait, self._gathering = self._gathering, None
        if wait is not None:
            wait()
        assert self._flat is not None
        return views(self.sharding, self._like, self._flat)

    @property
    def keeps_parameters(self) -> bool:
        return self._keeps

    def drop(self) -> None:
        """Drop the gathered slices of other replicas, unless parameters are kept."""
        if not self._keeps:
            self._flat = None

    def reshard_updated(self) -> None:
        """Copy this replica's slice out of updated whole parameters, and drop the rest."""
        assert self._flat is not None
        self._own.copy_(self._flat[self._first : self._first + self._own.numel()])
        self.drop()

    def _part(self, slice_: Tensor, piece: ParameterShard) -> Tensor:
        at = self.sharding.position(piece) - self._first
        return slice_[at : at + piece.size]
