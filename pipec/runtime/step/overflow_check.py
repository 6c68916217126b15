"""Decides from the norm of all gradients whether a step is skipped because a value in it is not finite.

The collective that sums the norm also tells all ranks what each has found, so that all decide alike. Its
table has a float64 for each parameter and microbatch: the squared norm of a gradient, with a minus sign if
the gradient is not finite, and whether a loss is NaN.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipec.ir import NonFiniteAction, StepPart, rank_of
from pipec.runtime.optimizers import StageOptimizer, gradient_norms
from pipec.runtime.step.non_finite import NonFinite, is_overflow, non_finite, stage_of_loss
from pipec.runtime.step.rank_state import RankState


def norm_table(rank: RankState) -> Tensor:
    """What a rank adds to the table of all ranks."""
    names, plan = parameter_order(rank), rank.plan
    size = len(names) + (plan.num_microbatches if plan.sync_spec.may_skip_step else 0)
    table = torch.zeros(size, dtype=torch.float64, device=rank.device)
    gradients = {name: x for of_stage in _gradients_on(rank) for name, x in of_stage.items()}
    found = gradient_norms(gradients.values(), exactly=plan.sync_spec.clips)
    norms = dict(zip(gradients, found, strict=True))
    if norms:
        none = torch.zeros((), dtype=torch.float64, device=rank.device)
        table[: len(names)] = torch.stack([norms.get(name, none) for name in names]).square_()
    if plan.sync_spec.may_skip_step:
        losses = rank.step_results.losses
        if losses:
            places = [len(names) + microbatch for microbatch in losses]
            table[places] = torch.stack(list(losses.values())).isnan().double()
        if norms and not bool(torch.stack(found).isfinite().all()):  # which may be so of very large gradients
            for name in non_finite(gradients):
                table[names.index(name)].neg_()
    return table


def follow_table(rank: RankState) -> None:
    """Keep the step or skip it: no update, no gradient in ``.grad``, no buffer."""
    assert rank.table is not None, "the norm comes first"
    updates, found = rank.updates, _found_in(rank, rank.table)
    if updates is None:
        rank.non_finite = found
        for stage in rank.stages.values() if found is None else ():
            stage.gradients.release()
        return
    accumulates = rank.part is StepPart.ACCUMULATE
    if not accumulates:
        found = updates.skip_reasons.pop(rank.number, None) or found
    rank.non_finite = found
    if found is None:
        return
    sync_spec = rank.plan.sync_spec
    if accumulates and (sync_spec.on_nan is NonFiniteAction.SKIP or is_overflow(found, sync_spec)):
        updates.skip_reasons[rank.number] = found
        return
    for update in _updates_of(rank):
        update.drop_gradients()


def _found_in(rank: RankState, table: Tensor) -> NonFinite | None:
    """The non-finite value that some rank has found; None if all is finite.

    A loss comes before gradients. Of these it is the last one in the model's order, which backwards came to
    first.
    """
    plan, names, values = rank.plan, parameter_order(rank), table.tolist()
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


def parameter_order(rank: RankState) -> Sequence[str]:
    """The parameters whose gradients are checked, in the model's order."""
    updates, plan = rank.updates, rank.plan
    return [*updates.shapes] if updates else [value.name for value in plan.parameters]


def _gradients_on(rank: RankState) -> Iterator[Mapping[str, Tensor]]:
    """The gradients that a rank counts in the global norm, by name, for each of its stages."""
    if rank.updates is not None:
        yield from (update.norm_gradients for update in _updates_of(rank))
        return
    for number, stage in rank.stages.items():
        if rank.number == rank.plan.placement[number][0]:
            yield {stage.code.PARAMETERS[index]: total for index, total in stage.gradients.unreleased.items()}


def _updates_of(rank: RankState) -> list[StageOptimizer]:
    updates = rank.updates
    assert updates is not None
    return [update for stage in rank.stages if (update := updates.on(rank.number, stage))]
