"""Counts steps and skipped steps, and updates the loss scale."""

from pipec.artifact.artifact import Artifact
from pipec.console import log
from pipec.errors import NonFiniteError
from pipec.ir import NonFiniteAction
from pipec.runtime.step.non_finite import NonFinite, is_overflow, non_finite_message, skip_notice
from pipec.runtime.step.optimizer_updates import OptimizerUpdates


class StepCounter:
    """Counts each step once it is over on all ranks.

    ``num_steps`` includes the steps before a loaded checkpoint. ``num_skipped`` steps were skipped because a
    loss or gradient was not finite.
    """

    def __init__(self, updates: OptimizerUpdates | None) -> None:
        self._updates = updates
        self.num_steps = 0
        self.num_skipped = 0

    def count(self, found: NonFinite | None, trained: Artifact | None, accumulates: bool) -> None:
        """Count a step of an artifact, and its update if it made one.

        Raises NonFiniteError for what was ``found``.
        """
        updates, overflowed = self._updates, False
        if found is not None:
            assert trained is not None, "its programs found it"
            sync_spec = trained.plan.sync_spec
            overflowed = is_overflow(found, sync_spec)
            if sync_spec.on_nan is NonFiniteAction.RAISE and not overflowed:
                raise NonFiniteError(non_finite_message(found, self.num_steps, sync_spec))
        self.num_steps += 1
        if updates is not None and accumulates:
            return
        if found is not None:
            self.num_skipped += 1
            if self.num_skipped == 1:
                log(skip_notice(found, self.num_steps - 1, sync_spec))
        elif updates is not None:
            updates.optimizer.count_step()
        if updates is not None and updates.loss_scale is not None and (overflowed or found is None):
            updates.loss_scale.update(overflowed)
