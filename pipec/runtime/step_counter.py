"""How many steps there were, of how many nothing came, and the scale of the loss that follows from that."""

from typing import Any

from pipec.console import log
from pipec.errors import NonFiniteError
from pipec.ir import NonFiniteAction
from pipec.runtime.pipeline_base import PipelineBase
from pipec.runtime.step.non_finite import NonFinite, is_overflow, non_finite_message, skip_notice


class StepCounter(PipelineBase):
    """Takes note of what became of a step, once it is over on all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_skipped = 0

    def _count_step(self, found: NonFinite | None = None) -> None:
        """Count a step, and its update if it made one. Raises NonFiniteError for what was ``found``."""
        updates, overflowed = self._updates, False
        if found is not None:
            sync_spec = self._artifact.plan.sync_spec
            overflowed = is_overflow(found, sync_spec)
            if sync_spec.on_nan is NonFiniteAction.RAISE and not overflowed:
                raise NonFiniteError(non_finite_message(found, self._num_steps, sync_spec))
        self._num_steps += 1
        if updates is not None and self._accumulates:
            return
        if found is not None:
            self._num_skipped += 1
            if self._num_skipped == 1:
                log(skip_notice(found, self._num_steps - 1, sync_spec))
        elif updates is not None:
            updates.optimizer.count_step()
        if updates is not None and updates.loss_scale is not None and (overflowed or found is None):
            updates.loss_scale.update(overflowed)

    @property
    def num_skipped(self) -> int:
        """Of how many steps nothing came, because a loss or gradient was not finite.

        See ``on_nan`` and ``precision="fp16-mixed"``.
        """
        return self._num_skipped

    @property
    def loss_scale(self) -> float:
        """What the backward of the next step multiplies the loss by: 1 but for ``precision="fp16-mixed"``.

        Neither losses nor gradients show it.
        """
        scaled = self._updates.loss_scale if self._updates else None
        return scaled.scale if scaled else 1.0
