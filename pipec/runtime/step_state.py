"""The steps of a pipeline so far, and how the next one runs."""

from torch import Tensor

from pipec.artifact.artifact import Artifact
from pipec.console import notice
from pipec.errors import NonFiniteError
from pipec.ir import NonFiniteAction, SyncSpec
from pipec.runtime.recording import Recording
from pipec.runtime.step.non_finite import NonFinite, is_overflow, non_finite_message, skip_notice
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.timestamps import RecordedStep


class StepState:
    """Counts each step once all ranks have completed it, and updates the loss scale.

    ``num_steps`` includes the steps before a loaded checkpoint; ``num_skipped`` of them were skipped because
    a loss or gradient was not finite. If a ``recording`` is made, some steps add their timestamps to it. If
    it ``accumulates``, a step makes no update. The ``logs`` have by name what the loss function of the last
    step returned besides the loss. ``last_seconds`` is what the last call of ``step`` took.
    """

    def __init__(self, updates: OptimizerUpdates | None) -> None:
        self.updates = updates
        self.num_steps = 0
        self.num_skipped = 0
        self.accumulates = False
        self.recording: Recording | None = None
        self.logs: dict[str, Tensor] = {}
        self.last_seconds: float | None = None

    @property
    def recorded(self) -> list[RecordedStep] | None:
        """Where the next step adds its timestamps; None if it is not recorded."""
        return None if self.recording is None else self.recording.of_step(self.num_steps)

    def count(self, found: NonFinite | None, trained: Artifact | None) -> None:
        """Count a step of ``trained``, and its update if it made one.

        Raises NonFiniteError for a value ``found`` that is not finite, if ``on_nan`` is "raise".
        """
        if self.recording is not None:
            self.recording.count_step(self.num_steps, trained)
        if found is not None:
            self._require_finite(found, trained, self.num_steps)
        self.num_steps += 1
        if self.updates is None or not self.accumulates:
            self.count_update(found, trained)
            if self.updates is not None and found is None:
                self.updates.optimizer.count_step()

    def count_update(self, found: NonFinite | None, trained: Artifact | None) -> None:
        """Count the update after the last step; raises as ``count``."""
        last, updates = self.num_steps - 1, self.updates
        if self.recording is not None:
            self.recording.count_update(last, trained)
        if found is not None:
            self._require_finite(found, trained, last)
            self.num_skipped += 1
            if self.recording is not None:
                self.recording.note(last, "skipped")
            if self.num_skipped == 1:
                notice(skip_notice(found, last, _sync_spec(trained)))
        if updates is not None and updates.loss_scale is not None:
            overflowed = found is not None and is_overflow(found, _sync_spec(trained))
            if overflowed or found is None:
                updates.loss_scale.update(overflowed)

    def _require_finite(self, found: NonFinite, trained: Artifact | None, step: int) -> None:
        sync_spec = _sync_spec(trained)
        if sync_spec.on_nan is NonFiniteAction.RAISE and not is_overflow(found, sync_spec):
            if self.recording is not None:
                self.recording.note(step, "not finite")
            raise NonFiniteError(non_finite_message(found, step, sync_spec))


def _sync_spec(trained: Artifact | None) -> SyncSpec:
    assert trained is not None, "its programs have found a value"
    return trained.plan.sync_spec
