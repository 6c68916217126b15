"""What the norm decides of a step of which nothing may come, because something in it is not finite."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipec.ir import OnNan
from pipec.runtime.messages.group import Group
from pipec.runtime.optimizers import norms_of
from pipec.runtime.step.finite import NotFinite, found_together, is_overflow
from pipec.runtime.step.rank import Rank
from pipec.runtime.step.results import Results
from pipec.runtime.step.updates import StageUpdate


class Verdict:
    """Decides for a rank as all others of ``group`` do, all of whom call ``follow`` with the same sums."""

    def __init__(self, rank: Rank, group: Group, device: torch.device) -> None:
        self._rank, self._group, self._device = rank, group, device

    def num_nan_losses(self) -> Tensor | int:
        losses = list(self._losses().values())
        return torch.stack(losses).isnan().sum() if losses else 0

    def follow(self, squares: float, num_nan_losses: float) -> None:
        """Let something come of the step, or nothing: no update, no gradient in ``.grad``, no buffer."""
        rank, updating = self._rank, self._rank.updating
        updates = updating.updates
        found = None
        if num_nan_losses or not math.isfinite(squares):  # which is so of very large gradients, too
            found = self._found()
        if updates is None:
            updating.not_finite = found
            for stage in rank.stages.values() if found is None else ():
                stage.gradients.release()
            return
        if updating.now:
            found = updates.spoiled.pop(rank.number, None) or found
        updating.not_finite = found
        if found is None:
            return
        ending = rank.plan.ending
        if not updating.now and (ending.on_nan is OnNan.SKIP or is_overflow(found, ending)):
            updates.spoiled[rank.number] = found
            return
        updating.now = False
        for update in _updates_of(rank):
            update.drop_gradients()

    def _found(self) -> NotFinite | None:
        gradients = {name: x for named in _gradients_on(self._rank) for name, x in named.items()}
        plan, number = self._rank.plan, self._rank.number
        order = order_of_parameters(self._rank)
        return found_together(plan, number, self._losses(), gradients, order, self._group, self._device)

    def _losses(self) -> Mapping[int, Tensor]:
        results = self._rank.results
        assert isinstance(results, Results), "a stream has no norm of all stages"
        return results.losses


def order_of_parameters(rank: Rank) -> Sequence[str]:
    """The parameters whose gradients are looked at, in the model's order."""
    updates, plan = rank.updating.updates, rank.plan
    return [*updates.shapes] if updates else [value.name for value in plan.parameters]


def norms_on(rank: Rank) -> dict[str, Tensor]:
    """The norms of the gradients that a rank counts in the global norm, by name."""
    counted = {name: x for gradients in _gradients_on(rank) for name, x in gradients.items()}
    return dict(zip(counted, norms_of(counted.values(), exactly=rank.plan.ending.clips), strict=True))


def _gradients_on(rank: Rank) -> Iterator[dict[str, Tensor]]:
    """The gradients that a rank counts in the global norm, by name, for each of its stages."""
    if rank.updating.updates is not None:
        yield from (update.counted for update in _updates_of(rank))
        return
    for number, stage in rank.stages.items():
        if rank.number == rank.plan.placement[number][0]:
            yield {stage.code.PARAMETERS[index]: total for index, total in stage.gradients.waiting.items()}


def _updates_of(rank: Rank) -> list[StageUpdate]:
    updates = rank.updating.updates
    assert updates is not None
    return [update for stage in rank.stages if (update := updates.on(rank.number, stage))]
