"""What the stages must know of the whole mini-batch, such as how many labels count: computed once a step."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Plan, Sizes, Stage
from pipec.runtime.messages.group import Group
from pipec.runtime.stages.stage import parameter_names
from pipec.runtime.step.results import empty_like
from pipec.runtime.step.span import Span


@dataclass(frozen=True)
class OfBatch:
    """The function ``of_batch`` of a stage's code, if it has one, with the buffers that it reads."""

    stage: Stage
    code: Any
    buffers: Mapping[str, Tensor]
    device: torch.device

    @functools.cached_property
    def inputs(self) -> frozenset[str]:
        """The names of what the function takes, inputs of the model among them."""
        return frozenset(parameter_names(self.code.of_batch)) if self.stage.of_batch else frozenset()

    def values(self, inputs: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """By name, the values of ``inputs``, in which ``b`` rows and the variables have these ``sizes``."""
        if not self.stage.of_batch:
            return {}
        known: dict[str, Any] = {
            **sizes,
            "device": self.device,
            "buffers": [self.buffers[fqn] for fqn in self.code.BUFFERS],
        }
        names = parameter_names(self.code.of_batch)
        known |= {name: inputs[name].to(self.device) for name in names if name in inputs}
        with torch.no_grad():
            made = self.code.of_batch(*(known[name] for name in names))
        return dict(zip(self.stage.of_batch, made, strict=True))


def values_of_batch(
    functions: Sequence[OfBatch],
    plan: Plan,
    leaves: Sequence[Any],
    microbatches: Sequence[Mapping[str, Tensor]],
    span: Span,
) -> dict[str, Tensor]:
    """By name, what the stages of this process need of the batch ``leaves``, of which ``span`` is run.

    Code for microbatches of one size cannot take the batch. Its values are sums, and added up.
    """
    found: dict[str, Tensor] = {}
    whole = {given.value.name: leaves[given.position] for given in plan.inputs}
    for function in functions:
        if plan.dynamic_batch:
            found |= function.values(whole, {**span.values, "b": span.batch})
        else:
            parts = [
                function.values(each, {**span.values, "b": size})
                for each, size in zip(microbatches, span.sizes, strict=True)
            ]
            found |= {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return found


def values_of_local_batch(
    functions: Sequence[OfBatch],
    plan: Plan,
    leaves: Sequence[Any],
    microbatches: Sequence[Mapping[str, Tensor]],
    span: Span,
    group_of: Callable[[int], Group],
) -> dict[str, Tensor]:
    """As ``values_of_batch``, of a batch of which each replica has a part: the sums over its replicas.

    ``group_of`` gives the replicas of a stage. Sums are taken in their order: they have the same bits on all.
    """
    own = [microbatch for microbatch in span.own if span.sizes[microbatch]]
    parts, sizes = [microbatches[each] for each in own], [span.sizes[each] for each in own]
    part = replace(span, sizes=sizes, batch=sum(sizes))
    found: dict[str, Tensor] = {}
    for function in functions:
        made = values_of_batch([function], plan, leaves, parts, part) if own else {}
        for value in function.stage.of_batch_sums:
            term = (
                made[value.name] if own else torch.zeros_like(empty_like(value, span.values, function.device))
            )
            found[value.name] = _sum(term, group_of(function.stage.index))
    return found


def _sum(term: Tensor, group: Group) -> Tensor:
    terms = term.new_empty(group.size, *term.shape)
    group.all_gather(terms.view(-1), term.contiguous().view(-1))()
    return functools.reduce(torch.add, terms.unbind())


@functools.lru_cache(maxsize=64)
def share_of(size: int, batch: int) -> Tensor:
    """The rows of a microbatch as a share of those of the batch."""
    return torch.tensor(size / batch, dtype=torch.float64)
