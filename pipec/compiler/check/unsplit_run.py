"""Runs the user's model and loss in eager torch: what a step must be equal to."""

import contextlib
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import TracedStep
from pipec.torch_compat import pytree
from pipec.torch_compat.module_state import replace_tensors, restore_module, silence_output


@dataclass(frozen=True)
class StepValues:
    """The loss and outputs of a step by their position among its results, and the gradients by FQN."""

    results: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class UnsplitRun:
    """The model and the loss function as the user wrote them, run on rows of the batch.

    Args:
        step: The model and its loss.
        tensors: What to use in place of parameters and buffers of ``step``, by the ``id`` of these.
        trained: By FQN, the parameters whose gradients are computed; empty for an evaluation.
    """

    def __init__(
        self, step: TracedStep, tensors: Mapping[int, Tensor], trained: Mapping[str, Tensor]
    ) -> None:
        self._step, self._tensors, self._trained = step, tensors, trained

    def run(self, calls: Sequence[ModelCall], microbatches: Sequence[int], norms: bool) -> list[StepValues]:
        """The values of all rows of each call, one call after the other; a forward may change buffers.

        With ``norms``, batch norms take their statistics of each of the ``microbatches``, as pipelines do.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(restore_module(self._step))
            stack.enter_context(_restored_generators())
            stack.enter_context(silence_output())
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(torch.set_grad_enabled(bool(self._trained)))
            if norms:
                stack.enter_context(_NormsOfMicrobatches(microbatches))
            warnings.simplefilter("ignore")
            replace_tensors(self._step, self._tensors)
            return [self._values(call) for call in calls]

    def _values(self, call: ModelCall) -> StepValues:
        self._step.batched = tuple(axis is not None for axis in call.axes)
        self._step.is_dry_run = self._step.loss_path is None  # which finds the loss
        loss, results = self._results(call)
        if not self._trained:
            return StepValues(results)
        found: Sequence[Tensor | None]
        if _has_reentrant_checkpoint(loss):
            found = self._by_backward(call)
        else:
            found = torch.autograd.grad(loss, list(self._trained.values()), allow_unused=True)
        gradients = {
            fqn: gradient.to_dense() if gradient.is_sparse else gradient
            for fqn, gradient in zip(self._trained, found, strict=True)
            if gradient is not None
        }
        return StepValues(results, gradients)

    def _results(self, call: ModelCall) -> tuple[Tensor, dict[int, Tensor]]:
        """The loss, or the first output; and by position, all results detached."""
        output, _ = self._step.forward(*call.tree)  # without the hooks of every module
        leaves = pytree.tree_leaves(output)
        return leaves[0], {k: x.detach() for k, x in enumerate(leaves) if isinstance(x, Tensor)}

    def _by_backward(self, call: ModelCall) -> list[Tensor | None]:
        """The gradients of a model that ``autograd.grad`` cannot differentiate, in leaves of their own."""
        own = [tensor.detach().requires_grad_() for tensor in self._trained.values()]
        named = zip(self._trained.values(), own, strict=True)
        replace_tensors(self._step, {id(tensor): leaf for tensor, leaf in named})
        self._results(call)[0].backward()
        return [leaf.grad for leaf in own]


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether a function of ``torch.utils.checkpoint`` with ``use_reentrant=True`` leads to a loss."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            pending += [source for source, _ in node.next_functions]
    return False


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)


class _NormsOfMicrobatches(TorchFunctionMode):
    """Lets batch norms in training mode take their statistics of each microbatch."""

    def __init__(self, microbatches: Sequence[int]) -> None:
        super().__init__()
        self._microbatches = microbatches

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        named = dict(zip(_BATCH_NORM_ARGUMENTS, args, strict=False)) | kwargs
        x, rows = named.pop("input"), sum(self._microbatches)
        if not named.get("training") or x.shape[0] % rows:
            return func(*args, **kwargs)
        parts = x.split([size * (x.shape[0] // rows) for size in self._microbatches])
        return torch.cat([F.batch_norm(part, **named) for part in parts])


_BATCH_NORM_ARGUMENTS = (
    *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
