"""Whether a step's losses and gradients are finite: checked together, with one result on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.errors import NonFiniteError
from pipec.ir import Payload, Plan, SyncSpec
from pipec.runtime.optimizers import stored_values


@dataclass(frozen=True)
class NonFinite:
    """A loss that is NaN, of a ``microbatch``, or a gradient that is not finite, of ``parameter``."""

    rank: int
    stage: int
    microbatch: int = -1
    parameter: str = ""

    def __str__(self) -> str:
        where = f"rank {self.rank}, stage {self.stage}"
        if self.microbatch >= 0:
            return f"the loss of microbatch {self.microbatch} is NaN ({where})"
        return f"the gradient of {self.parameter}, the last such one, is not finite ({where})"


def non_finite_message(found: NonFinite, number: int, sync_spec: SyncSpec) -> str:
    """The error's message for step ``number``."""
    kept = "no update, and gradients since the last one are dropped"
    if sync_spec.stream:
        kept = "all stages have made the updates of those before it, and none of it or those behind it"
    elif not sync_spec.updates:
        kept = ".grad is as before"
    return (
        f"step {number} (the first is 0): {found}. Nothing came of that step: {kept}; buffers are as before. "
        "See its batch and the learning rate, or go on with the next batch"
    )


def skip_notice(found: NonFinite, number: int, sync_spec: SyncSpec) -> str:
    """The message for the first step that is skipped."""
    why = ", as on_nan='skip' asks"
    if is_overflow(found, sync_spec):
        usual = ", which is usual in the first steps with precision='fp16-mixed'" if found.parameter else ""
        why = f", and the loss scale is halved{usual}"
    return (
        f"step {number} (the first is 0): {found}; nothing came of that step{why}. "
        "pipe.num_skipped counts such steps"
    )


def is_overflow(found: NonFinite, sync_spec: SyncSpec) -> bool:
    """Whether the loss scale alone may be to blame. Losses themselves are not scaled."""
    return sync_spec.has_loss_scale and (bool(found.parameter) or sync_spec.on_nan is None)


def non_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """The names of the gradients that have an infinity or a NaN."""
    return [name for name, gradient in gradients.items() if not _is_finite(gradient)]


def require_finite(gradients: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError if some gradient of a stage's update is not finite."""
    if names := non_finite(gradients):
        raise NonFiniteError(f"the gradient of {names[-1]}, the last such one, is not finite")


def stage_of_loss(plan: Plan) -> int:
    """The stage that makes the loss."""
    returned = (link for link in plan.links if link.payload in (Payload.RESULT, Payload.MICROBATCH_RESULT))
    return next(link.source for link in returned for value in link.values if value.name == "loss")


def _is_finite(gradient: Tensor) -> bool:
    values = stored_values(gradient)
    return bool(torch.linalg.vector_norm(values).isfinite()) or bool(values.isfinite().all())
