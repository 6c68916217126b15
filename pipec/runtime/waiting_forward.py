"""A forward that waits for the backward of a loss that the script computes of its outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import TrainedOutput
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.rank_state import SuspendedStep
from pipec.torch_compat.run_time import is_differentiated

Begun = Sequence[tuple[Execution, Sequence[SuspendedStep]]]
"""For each group of microbatches, what runs it, and for each rank what its backwards need."""


class WaitingForward:
    """A forward, until its backward. What the backward needs is freed with it, or as it is used.

    Args:
        number: counts the forwards of the pipeline.
        begun: the forwards that have run.
        read: the tensors that the backward reads again, by what they are.
        run_backward: runs the backward.
    """

    def __init__(
        self,
        number: int,
        begun: Begun,
        read: Mapping[str, Tensor],
        run_backward: Callable[["WaitingForward", Mapping[str, Tensor | None]], None],
    ) -> None:
        self.number, self._begun, self.run_backward = number, begun, run_backward
        self.trained: Sequence[TrainedOutput] = begun[0][0].artifact.plan.trained_outputs
        """The outputs that a backward starts from."""
        self.readers = begun[0][0].result_ranks
        """The ranks that have the values of the outputs."""
        self._read = [(name, tensor, tensor.detach(), _version(tensor)) for name, tensor in read.items()]

    @property
    def artifacts(self) -> Sequence[Artifact]:
        """What has run the forwards, until the backward is run."""
        return [execution.artifact for execution, _ in self._begun]

    def obstacle(self) -> str:
        """Why no backward can run; empty if one can."""
        if not self._begun:
            return (
                "backward() was called again on outputs of one call, whose saved values were freed the first "
                "time: call it once, on the sum of the losses, or call the module again. retain_graph=True "
                "does not keep them"
            )
        for name, tensor, before, version in self._read:
            if _version(tensor) != version or tensor.data_ptr() != before.data_ptr():
                return (
                    f"{name} was changed between the call of the module and the backward of its outputs, "
                    "which reads it again: call optimizer.step() after the backward, change a clone of what "
                    "is passed, and give back the .data that was there"
                )
        return ""

    def take(self) -> Begun:
        """The forwards that have run, once."""
        begun, self._begun = self._begun, ()
        self._read.clear()
        return begun

    def untrained(self, gradients: Mapping[str, Tensor | None]) -> Iterator[str]:
        """The parameters that are trained, but get no gradient if some outputs have none."""
        trained = dict.fromkeys(fqn for each in self.trained for fqn in each.parameters)
        used = (each for each in self.trained if gradients[each.gradient] is not None)
        reached = {fqn for each in used for fqn in each.parameters}
        yield from (fqn for fqn in trained if fqn not in reached)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class OutputsOf(torch.autograd.Function):
    """Outputs whose backward runs that of the pipeline.

    Their graph begins with ``anchor``, which stands for all parameters, and with those that are ``trained``
    here, by which a backward of some of them alone is noticed.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, waiting: WaitingForward, num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.anchor, ctx.waiting, ctx.num_inputs = anchor, waiting, 3 + len(tensors)
        ctx.set_materialize_grads(False)
        return tensors[:num_outputs]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        refuse_partial_backward(ctx.anchor)
        names = [each.gradient for each in ctx.waiting.trained]
        ctx.waiting.run_backward(ctx.waiting, dict(zip(names, gradients, strict=True)))
        return tuple([None] * ctx.num_inputs)


def refuse_partial_backward(anchor: Tensor) -> None:
    """Raise InputError in a backward that is not one of all parameters, for which ``anchor`` stands."""
    if torch.is_grad_enabled():
        raise InputError(
            "backward(create_graph=True) cannot differentiate the gradients of a pipeline; compute what "
            "needs gradients of gradients with the model itself"
        )
    if not is_differentiated(anchor):
        raise InputError(
            "torch.autograd.grad(...) and backward(inputs=...) compute the gradients of some tensors alone, "
            "but a pipeline computes those of all its parameters: call loss.backward(), and freeze with "
            "requires_grad_(False) what is not trained"
        )
