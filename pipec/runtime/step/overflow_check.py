"""Decides from the norm whether a step is skipped because a value in it is not finite."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipec.ir import NonFiniteAction
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import gradient_norms
from pipec.runtime.step.non_finite import NonFinite, agree_on_non_finite, is_overflow
from pipec.runtime.step.optimizer_updates import StageUpdate
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.step_results import StepResults


class OverflowCheck:
    """Decides for a rank as all others of ``group`` do, all of whom call ``follow`` with the same sums."""

    def __init__(self, rank: RankState, group: CollectiveGroup, device: torch.device) -> None:
        self._rank, self._group, self._device = rank, group, device

    def num_nan_losses(self) -> Tensor | int:
        losses = list(self._losses().values())
        return torch.stack(losses).isnan().sum() if losses else 0

    def follow(self, squares: float, num_nan_losses: float) -> None:
        """Keep the step or skip it: no update, no gradient in ``.grad``, no buffer."""
        rank, update_state = self._rank, self._rank.update_state
        updates = update_state.updates
        found = None
        if num_nan_losses or not math.isfinite(squares):  # which is so of very large gradients, too
            found = self._found()
        if updates is None:
            update_state.non_finite = found
            for stage in rank.stages.values() if found is None else ():
                stage.gradients.release()
            return
        if update_state.now:
            found = updates.skip_reasons.pop(rank.number, None) or found
        update_state.non_finite = found
        if found is None:
            return
        sync_spec = rank.plan.sync_spec
        if not update_state.now and (
            sync_spec.on_nan is NonFiniteAction.SKIP or is_overflow(found, sync_spec)
        ):
            updates.skip_reasons[rank.number] = found
            return
        update_state.now = False
        for update in _updates_of(rank):
            update.drop_gradients()

    def _found(self) -> NonFinite | None:
        gradients = {name: x for named in _gradients_on(self._rank) for name, x in named.items()}
        plan, number = self._rank.plan, self._rank.number
        order = parameter_order(self._rank)
        return agree_on_non_finite(plan, number, self._losses(), gradients, order, self._group, self._device)

    def _losses(self) -> Mapping[int, Tensor]:
        results = self._rank.results
        assert isinstance(results, StepResults), "a stream has no norm of all stages"
        return results.losses


def parameter_order(rank: RankState) -> Sequence[str]:
    """The parameters whose gradients are looked at, in the model's order."""
    updates, plan = rank.update_state.updates, rank.plan
    return [*updates.shapes] if updates else [value.name for value in plan.parameters]


def norms_of_rank(rank: RankState) -> dict[str, Tensor]:
    """The norms of the gradients that a rank counts in the global norm, by name."""
    counted = {name: x for gradients in _gradients_on(rank) for name, x in gradients.items()}
    return dict(
        zip(counted, gradient_norms(counted.values(), exactly=rank.plan.sync_spec.clips), strict=True)
    )


def _gradients_on(rank: RankState) -> Iterator[dict[str, Tensor]]:
    """The gradients that a rank counts in the global norm, by name, for each of its stages."""
    if rank.update_state.updates is not None:
        yield from (update.norm_gradients for update in _updates_of(rank))
        return
    for number, stage in rank.stages.items():
        if rank.number == rank.plan.placement[number][0]:
            yield {stage.code.PARAMETERS[index]: total for index, total in stage.gradients.unreleased.items()}


def _updates_of(rank: RankState) -> list[StageUpdate]:
    updates = rank.update_state.updates
    assert updates is not None
    return [update for stage in rank.stages if (update := updates.on(rank.number, stage))]
