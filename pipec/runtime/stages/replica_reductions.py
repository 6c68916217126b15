"""Collectives of the replicas of a stage: sums of sparse gradients, and averages of changed buffers."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import BoundStage


def no_rows(weight: Tensor) -> Tensor:
    """The sparse gradient of an embedding without lookups."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
    values = weight.new_empty(0, *weight.shape[1:])
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)


def sum_of_rows(gradient: Tensor, group: CollectiveGroup) -> Tensor:
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
    """Makes the buffers ``names``, which forwards changed, equal on all replicas of a stage.

    A floating-point buffer becomes the mean over replicas, each weighted with its share of the step's
    microbatches. Any other buffer, such as a count of rows, changes by the sum of the replicas' changes, and
    a flag is set if a replica has set it. What all microbatches change alike is that of the first replica
    that has any. ``counts`` returns the number of microbatches of each replica; this one is number ``index``.
    """

    def __init__(
        self,
        stage: BoundStage,
        group: CollectiveGroup,
        names: Collection[str],
        index: int,
        counts: Callable[[], Sequence[int]],
    ) -> None:
        self._stage, self._group, self._index, self._counts = stage, group, index, counts
        self._indices = [each for each in stage.updated_indices if stage.code.BUFFERS[each] in names]
        self._started: list[tuple[list[int], Tensor, CollectiveWait]] = []

    def start(self) -> None:
        """Start to sum the buffers of each dtype in one piece."""
        counts = self._counts()
        share, is_first = counts[self._index] / sum(counts), not any(counts[: self._index])
        after, before = self._stage.buffers_after, self._stage.buffers_before
        terms: dict[torch.dtype, dict[int, Tensor]] = {}
        for index in self._indices:
            if index in self._stage.step_indices:
                term = _times(float(is_first and share > 0), after[index])
            else:
                is_count = self._is_count(index)
                term = after[index] - before[index] if is_count else _times(share, after[index])
            terms.setdefault(_summed_as(after[index].dtype), {})[index] = term
        for dtype, own in terms.items():
            flat = torch.cat([term.to(dtype).reshape(-1) for term in own.values()])
            self._started.append(([*own], flat, self._group.all_reduce(flat)))

    def finish(self) -> None:
        agreed: dict[int, Tensor] = {}
        for indices, flat, wait in self._started:
            wait()
            all_before = [self._stage.buffers_before[index] for index in indices]
            sums = flat.split([each.numel() for each in all_before])
            for index, before, total in zip(indices, all_before, sums, strict=True):
                total = total.view(before.shape)
                agreed[index] = (before + total if self._is_count(index) else total).to(before.dtype)
        self._stage.update_buffers([agreed.get(index) for index in self._stage.updated_indices])
        self._started = []

    def _is_count(self, index: int) -> bool:
        """Whether the changes of all replicas are added up."""
        before = self._stage.buffers_before[index]
        is_number = not before.is_floating_point() and before.dtype is not torch.bool
        return is_number and index not in self._stage.step_indices


def _times(share: float, buffer: Tensor) -> Tensor:
    """``share * buffer``, but zero for a share of zero even if the buffer holds infinities. Flags stay."""
    if share in (0.0, 1.0):
        return buffer if share else torch.zeros_like(buffer)
    return buffer if buffer.dtype is torch.bool else buffer * share


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if dtype is torch.bool else dtype
