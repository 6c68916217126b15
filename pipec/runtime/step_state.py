"""The steps of a pipeline so far, and how the next one runs."""

from pipec.artifact.artifact import Artifact
from pipec.console import notice
from pipec.errors import NonFiniteError
from pipec.ir import NonFiniteAction, RankMemory
from pipec.runtime.step.non_finite import NonFinite, is_overflow, non_finite_message, skip_notice
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.timestamps import RecordedStep


class StepState:
    """Counts each step once all ranks have completed it, and updates the loss scale.

    ``num_steps`` includes the steps before a loaded checkpoint; ``num_skipped`` of them were skipped because
    a loss or gradient was not finite. A step adds its timestamps to ``recorded`` and its memory to
    ``measured``, unless they are None. If it ``accumulates``, it makes no update.
    """

    def __init__(self, updates: OptimizerUpdates | None) -> None:
        self._updates = updates
        self.num_steps = 0
        self.num_skipped = 0
        self.accumulates = False
        self.recorded: list[RecordedStep] | None = None
        self.measured: list[RankMemory] | None = None

    def count(self, found: NonFinite | None, trained: Artifact | None) -> None:
        """Count a step of ``trained``, and its update if it made one.

        Raises NonFiniteError for a value ``found`` that is not finite, if ``on_nan`` is "raise".
        """
        updates, overflowed = self._updates, False
        if found is not None:
            assert trained is not None, "its programs found it"
            sync_spec = trained.plan.sync_spec
            overflowed = is_overflow(found, sync_spec)
            if sync_spec.on_nan is NonFiniteAction.RAISE and not overflowed:
                raise NonFiniteError(non_finite_message(found, self.num_steps, sync_spec))
        self.num_steps += 1
        if updates is not None and self.accumulates:
            return
        if found is not None:
            self.num_skipped += 1
            if self.num_skipped == 1:
                notice(skip_notice(found, self.num_steps - 1, sync_spec))
        elif updates is not None:
            updates.optimizer.count_step()
        if updates is not None and updates.loss_scale is not None and (overflowed or found is None):
            updates.loss_scale.update(overflowed)
