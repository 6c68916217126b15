"""Whether a step's losses and gradients are finite: checked together, with one result on all ranks.

The collective that sums the norm of all gradients also tells all ranks what each has found, so that all
decide alike whether a step is skipped. Its table has a float64 for each parameter and microbatch: the squared
norm of a gradient, with a minus sign if the gradient is not finite, and whether a loss is NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.errors import NonFiniteError
from pipec.ir import Payload, Plan, SyncSpec, rank_of
from pipec.runtime.optimizers import gradient_norms, stored_values


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


def norm_table(
    plan: Plan,
    names: Sequence[str],
    gradients: Mapping[str, Tensor],
    losses: Mapping[int, Tensor],
    device: torch.device,
) -> Tensor:
    """What a rank adds to the table of the parameters ``names`` and of all microbatches."""
    checks = plan.sync_spec.may_skip_step
    size = len(names) + (plan.num_microbatches if checks else 0)
    table = torch.zeros(size, dtype=torch.float64, device=device)
    found = gradient_norms(gradients.values(), exactly=plan.sync_spec.clips)
    found = [norm.to(device) for norm in found]  # of gradients in host memory
    norms = dict(zip(gradients, found, strict=True))
    if norms:
        none = torch.zeros((), dtype=torch.float64, device=device)
        table[: len(names)] = torch.stack([norms.get(name, none) for name in names]).square_()
    if checks and losses:
        places = [len(names) + microbatch for microbatch in losses]
        table[places] = torch.stack(list(losses.values())).isnan().double()
    if checks and norms and not bool(torch.stack(found).isfinite().all()):  # maybe of very large gradients
        for name in non_finite(gradients):
            table[names.index(name)].neg_()
    return table


def found_in(plan: Plan, names: Sequence[str], table: Tensor) -> NonFinite | None:
    """The non-finite value that some rank has found; None if all is finite.

    A loss comes before gradients. Of these it is the last one in the model's order, which backwards came to
    first.
    """
    values = table.tolist()
    squares, losses = values[: len(names)], values[len(names) :]
    if any(losses):
        stage, microbatch = stage_of_loss(plan), next(k for k, is_nan in enumerate(losses) if is_nan)
        return NonFinite(rank_of(plan.placement, stage, microbatch), stage, microbatch)
    bad = [name for name, square in zip(names, squares, strict=True) if not square >= 0]
    if not bad:
        return None
    name = bad[-1]
    own = (s.index for s in plan.stages if name in s.parameters and name not in s.borrowed_parameters)
    stage = next(own, 0)
    return NonFinite(plan.placement[stage][0], stage, parameter=name)


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
