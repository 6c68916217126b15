"""Computes once a step what stages need of the whole mini-batch, such as how many labels count."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Plan, Sizes, Stage
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.messages.cuda import on_device
from pipec.runtime.stages.bound_stage import parameter_names
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import zeros_of


@dataclass(frozen=True)
class BatchCountsFunction:
    """The function ``batch_counts`` of a stage's code, if it has one, with the buffers that it reads."""

    stage: Stage
    code: Any
    buffers: Mapping[str, Tensor]
    device: torch.device

    @functools.cached_property
    def inputs(self) -> frozenset[str]:
        """The names of what the function takes, inputs of the model among them."""
        return frozenset(parameter_names(self.code.batch_counts)) if self.stage.batch_counts else frozenset()

    def values(self, inputs: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """By name, the values of ``inputs``, in which ``b`` rows and the variables have these ``sizes``."""
        if not self.stage.batch_counts:
            return {}
        known: dict[str, Any] = {
            **sizes,
            "device": self.device,
            "buffers": [self.buffers[fqn] for fqn in self.code.BUFFERS],
        }
        known |= {name: on_device(inputs[name], self.device) for name in self.inputs if name in inputs}
        with torch.no_grad():
            made = self.code.batch_counts(**{name: known[name] for name in self.inputs})
        return dict(zip(self.stage.batch_counts, made, strict=True))


def batch_counts(
    functions: Sequence[BatchCountsFunction],
    plan: Plan,
    leaves: Sequence[Any],
    microbatches: Sequence[Mapping[str, Tensor]],
    batch_slice: BatchSlice,
) -> dict[str, Tensor]:
    """The batch counts that the stages of this process need, by name, for a batch with these ``leaves``.

    Code for microbatches of one size cannot take the whole batch; its values are sums over microbatches.
    """
    found: dict[str, Tensor] = {}
    whole = {leaf.value.name: leaves[leaf.position] for leaf in plan.inputs}
    for function in functions:
        if plan.dynamic_batch:
            found |= function.values(whole, {**batch_slice.values, "b": batch_slice.batch})
        else:
            parts = [
                function.values(each, {**batch_slice.values, "b": size})
                for each, size in zip(microbatches, batch_slice.sizes, strict=True)
                if size
            ]
            found |= {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return found


class ReplicaCounts:
    """The counts of a stage over the microbatches of a replica, summed over all replicas.

    Sums are taken in the order of the replicas: they have the same bits on all.
    """

    def __init__(self, function: BatchCountsFunction, own_microbatches: Sequence[int]) -> None:
        self._function, self._own = function, own_microbatches
        self._microbatches: Sequence[Mapping[str, Tensor]] = ()
        self._batch_slice: BatchSlice | None = None
        self._gathered: list[tuple[str, Tensor, CollectiveWait]] = []

    @property
    def inputs(self) -> frozenset[str]:
        return self._function.inputs

    def begin_step(self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice) -> None:
        self._microbatches, self._batch_slice, self._gathered = microbatches, batch_slice, []

    def start(self, group: CollectiveGroup) -> None:
        """Count in the microbatches of this replica, and start to gather what all have counted."""
        assert self._batch_slice is not None, "the step has begun"
        sizes, values, function = self._batch_slice.sizes, self._batch_slice.values, self._function
        parts = [
            function.values(self._microbatches[each], {**values, "b": sizes[each]})
            for each in self._own
            if sizes[each]
        ]
        for value in function.stage.batch_count_sums:
            none = zeros_of(value, {**values, "b": 0}, function.device)
            term = functools.reduce(torch.add, [part[value.name] for part in parts]) if parts else none
            terms = term.new_empty(group.size, *term.shape)
            wait = group.all_gather(terms.view(-1), term.contiguous().view(-1))
            self._gathered.append((value.name, terms, wait))

    def finish(self) -> dict[str, Tensor]:
        """Wait for the counts of all replicas; returns the sums by name."""
        gathered, self._gathered, self._microbatches = self._gathered, [], ()
        for _, _, wait in gathered:
            wait()
        return {name: functools.reduce(torch.add, terms.unbind()) for name, terms, _ in gathered}


@functools.lru_cache(maxsize=64)
def batch_fraction(size: int, batch: int) -> Tensor:
    """The rows of a microbatch as a fraction of the batch's."""
    return torch.tensor(size / batch, dtype=torch.float64)
