"""Runs the tail of a stage: once a step, on the rows of all microbatches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.ir import Stage
from pipec.ir.text_format import evaluate_dim
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import BoundStage, Frame
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import StepResults


class StageTail:
    """Collects the inputs of a stage's tail, runs it, and hands its results on.

    The rows are in the order of the batch. The ``replicas`` of the stage gather each other's and compute the
    same; the first one adds the gradients of the tail's own parameters.
    """

    def __init__(self, plan: Stage, stage: BoundStage, replicas: Sequence[int], rank: int) -> None:
        assert plan.tail is not None
        self._tail, self._stage = plan.tail, stage
        self._num_replicas, self._index = len(replicas), replicas.index(rank)
        self.frame: Frame = {}
        """The values of the whole batch, by name."""
        self.forget_step()

    def begin_step(self, batch_slice: BatchSlice) -> Frame:
        """Begin a step; returns the frame, which is still empty."""
        self._sizes, self._first_rows = batch_slice.sizes, batch_slice.first_rows
        self._names = batch_slice.joined_names(0)
        return self.frame

    def forget_step(self) -> None:
        self.frame.clear()
        self._parts: dict[str, dict[int, Tensor]] = {value.name: {} for value in self._tail.inputs}
        self._gathered: list[tuple[str, Tensor, CollectiveWait]] = []

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        """Take the tail's inputs out of what a forward returns."""
        for name in self._parts.keys() & sent.keys():
            self._parts[name][microbatch] = sent.pop(name)

    def start_gather(self, group: CollectiveGroup) -> None:
        """Start to gather the rows of all replicas, each with as many as the one that has most."""
        most = self._most_rows()
        for value in self._tail.inputs:
            shape = [evaluate_dim(dim, {**self._names, "b": most}) for dim in value.shape]
            padded = torch.zeros(shape, dtype=getattr(torch, value.dtype), device=self._stage.device)
            own = [self._parts[value.name][each] for each in self._of(self._index) if self._sizes[each]]
            if own:
                torch.cat(own, out=padded[: sum(map(len, own))])
            gathered = padded.new_empty(self._num_replicas, *shape)
            wait = group.all_gather(_bytes(gathered), _bytes(padded))
            self._gathered.append((value.name, gathered, wait))

    def finish_gather(self) -> None:
        """Wait for the rows of all replicas, and put them in the order of microbatches."""
        most = self._most_rows()
        for name, gathered, wait in self._gathered:
            wait()
            for replica, rows in enumerate(gathered):
                first, per_row = 0, gathered.shape[1] // most
                for each in self._of(replica):
                    last = first + self._sizes[each] * per_row
                    self._parts[name][each] = rows[first:last]
                    first = last
        self._gathered.clear()

    def run(self, results: StepResults) -> None:
        """Run the tail. Each backward of this rank finds its rows of the gradients in its frame."""
        in_order = sorted(
            (each for each, size in enumerate(self._sizes) if size), key=self._first_rows.__getitem__
        )
        for name, parts in self._parts.items():
            self.frame[name] = torch.cat([parts.pop(each) for each in in_order])
        self.frame.update(w=self._stage.weights, buffers=self._stage.buffers)
        returned, updates, gradients = self._stage.code.tail(self.frame)
        self._stage.update_buffers(updates)
        if self._index == 0:
            self._stage.gradients.kept = [*gradients]
            self._stage.gradients.accumulate()
        results.set_whole({name: returned[name] for name in self._tail.results}, self._index)
        for value in self._tail.gradients:
            self._divide(value.name, returned[value.name], in_order)

    def _divide(self, name: str, gradient: Tensor, in_order: Sequence[int]) -> None:
        """Put each microbatch's rows of a gradient into its frame."""
        per_row = gradient.shape[0] // sum(self._sizes)
        rows = gradient.split([self._sizes[each] * per_row for each in in_order])
        for each, own in zip(in_order, rows, strict=True):
            if each in self._of(self._index):
                self._stage.frames[each][name] = own

    def _of(self, replica: int) -> range:
        """The microbatches of a replica."""
        return range(replica, len(self._sizes), self._num_replicas)

    def _most_rows(self) -> int:
        return max(sum(self._sizes[each :: self._num_replicas]) for each in range(self._num_replicas))


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, as the collectives of every backend take it."""
    return tensor.view(-1).view(torch.uint8)
