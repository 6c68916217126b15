"""The flat memory of a bucket: sums of gradients, their reduction over replicas, and ZeRO slices.

The tensors of a bucket are views of one flat tensor. If the bucket is sharded, it has an equal slice for each
replica, which is a process of its own and updates its slice. The slices are then gathered, immediately or
before use.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.ir import ParameterShard, Sharding
from pipec.runtime.absent_tensors import hold, is_absent, release_sharded
from pipec.runtime.memory.storage import is_exclusive
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.messages.cuda import pinned_copy
from pipec.runtime.stages.host_bucket import HostLink, host_memory_like


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
    """The sums of a bucket's gradients, in memory in which the gradients of microbatches may accumulate.

    ``like`` has tensors of the shapes. Sums are reduced over the replicas as ``reduced_as``, and all replicas
    get all of them.
    """

    def __init__(
        self, sharding: Sharding, like: Mapping[str, Tensor], device: torch.device, reduced_as: torch.dtype
    ) -> None:
        self.sharding, self._device, self._reduced_as = sharding, device, reduced_as
        self._like = {name: torch.empty_like(like[name], device="meta") for name in sharding.names}
        self._sums: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._reducing: tuple[Any, CollectiveWait] | None = None

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

    def start_reduce(self, totals: dict[str, Tensor | None], group: CollectiveGroup, link: HostLink) -> None:
        """Start the reduction of these gradients, which are taken out of ``totals``.

        Those of a replica without a microbatch in a round are None. It contributes zeros, and gets the sum.
        Sums that belong into host memory are copied over ``link``.
        """
        places = {name: self.place(name) for name in self.sharding.names}
        assert self._sums is not None
        _fill(places, totals)
        self._views = {}
        self._reducing = places, group.all_reduce(self._sums)

    def finish_reduce(self) -> dict[str, Tensor]:
        """Wait for the reduction. Returns the sums of a whole bucket; a sharded one adds up its slice."""
        if self._reducing is None:
            return {}
        (reduced, wait), self._reducing = self._reducing, None
        wait()
        return self._keep(reduced)

    def _keep(self, reduced: Any) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = reduced
        return sums

    def _new(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Memory for all tensors of the bucket."""
        size = self.sharding.width * self.sharding.num_replicas
        return torch.empty(size, dtype=dtype, device=device or self._device)


class ShardedBucket(FlatBucket):
    """The slice of a bucket that this process updates, as replica ``index`` of a stage.

    The slice of the sums is added up from step to step. If it ``keeps_parameters``, they are views of flat
    memory. Otherwise only the slice stays, and the parameters are empty until they are gathered. With
    ``on_host`` the slice and its sums stay in host memory; collectives run on ``device``.

    Between steps, the slice follows what a script does to ``parameter.data`` and ``parameter.grad``. A
    parameter whose gradient is added up in slices has a mark in ``.grad``: NaN in its shape, in the memory of
    one element. To take the mark away drops the gradient; to write zeros into it, or to put another tensor in
    its place, sets the gradient, as without shards.

    Raises:
        InputError: a parameter is not contiguous.
    """

    def __init__(
        self,
        sharding: Sharding,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        gradient_dtype: str,
        keeps_parameters: bool,
        device: torch.device,
        on_host: bool = False,
    ) -> None:
        self._parameters = {name: parameters[name] for name in sharding.names}
        first = self._parameters[sharding.names[0]]
        super().__init__(sharding, self._parameters, device, reduction_dtype(gradient_dtype, first.dtype))
        self.keeps_parameters, self.dtype = keeps_parameters, first.dtype
        self._home, self.on_host = first.device, on_host
        self._index, self._first = index, index * sharding.width
        self._flat: Tensor | None = None
        self._own = self._flatten()
        if not keeps_parameters:
            is_pinned = on_host and device.type == "cuda"
            self._own = pinned_copy(self._own) if is_pinned else self._own.clone()
            self.drop()
        self._gradient: Tensor | None = None
        self._leaving: Tensor | None = None
        self.names_with_gradient: frozenset[str] = frozenset()
        """The parameters that have a gradient in slices, equal on all replicas."""
        self._gathering: CollectiveWait | None = None
        self._marks: dict[str, Tensor] = {}
        self._follow_gradients()

    def _flatten(self) -> Tensor:
        """Move the parameters into one flat tensor, and make them views of it; returns the own slice."""
        for name, parameter in self._parameters.items():
            if not parameter.is_contiguous():
                raise InputError(
                    f"{name} has strides {parameter.stride()}, but sharded parameters must be contiguous; "
                    "call .contiguous(), or compile without shard=..."
                )
        self._flat = self._new(self.dtype, self._home).zero_()
        for name, view in views(self.sharding, self._parameters, self._flat).items():
            self._parameters[name].data = view.copy_(self._parameters[name].detach())
        self._addresses = [(each, each.data_ptr()) for each in self._parameters.values()]
        return self._flat[self._first : self._first + self.sharding.width]

    # gradients

    def start_reduce(self, totals: dict[str, Tensor | None], group: CollectiveGroup, link: HostLink) -> None:
        flat = self._new(self._reduced_as)
        _fill(views(self.sharding, self._like, flat), totals)
        part = torch.empty(self.sharding.width, dtype=self._reduced_as, device=self._device)
        wait = group.reduce_scatter(part, flat)
        self._reducing = part, wait
        if self.on_host and link.is_async:
            sums, self._leaving = host_memory_like(part, pinned=True), part

            def copy() -> None:
                wait()
                sums.copy_(part, non_blocking=True)

            self._reducing = sums, link.store(copy)

    def _keep(self, reduced: Tensor) -> dict[str, Tensor]:
        if self.on_host and self._leaving is None:
            reduced = host_memory_like(reduced, pinned=False).copy_(reduced)
        self._leaving, sums = None, reduced.to(self.dtype)
        self.add_gradient(ShardGradient(sums, frozenset(self.sharding.names)))
        return {}

    def gradients(self) -> dict[str, Tensor]:
        """The sums of the gradients of the pieces that this replica updates."""
        if self._gradient is None:
            return {}
        pieces = self.sharding.shards_of(self._index)
        return {p.name: self._part(self._gradient, p) for p in pieces if p.name in self.names_with_gradient}

    def take_gradient(self) -> ShardGradient | None:
        """The gradient, which this shard has no longer; None if it has none."""
        if self._gradient is None:
            return None
        taken = ShardGradient(self._gradient, self.names_with_gradient)
        self.forget_gradients()
        return taken

    def add_gradient(self, added: ShardGradient) -> None:
        """Add a gradient, which may become the memory of this shard's."""
        self._gradient = added.sums if self._gradient is None else self._gradient.add_(added.sums)
        self.names_with_gradient |= added.names

    def forget_gradients(self) -> None:
        self._gradient, self.names_with_gradient = None, frozenset()

    def drop_gradients(self) -> None:
        """Drop all gradients, including a reduction that an aborted step has started."""
        self._reducing = None
        self.forget_gradients()

    # parameters

    def owned(self) -> dict[ParameterShard, Tensor]:
        """The memory of each piece that this replica updates."""
        return {piece: self._part(self._own, piece) for piece in self.sharding.shards_of(self._index)}

    def start_gather(self, group: CollectiveGroup, link: HostLink | None = None) -> None:
        """Start to gather the parameters of all replicas. A slice in host memory is copied over ``link``."""
        if self._flat is None:
            self._flat = self._new(self.dtype)
        if not self.on_host:
            self._gathering = group.all_gather(self._flat, self._own)
            return
        flat, part = self._flat, self._flat[self._first : self._first + self.sharding.width]

        def copy_and_gather() -> None:
            part.copy_(self._own, non_blocking=True)
            self._gathering = group.all_gather(flat, part)

        if link is None:
            copy_and_gather()
        else:
            link.load(copy_and_gather)  # the gathering waits for the copy

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

    def unshard(self, group: CollectiveGroup) -> None:
        """Gather the parameters, between steps."""
        if self.keeps_parameters:
            return
        self._shard_new_values()
        self.start_gather(group)
        for name, tensor in self.finish_gather().items():
            hold(self._parameters[name], tensor.to(self._home))

    def reshard(self) -> None:
        """Keep the slice of the current parameters, and free the rest."""
        if self.keeps_parameters:
            return
        for name, parameter in self._parameters.items():
            self._set(self._own, name, parameter)
            release_sharded(name, parameter)
        self.drop()

    def release(self, group: CollectiveGroup) -> None:
        """Gather parameters and gradients for good. All ranks call this."""
        self._follow_gradients()
        self.unshard(group)
        names, gradient = self.names_with_gradient, self._gradient
        self.drop_gradients()
        self.mark_gradients()
        if gradient is None:
            return
        flat = self._new(self.dtype)
        group.all_gather(flat, gradient.to(self._device))()
        for name, whole in views(self.sharding, self._like, flat).items():
            if name in names:
                parameter = self._parameters[name]
                parameter.grad = whole.to(parameter.device, parameter.dtype)

    # what a script does between steps

    def follow_script(self) -> bool:
        """Apply the script's changes since the last step; returns whether the slice is in other memory now.

        Raises:
            InputError: it has given a parameter or a gradient other than what a shard can be taken of.
        """
        self._follow_gradients()
        moved = False
        if not self.keeps_parameters:
            self._shard_new_values()
        elif any(x.data_ptr() != address or not x.is_contiguous() for x, address in self._addresses):
            for name in self._parameters:
                self._require_like_shards(name)
            self._own = self._flatten()  # in new memory: the script may hold what was theirs
            moved = True
        self.mark_gradients()
        return moved

    def mark_gradients(self) -> None:
        """Show the script which parameters have a gradient."""
        present = self.names_with_gradient
        for name in present | self._marks.keys():
            parameter = self._parameters[name]
            if name not in present:
                del self._marks[name]
                parameter.grad = None
            elif name not in self._marks:
                nan = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
                self._marks[name] = parameter.grad = nan.expand(parameter.shape)

    def _follow_gradients(self) -> None:
        changed = [
            (name, parameter)
            for name, parameter in self._parameters.items()
            if parameter.grad is not (mark := self._marks.get(name)) or (mark is not None and mark._version)
        ]
        for name, parameter in changed:
            if parameter.grad is not None and parameter.grad.numel() != self._like[name].numel():
                raise InputError(
                    f"the gradient of {name} is kept in shards, so that .grad is empty here, and what is "
                    "written there reaches no rank; set it to None, as zero_grad(set_to_none=True) does, to "
                    "drop the gradient, and compile with another shard=... to set it"
                )
        for name, parameter in changed:
            self._set_gradient(name, parameter.grad)
            self._marks.pop(name, None)
            parameter.grad = None

    def _set_gradient(self, name: str, whole: Tensor | None) -> None:
        names = self.names_with_gradient
        self.names_with_gradient = names - {name} if whole is None else names | {name}
        if not self.names_with_gradient:
            self._gradient = None
        elif self._gradient is None:
            self._gradient = torch.zeros_like(self._own)
        if self._gradient is not None:
            self._set(self._gradient, name, whole)

    def _shard_new_values(self) -> None:
        """Take the slices of parameters that the script has given whole values."""
        for name, parameter in self._parameters.items():
            if not is_absent(parameter):
                self._require_like_shards(name)
                self._set(self._own, name, parameter)
                release_sharded(name, parameter)

    def _require_like_shards(self, name: str) -> None:
        """Raise InputError if a parameter has another dtype or size than its shards."""
        parameter, size = self._parameters[name], self._like[name].numel()
        if parameter.dtype != self.dtype or parameter.numel() != size:
            raise InputError(
                f"{name}.data is now of {parameter.dtype} and shape {list(parameter.shape)}, but the shards "
                f"of {name} have {size} elements of {self.dtype}; give it a whole tensor of that type, or "
                "call pipe.load_state_dict(...), and change types with the pipeline's own methods"
            )

    def _set(self, slice_: Tensor, name: str, whole: Tensor | None) -> None:
        """Replace this replica's piece of a parameter in a slice, by zeros without a ``whole``."""
        if piece := self.sharding.owners(name).get(self._index):
            own = self._part(slice_, piece)
            own.zero_() if whole is None else own.copy_(whole.detach().reshape(-1)[piece.start : piece.stop])

    def _part(self, slice_: Tensor, piece: ParameterShard) -> Tensor:
        at = self.sharding.position(piece) - self._first
        return slice_[at : at + piece.size]


def _fill(places: Mapping[str, Tensor], totals: dict[str, Tensor | None]) -> None:
    """Copy gradients to their places, and take them out of ``totals``."""
    for name, place in places.items():
        total = totals.pop(name)
        if total is None:
            place.zero_()
        elif total is not place:
            place.copy_(total)
        del total
