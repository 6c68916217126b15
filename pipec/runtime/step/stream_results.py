"""Collects the results of a stream's microbatches, and merges those of each finished mini-batch."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor

from pipec.ir import Plan
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import merge_microbatches, result_values


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


@dataclass
class _Parts:
    """The results of one mini-batch, by name and microbatch."""

    batch: StreamBatch
    found: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    @functools.cached_property
    def places(self) -> list[int]:
        """The microbatches that have rows."""
        return [place for place, size in enumerate(self.batch.batch_slice.sizes) if size]


class StreamResults:
    """Collects the results that a rank makes or receives.

    ``emit`` is called with the number of each mini-batch and its results by name. ``microbatch`` is that of
    the instruction that runs. ``first_nan`` is the first microbatch whose loss is NaN, if the plan looks for
    that.
    """

    def __init__(self, plan: Plan) -> None:
        self._values = {value.name: value for value in result_values(plan)}
        self._sums = plan.summed_outputs
        self._per_batch = plan.num_microbatches
        self._checks_losses = plan.sync_spec.on_nan is not None
        self.begin(lambda number, results: None)

    def begin(self, emit: Callable[[int, Mapping[str, Tensor]], None]) -> None:
        """Start with a stream."""
        self._emit = emit
        self._parts: dict[int, _Parts] = {}
        self.microbatch = 0
        self.first_nan: float = math.inf
        self._losses_left: dict[int, int] = {}

    def is_finite(self, number: int) -> bool:
        """Whether a mini-batch is trained on, not skipped; read before the update that it is for."""
        if self._checks_losses:
            assert self._losses_left.pop(number) == 0, "losses come before updates"
        return number < self.num_finite

    def forget(self) -> None:
        """Drop the results of a stream that is over."""
        self._emit = lambda number, results: None
        self._parts = {}

    @property
    def num_finite(self) -> float:
        """The number of the first mini-batch that is skipped, as are all behind it."""
        return self.first_nan if math.isinf(self.first_nan) else self.first_nan // self._per_batch

    def expect(self, number: int, batch: StreamBatch) -> None:
        """Note that a mini-batch will follow."""
        self._parts[number] = _Parts(batch)
        if self._checks_losses:
            self._losses_left[number] = len(self._parts[number].places)

    def collect(self, frame: int, sent: dict[str, Tensor]) -> None:
        """Keep the results of the microbatch that is in this frame now."""
        number, place = divmod(self.microbatch, self._per_batch)
        if self._checks_losses and "loss" in sent:
            self._losses_left[number] -= 1
            if sent["loss"].isnan().any():
                self.first_nan = min(self.first_nan, self.microbatch)
        for name in self._values.keys() & sent.keys():
            parts = self._parts[number].found.setdefault(name, {})
            parts[place] = sent[name]
            if self._is_complete(self._parts[number]):
                self._emit(number, self._merged(self._parts.pop(number)))

    def _is_complete(self, parts: _Parts) -> bool:
        count = len(parts.places)
        return all(len(parts.found.get(name, ())) == count for name in self._values)

    def _merged(self, parts: _Parts) -> dict[str, Tensor]:
        batch, merged = parts.batch.batch_slice, dict[str, Tensor]()
        for name, value in self._values.items():
            own = {place: parts.found[name][place] for place in parts.places}
            merged[name] = merge_microbatches(
                value, own, batch.sizes, batch.custom_loss_weights, batch.values, name in self._sums
            )
        return merged
