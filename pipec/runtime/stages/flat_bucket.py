"""The flat memory of a bucket: sums of gradients, their reduction over replicas, and ZeRO slices.

The tensors of a bucket are views of one flat tensor. If the bucket is sharded, it has an equal slice for each
replica. Each replica updates its slice; the slices are then gathered, immediately or before use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.ir import Bucket, ParameterShard, Sharding
from pipec.runtime.memory.storage import is_exclusive
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait


def undivided(tensors: Mapping[str, Tensor]) -> Sharding:
    """The tensors one after the other, without padding, in one slice."""
    sizes = [tensor.numel() for tensor in tensors.values()]
    *offsets, total = accumulate(sizes, initial=0)
    return Sharding(tuple(tensors), tuple(sizes), tuple(offsets), max(total, 1), 1)


def views(sharding: Sharding, like: Mapping[str, Tensor], flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a bucket as views of ``flat``, with the shapes and strides of ``like``."""
    return {
        name: flat.as_strided(like[name].shape, like[name].stride(), flat.storage_offset() + at)
        for name, at in zip(sharding.names, sharding.offsets, strict=True)
    }


def flatten_parameters(bucket: Bucket, sharding: Sharding, parameters: Mapping[str, Tensor]) -> Tensor:
    """Move the parameters of a bucket into one flat tensor, and make them views of it.

    Raises:
        InputError: a parameter is not contiguous.
    """
    for name in bucket.names:
        if not parameters[name].is_contiguous():
            raise InputError(
                f"{name} has strides {parameters[name].stride()}, but sharded parameters must be contiguous; "
                "call .contiguous(), or compile without shard=..."
            )
    first = parameters[bucket.names[0]]
    flat = torch.zeros(sharding.width * sharding.num_replicas, dtype=first.dtype, device=first.device)
    for name, view in views(sharding, parameters, flat).items():
        parameters[name].data = view.copy_(parameters[name].detach())
    return flat


def reduction_dtype(requested: str, own: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of dtype ``own`` are reduced: the requested one, if it is smaller."""
    dtype: torch.dtype = getattr(torch, requested) if requested and own.is_floating_point else own
    return dtype if dtype.itemsize < own.itemsize else own


@dataclass(frozen=True)
class ShardGradient:
    """The sums of a slice's gradients, and the names of the parameters that have one."""

    sums: Tensor
    names: frozenset[str]


class FlatBucket:
    """The flat memory of a bucket on replica ``index`` of its stage. ``like`` has tensors of its shapes.

    Gradients are reduced over the replicas as ``reduced_as``. Without ``flat`` the bucket is whole: all
    replicas get all sums, in the memory in which they may accumulate the gradients of their microbatches.

    A sharded bucket has parameters that are views of ``flat``. The replica gets its slice of the sums, which
    is added up from step to step. If it ``keeps_parameters``, ``flat`` stays. Otherwise only the replica's
    slice stays, and the parameters are empty until they are gathered.
    """

    def __init__(
        self,
        sharding: Sharding,
        index: int,
        like: Mapping[str, Tensor],
        device: torch.device,
        reduced_as: torch.dtype,
        flat: Tensor | None = None,
        keeps_parameters: bool = True,
    ) -> None:
        self.sharding, self.keeps_parameters = sharding, keeps_parameters
        self._index, self._device, self._reduced_as = index, device, reduced_as
        self._like = {name: torch.empty_like(like[name], device="meta") for name in sharding.names}
        self._first = index * sharding.width
        self._flat = flat if keeps_parameters else None
        own = None if flat is None else flat[self._first : self._first + sharding.width]
        self._own = own if keeps_parameters or own is None else own.clone()
        self._sums: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._gradient: Tensor | None = None
        self.names_with_gradient: frozenset[str] = frozenset()
        """The parameters that have a gradient in slices, equal on all replicas."""
        self._reducing: tuple[Tensor | dict[str, Tensor], CollectiveWait] | None = None
        self._gathering: CollectiveWait | None = None

    # sums of gradients

    def place(self, name: str) -> Tensor:
        """The memory of a whole gradient, with undefined values."""
        if not self._views:
            if self._sums is None or not is_exclusive(self._sums):  # the user holds sums of an earlier step
                self._sums = self._new(self._reduced_as)
            self._views = views(self.sharding, self._like, self._sums)
        return self._views[name]

    def forget_step(self) -> None:
        """Release the tensors that ``place`` has returned."""
        self._views = {}

    def start_reduce(self, totals: dict[str, Tensor | None], group: CollectiveGroup) -> None:
        """Start the reduction of these gradients, which are taken out of ``totals``.

        Those of a replica without a microbatch in a round are None. It contributes zeros, and gets the sum.
        """
        if self._own is None:
            places = {name: self.place(name) for name in self.sharding.names}
            flat = self._sums
            assert flat is not None
        else:
            flat = self._new(self._reduced_as)
            places = views(self.sharding, self._like, flat)
        for name, place in places.items():
            total = totals.pop(name)
            if total is None:
                place.zero_()
            elif total is not place:
                place.copy_(total)
            del total
        self._views = {}
        if self._own is None:
            self._reducing = places, group.all_reduce(flat)
        else:
            part = torch.empty_like(self._own, dtype=self._reduced_as)
            self._reducing = part, group.reduce_scatter(part, flat)

    def finish_reduce(self) -> dict[str, Tensor]:
        """Wait for the reduction. Returns the sums of a whole bucket; a sharded one adds up its slice."""
        if self._reducing is None:
            return {}
        (reduced, wait), self._reducing = self._reducing, None
        wait()
        if isinstance(reduced, dict):
            return reduced
        part = reduced.to(self.dtype)
        self._gradient = part if self._gradient is None else self._gradient.add_(part)
        self.names_with_gradient = frozenset(self.sharding.names)
        return {}

    # slices

    def move_to(self, flat: Tensor) -> None:
        """Use other memory for parameters that are kept whole; it already holds their values."""
        assert self.keeps_parameters, "parameters that are gathered before use have no lasting memory"
        self._flat, self._own = flat, flat[self._first : self._first + self.sharding.width]

    @property
    def own(self) -> Tensor:
        """This replica's slice of the parameters."""
        assert self._own is not None, "only sharded buckets have slices"
        return self._own

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    def owned(self) -> dict[ParameterShard, Tensor]:
        """The memory of each piece that this replica updates."""
        return {piece: self._part(self.own, piece) for piece in self.sharding.shards_of(self._index)}

    def gradients(self) -> dict[str, Tensor]:
        """The sums of the gradients of the pieces that this replica updates."""
        if self._gradient is None:
            return {}
        pieces = self.sharding.shards_of(self._index)
        return {p.name: self._part(self._gradient, p) for p in pieces if p.name in self.names_with_gradient}

    def take_gradient(self) -> "ShardGradient | None":
        """The gradient, which this shard has no longer; None if it has none."""
        if self._gradient is None:
            return None
        taken = ShardGradient(self._gradient, self.names_with_gradient)
        self.forget_gradients()
        return taken

    def add_gradient(self, added: "ShardGradient") -> None:
        """Add a gradient, which may become the memory of this shard's."""
        self._gradient = added.sums if self._gradient is None else self._gradient.add_(added.sums)
        self.names_with_gradient |= added.names

    def set_parameter(self, name: str, whole: Tensor) -> None:
        """Set this replica's piece of a parameter from the whole one."""
        self._set(self.own, name, whole)

    def set_gradient(self, name: str, whole: Tensor | None) -> None:
        """Replace the gradient of a parameter; None removes it."""
        names = self.names_with_gradient
        self.names_with_gradient = names - {name} if whole is None else names | {name}
        if not self.names_with_gradient:
            self._gradient = None
        elif self._gradient is None:
            self._gradient = torch.zeros_like(self.own)
        if self._gradient is not None:
            self._set(self._gradient, name, whole)

    def _set(self, slice_: Tensor, name: str, whole: Tensor | None) -> None:
        if piece := self.sharding.owners(name).get(self._index):
            own = self._part(slice_, piece)
            own.zero_() if whole is None else own.copy_(whole.detach().reshape(-1)[piece.start : piece.stop])

    def start_gather_gradients(self, group: CollectiveGroup) -> Callable[[], dict[str, Tensor]]:
        """Start to gather the gradients; returns a function that waits for the whole ones."""
        assert self._gradient is not None, "only reduced gradients are gathered"
        flat = self._new(self.dtype)
        wait = group.all_gather(flat, self._gradient)

        def gathered() -> dict[str, Tensor]:
            wait()
            whole = views(self.sharding, self._like, flat)
            return {name: whole[name] for name in self.names_with_gradient}

        return gathered

    def forget_gradients(self) -> None:
        self._gradient, self.names_with_gradient = None, frozenset()

    def drop_gradients(self) -> None:
        """Drop all gradients, including a reduction that an aborted step has started."""
        self._reducing = None
        self.forget_gradients()

    def start_gather(self, group: CollectiveGroup) -> None:
        """Start to gather the parameters of all replicas."""
        if self._flat is None:
            self._flat = self._new(self.dtype)
        self._gathering = group.all_gather(self._flat, self.own)

    def finish_gather(self) -> dict[str, Tensor]:
        """Wait for the gathering; returns the whole parameters."""
        wait, self._gathering = self._gathering, None
        if wait is not None:
            wait()
        assert self._flat is not None
        return views(self.sharding, self._like, self._flat)

    def drop(self) -> None:
        """Drop the gathered slices of other replicas, unless parameters are kept."""
        if not self.keeps_parameters:
            self._flat = None

    def reshard_updated(self) -> None:
        """Copy this replica's slice out of updated whole parameters, and drop the rest."""
        assert self._flat is not None
        self.own.copy_(self._flat[self._first : self._first + self.sharding.width])
        self.drop()

    def _part(self, slice_: Tensor, piece: ParameterShard) -> Tensor:
        at = self.sharding.position(piece) - self._first
        return slice_[at : at + piece.size]

    def _new(self, dtype: torch.dtype) -> Tensor:
        """Memory for all tensors of the bucket."""
        size = self.sharding.width * self.sharding.num_replicas
        return torch.empty(size, dtype=dtype, device=self._device)
