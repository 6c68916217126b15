"""Computes once a step what stages need of the whole mini-batch, such as how many labels count."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Plan, Sizes, Stage
from pipec.runtime.messages.cuda import on_device
from pipec.runtime.stages.bound_stage import parameter_names
from pipec.runtime.step.batch_slice import BatchSlice


@dataclass(frozen=True)
class BatchCountsFunction:
    """The function ``batch_counts`` of a stage's code, with the buffers that it reads."""

    stage: Stage
    code: Any
    buffers: Mapping[str, Tensor]
    device: torch.device

    @functools.cached_property
    def inputs(self) -> frozenset[str]:
        """The names of what the function takes, inputs of the model among them."""
        return frozenset(parameter_names(self.code.batch_counts))

    def values(self, inputs: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """By name, the values of ``inputs``, in which ``b`` rows and the variables have these ``sizes``."""
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
    whole: Mapping[str, Tensor],
    microbatches: Sequence[Mapping[str, Tensor]],
    batch_slice: BatchSlice,
) -> dict[str, Tensor]:
    """The batch counts that the stages of this process need, by name, for the inputs of a ``whole`` batch.

    Code for microbatches of one size cannot take the whole batch; its values are sums over microbatches.
    """
    found: dict[str, Tensor] = {}
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


@functools.lru_cache(maxsize=64)
def batch_fraction(size: int, batch: int) -> Tensor:
    """The rows of a microbatch as a fraction of the batch's."""
    return torch.tensor(size / batch, dtype=torch.float64)
