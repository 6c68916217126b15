"""Collectives of the replicas of a stage: reduce gradients, and average buffers that forwards changed."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pipec.ir import Bucket
from pipec.runtime.memory.storage import is_exclusive
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import BoundStage


class FlatLayout:
    """The places of tensors in one flat tensor: one after another, each with its own strides."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._shapes = [(tensor.shape, tensor.stride()) for tensor in likes]
        self.sizes = [tensor.numel() for tensor in tensors]
        self.size = sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of ``flat``, which may be longer."""
        parts = flat[: self.size].split(self.sizes)
        return [
            part.as_strided(*shape, part.storage_offset())
            for part, shape in zip(parts, self._shapes, strict=True)
        ]


class GradientReduction:
    """Sums the gradients of a bucket over the replicas of its stage, and adds the sums to ``.grad``.

    Gradients are reduced in ``dtype`` if it is given. Otherwise the flat memory that is reduced is also the
    memory in which a replica accumulates the gradients of its microbatches.
    """

    def __init__(self, stage: BoundStage, bucket: Bucket, group: CollectiveGroup, dtype: str = "") -> None:
        self._stage, self._group = stage, group
        self._indices = [stage.code.PARAMETERS.index(name) for name in bucket.names]
        weights = [stage.weights[index] for index in self._indices]
        self._layout = FlatLayout(weights)
        self._dtype = reduction_dtype(dtype, weights[0].dtype)
        self._is_sparse = bucket.sparse
        self._sums: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._wait: CollectiveWait = _nothing
        if self._dtype is weights[0].dtype and not bucket.sparse:
            stage.gradients.accumulate_in(self, self._indices)

    def place(self, index: int) -> Tensor:
        """The gradient of a parameter as a view of the flat memory."""
        if not self._views:
            if self._flat is None or not is_exclusive(self._flat):  # the user holds sums of an earlier step
                self._flat = torch.empty(self._layout.size, dtype=self._dtype, device=self._stage.device)
            self._views = dict(zip(self._indices, self._layout.views(self._flat), strict=True))
        return self._views[index]

    def forget_step(self) -> None:
        self._views = {}

    def start(self) -> None:
        """Start the reduction of this replica's gradients. Sparse gradients are reduced synchronously.

        A replica whose microbatches have no rows contributes zeros, and receives the sum too.
        """
        totals = {index: self._stage.gradients.pop(index) for index in self._indices}
        if self._is_sparse:
            first = self._indices[0]
            rows = totals[first]
            own = _no_rows(self._stage.weights[first]) if rows is None else rows
            self._sums = [_sum_of_rows(own, self._group)]
            return
        self._sums = [self.place(index) for index in self._indices]
        for index, view in zip(self._indices, self._sums, strict=True):
            total = totals.pop(index)
            if total is None:
                view.zero_()
            elif total is not view:
                view.copy_(total)
            del total
        self._views = {}
        assert self._flat is not None
        self._wait = self._group.all_reduce(self._flat)

    def finish(self) -> None:
        """Wait for the sums, and add them to ``.grad``."""
        self._wait()
        sums, self._sums, self._wait = self._sums, [], _nothing
        if self._stage.keeps_gradients:
            for index, total in zip(self._indices, sums, strict=True):
                self._stage.gradients.add_reduced(index, total.to(self._stage.weights[index].dtype))


def reduction_dtype(requested: str, own: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of dtype ``own`` are reduced: the requested one, if it is smaller."""
    dtype: torch.dtype = getattr(torch, requested) if requested and own.is_floating_point else own
    return dtype if dtype.itemsize < own.itemsize else own


def _no_rows(weight: Tensor) -> Tensor:
    """The sparse gradient of an embedding without lookups."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
    values = weight.new_empty(0, *weight.shape[1:])
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)


def _sum_of_rows(gradient: Tensor, group: CollectiveGroup) -> Tensor:
    """The sum of all replicas' sparse gradients, which are gathered padded to equal numbers of rows."""
    own = gradient.coalesce()
    counts = torch.empty(group.size, dtype=torch.int64, device=own.device)
    group.all_gather(counts, torch.tensor([own._nnz()], device=own.device))()
    most = int(counts.max())
    indices, values = own.indices(), own.values()
    padded_indices = indices.new_zeros(indices.shape[0], most)
    padded_indices[:, : own._nnz()] = indices
    padded_values = values.new_zeros(most, *values.shape[1:])
    padded_values[: own._nnz()] = values
    all_indices = indices.new_empty(group.size * padded_indices.numel())
    all_values = values.new_empty(group.size * padded_values.numel())
    waits = [
        group.all_gather(all_indices, padded_indices.flatten()),
        group.all_gather(all_values, padded_values.flatten()),
    ]
    for wait in waits:
        wait()
    parts = zip(
        all_indices.view(group.size, *padded_indices.shape),
        all_values.view(group.size, *padded_values.shape),
        counts.tolist(),
        strict=True,
    )
    rows = [(indices[:, :count], values[:count]) for indices, values, count in parts]
    gathered = torch.cat([indices for indices, _ in rows], 1), torch.cat([values for _, values in rows])
    return torch.sparse_coo_tensor(*gathered, gradient.shape, check_invariants=False).coalesce()


class BufferAverage:
    """Makes the buffers that forwards changed equal on all replicas of a stage.

    A floating-point buffer becomes the mean over replicas, each weighted with its ``share`` of the step's
    microbatches. Any other buffer, such as a count of batches, changes by the sum of the replicas' changes.
    Those that are ``equal`` already, because each replica changes them by the rows of all, are left out.
    """

    def __init__(
        self,
        stage: BoundStage,
        group: CollectiveGroup,
        share: Callable[[], float],
        equal: Collection[str] = (),
    ) -> None:
        self._stage, self._group, self._share = stage, group, share
        self._indices = [each for each in stage.updated_indices if stage.code.BUFFERS[each] not in equal]
        self._flats: list[tuple[Tensor, FlatLayout, list[int]]] = []
        self._waits: list[CollectiveWait] = []

    def start(self) -> None:
        share = self._share()
        kinds: dict[torch.dtype, list[int]] = {}
        for index in self._indices:
            kinds.setdefault(self._stage.buffers[index].dtype, []).append(index)
        for dtype, indices in kinds.items():
            layout = FlatLayout([self._stage.buffers[index] for index in indices])
            flat = torch.empty(layout.size, dtype=_summed_as(dtype), device=self._stage.device)
            for index, view in zip(indices, layout.views(flat), strict=True):
                own, before = self._stage.buffers[index], self._stage.buffers_before[index]
                view.copy_(_times(share, own) if own.is_floating_point() else own - before)
            self._flats.append((flat, layout, indices))
            self._waits.append(self._group.all_reduce(flat))

    def finish(self) -> None:
        for wait in self._waits:
            wait()
        agreed: dict[int, Tensor] = {}
        for flat, layout, indices in self._flats:
            for index, total in zip(indices, layout.views(flat), strict=True):
                before = self._stage.buffers_before[index]
                value = total if before.is_floating_point() else before + total
                agreed[index] = value.to(before.dtype)
        self._stage.update_buffers([agreed.get(index) for index in self._stage.updated_indices])
        self._flats, self._waits = [], []


def _times(share: float, buffer: Tensor) -> Tensor:
    """``share * buffer``, but zero for a share of zero even if the buffer holds infinities."""
    return buffer * share if share else torch.zeros_like(buffer)


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _nothing() -> None:
    """The wait before any reduction was started."""
