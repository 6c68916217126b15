"""Runs the tail of a stage: once a step, on the rows of all microbatches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.ir import Stage
from pipec.ir.text_format import evaluate_dim
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import BoundStage, Frame
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import ResultCollector, StepResults


class StageTail:
    """Collects the inputs of a stage's tail, runs it, and hands its results on.

    The rows are in the order of the batch. Replicas gather each other's and compute the same; the one with
    ``adds_gradients`` adds those of the tail's own parameters, and its results are the step's. ``own`` are
    the microbatches of this rank.
    """

    def __init__(
        self, plan: Stage, stage: BoundStage, own: Sequence[int], num_replicas: int, adds_gradients: bool
    ) -> None:
        assert plan.tail is not None
        self._tail, self._stage, self._own = plan.tail, stage, own
        self._num_replicas, self._adds_gradients = num_replicas, adds_gradients
        self.frame: Frame = {}
        """The values of the whole batch, by name."""
        self.forget_step()

    def begin_step(self, batch_slice: BatchSlice) -> None:
        self._sizes, self._first_rows = batch_slice.sizes, batch_slice.first_rows
        self._values = batch_slice.values

    def forget_step(self) -> None:
        self.frame.clear()
        self._parts: dict[str, dict[int, Tensor]] = {value.name: {} for value in self._tail.inputs}
        self._gathered: list[tuple[str, Tensor, CollectiveWait]] = []

    def collecting(self, results: ResultCollector) -> ResultCollector:
        """A collector that takes the tail's inputs out of what a forward returns."""
        return _Collector(self, results)

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        """Take the tail's inputs out of what a forward returns."""
        for name in self._parts.keys() & sent.keys():
            self._parts[name][microbatch] = sent.pop(name)

    def start_gather(self, group: CollectiveGroup) -> None:
        """Start to gather the rows of all replicas, each with as many as the one that has most."""
        most = max(map(self._rows_of, range(self._num_replicas)))
        for value in self._tail.inputs:
            shape = [evaluate_dim(dim, {**self._values, "b": most}) for dim in value.shape]
            padded = torch.zeros(shape, dtype=getattr(torch, value.dtype), device=self._stage.device)
            if own := [self._parts[value.name][each] for each in self._own if self._sizes[each]]:
                torch.cat(own, out=padded[: sum(map(len, own))])
            gathered = padded.new_empty(self._num_replicas, *shape)
            wait = group.all_gather(_bytes(gathered), _bytes(padded))
            self._gathered.append((value.name, gathered, wait))

    def finish_gather(self) -> None:
        """Wait for the rows of all replicas, and put them in the order of microbatches."""
        most = max(map(self._rows_of, range(self._num_replicas)))
        for name, gathered, wait in self._gathered:
            wait()
            for replica, rows in enumerate(gathered):
                first, per_row = 0, gathered.shape[1] // most
                for each in range(replica, len(self._sizes), self._num_replicas):
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
        if self._adds_gradients:
            self._stage.gradients.keep([*gradients])
            self._stage.gradients.accumulate()
        results.set_whole({name: returned[name] for name in self._tail.results}, self._own[0])
        for value in self._tail.gradients:
            self._divide(value.name, returned[value.name], in_order)

    def _divide(self, name: str, gradient: Tensor, in_order: Sequence[int]) -> None:
        """Put each microbatch's rows of a gradient into its frame."""
        per_row = gradient.shape[0] // sum(self._sizes)
        rows = gradient.split([self._sizes[each] * per_row for each in in_order])
        for each, own in zip(in_order, rows, strict=True):
            if each in self._own:
                self._stage.frames[each][name] = own

    def _rows_of(self, replica: int) -> int:
        return sum(self._sizes[replica :: self._num_replicas])


class _Collector:
    """Lets a tail collect its inputs, and ``results`` the rest of what forwards return."""

    def __init__(self, tail: StageTail, results: ResultCollector) -> None:
        self._tail, self._results = tail, results

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        self._tail.collect(microbatch, sent)
        self._results.collect(microbatch, sent)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, as the collectives of every backend take it."""
    return tensor.view(-1).view(torch.uint8)
