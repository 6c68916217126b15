"""Computes once a step what stages need of the whole mini-batch, such as how many labels count."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Plan, Sizes, Stage
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.stages.bound_stage import parameter_names
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.step_results import empty_result


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
        names = parameter_names(self.code.batch_counts)
        known |= {name: inputs[name].to(self.device) for name in names if name in inputs}
        with torch.no_grad():
            made = self.code.batch_counts(*(known[name] for name in names))
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
    whole = {given.value.name: leaves[given.position] for given in plan.inputs}
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


def local_batch_counts(
    functions: Sequence[BatchCountsFunction],
    plan: Plan,
    leaves: Sequence[Any],
    microbatches: Sequence[Mapping[str, Tensor]],
    batch_slice: BatchSlice,
    group_of: Callable[[int], CollectiveGroup],
) -> dict[str, Tensor]:
    """As ``batch_counts``, summed over replicas that each have a part of the batch.

    ``group_of`` gives the replicas of a stage. Sums are taken in their order: they have the same bits on all.
    """
    own = [microbatch for microbatch in batch_slice.own_microbatches if batch_slice.sizes[microbatch]]
    parts, sizes = [microbatches[each] for each in own], [batch_slice.sizes[each] for each in own]
    part = replace(batch_slice, sizes=sizes, batch=sum(sizes))
    found: dict[str, Tensor] = {}
    for function in functions:
        made = batch_counts([function], plan, leaves, parts, part) if own else {}
        for value in function.stage.batch_count_sums:
            term = (
                made[value.name]
                if own
                else torch.zeros_like(empty_result(value, batch_slice.values, function.device))
            )
            found[value.name] = _sum(term, group_of(function.stage.index))
    return found


def _sum(term: Tensor, group: CollectiveGroup) -> Tensor:
    terms = term.new_empty(group.size, *term.shape)
    group.all_gather(terms.view(-1), term.contiguous().view(-1))()
    return functools.reduce(torch.add, terms.unbind())


@functools.lru_cache(maxsize=64)
def batch_fraction(size: int, batch: int) -> Tensor:
    """The rows of a microbatch as a fraction of the batch's."""
    return torch.tensor(size / batch, dtype=torch.float64)
