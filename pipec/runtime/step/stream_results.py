"""Collects the results of a stream's microbatches, and merges those of each finished mini-batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from pipec.ir import Plan
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import StepResults


@dataclass(frozen=True)
class StreamBatch:
    """One mini-batch of a stream, split: the inputs of each microbatch by name, and their sizes."""

    microbatches: Sequence[Mapping[str, Tensor]]
    batch_slice: BatchSlice


class BatchResult(NamedTuple):
    """The loss and the logs of a mini-batch that has been trained on."""

    loss: Tensor
    logs: Mapping[str, Tensor]

    @classmethod
    def of(cls, plan: Plan, results: Mapping[str, Tensor]) -> Self:
        """Those among the results of a step, by name."""
        kept = zip(plan.log_names, plan.outputs[1:], strict=False)
        return cls(results["loss"], {name: results[output] for name, output in kept})


class StreamResults:
    """Collects the results that a rank makes or receives, and merges those of each finished mini-batch.

    ``emit`` is called with the number of each mini-batch and its results by name. ``microbatch`` is that of
    the instruction that runs. ``first_nan`` is the first microbatch whose loss is NaN, if the plan looks for
    that.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.begin(lambda number, results: None)

    def begin(self, emit: Callable[[int, Mapping[str, Tensor]], None]) -> None:
        """Start with a stream."""
        self._emit = emit
        self._batches: dict[int, StepResults] = {}
        self.microbatch = 0
        self.first_nan: float = math.inf

    def forget(self) -> None:
        """Drop the results of a stream that is over."""
        self._emit = lambda number, results: None
        self._batches = {}

    @property
    def num_finite(self) -> float:
        """The number of the first mini-batch that is skipped, as are all behind it."""
        return math.inf if math.isinf(self.first_nan) else self.first_nan // self._plan.num_microbatches

    def expect(self, number: int, batch: StreamBatch) -> None:
        """Note that a mini-batch will follow."""
        self._batches[number] = StepResults(self._plan, self._rank)
        self._batches[number].batch_slice = batch.batch_slice

    def collect(self, frame: int, sent: dict[str, Tensor]) -> None:
        """Keep the results of the microbatch that is in this frame now."""
        number, place = divmod(self.microbatch, self._plan.num_microbatches)
        if self._plan.sync_spec.on_nan is not None and "loss" in sent and sent["loss"].isnan().any():
            self.first_nan = min(self.first_nan, self.microbatch)
        results = self._batches.get(number)
        if results is None:
            return
        results.collect(place, sent)
        num_with_rows = sum(size > 0 for size in results.batch_slice.sizes)
        if all(len(parts) == num_with_rows for parts in results.parts.values()):
            del self._batches[number]
            self._emit(number, {name: results.merged(name) for name in results.parts})
