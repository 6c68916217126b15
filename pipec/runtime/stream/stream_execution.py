"""An artifact of periodic programs on the ranks of this process: it begins runs, or makes one step."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError, PipecError
from pipec.ir import RankMemory
from pipec.ir.periodic_program import max_batches_ahead
from pipec.ir.schedule import rank_of
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import LinkedArtifact, Ranks
from pipec.runtime.step.non_finite import NonFinite, stage_of_loss
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.step.timestamps import RecordedStep
from pipec.runtime.stream.period_interpreter import BatchSource, PeriodInterpreter
from pipec.runtime.stream.recovery import restore_common_version
from pipec.runtime.stream.stream_run import ProcessStreamRun, StreamRun, ThreadedStreamRun


class StreamExecution(LinkedArtifact[PeriodInterpreter]):
    """An artifact of periodic programs, ready to run the mini-batches of a stream."""

    def __init__(
        self,
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: OptimizerUpdates | None = None,
    ) -> None:
        super().__init__(PeriodInterpreter, artifact, parameters, buffers, ranks, updates)
        self.non_finite: NonFinite | None = None
        """Why nothing came of the last mini-batch, if the plan looks for that."""
        self._parameters, plan = parameters, artifact.plan
        self._num_ahead = max(
            max_batches_ahead(each, plan.links, plan.num_microbatches) for each in artifact.programs
        )

    @property
    def num_readers(self) -> int:
        """How many ranks of this process read each mini-batch."""
        return len(self._interpreters)

    def batch(self, leaves: Sequence[object], batch_slice: BatchSlice) -> StreamBatch:
        """A mini-batch of a source: split, with its batch counts."""
        return StreamBatch(
            self._microbatches(leaves, batch_slice),
            batch_slice.sizes,
            batch_slice.loss_weights,
            batch_slice.values,
        )

    def begin(self, source: BatchSource, first: StreamBatch, seed: int) -> StreamRun:
        """Begin to run the mini-batches of a source, which all have the sizes of its first one."""
        batch_slice = BatchSlice(
            first.sizes, sum(first.sizes), custom_loss_weights=first.loss_weights, values=first.values
        )
        self.dry_run(first.microbatches, batch_slice, seed)
        if self._ranks.world.is_distributed:
            return ProcessStreamRun(self._interpreters, self._num_ahead, source, seed)
        if self._updates is not None:
            self._updates.refresh_copies(self._parameters)
        return ThreadedStreamRun(self._interpreters, self._num_ahead, source, seed, self._ranks.in_process)

    def found(self) -> tuple[int, NonFinite] | None:
        """The first skipped mini-batch of the run, and why; None if there is none so far."""
        plan, first = self.artifact.plan, min(each.first_nan for each in self._interpreters)
        if math.isinf(first):
            return None
        (number, place), stage = divmod(int(first), plan.num_microbatches), stage_of_loss(plan)
        return number, NonFinite(rank_of(plan.placement, stage, int(first)), stage, place)

    @contextlib.contextmanager
    def drop_gradients_on_failure(self) -> Iterator[None]:
        """Drop all gradients if the ``with`` fails, and say which weights are left."""
        try:
            yield
        except PipecError as error:
            error.add_note(restore_common_version(self._interpreters, self._ranks))
            for each in self._interpreters:
                each.forget()
            self._drop_gradients()
            raise
        except BaseException:
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        if self._updates is not None:
            self._updates.drop_gradients()

    def run(
        self,
        leaves: Sequence[object],
        batch_slice: BatchSlice,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
        measured: list[RankMemory] | None = None,
    ) -> Mapping[str, Tensor]:
        """Run a stream of one mini-batch; returns its results by name."""
        require_no_accumulation(not update)
        require_no_recording(recorded)
        require_no_measuring(measured)
        batch = self.batch(leaves, batch_slice)
        with self.drop_gradients_on_failure():
            assert self._updates is not None, "a stream updates"
            run = self.begin(lambda number: None if number else batch, batch, seed)
            groups = self._updates.optimizer.hyperparameters()
            results = run.results(groups)
            assert results is not None, "the mini-batch is there"
            run.drain(groups)
        _, self.non_finite = self.found() or (0, None)
        return results


def require_no_accumulation(accumulates: bool) -> None:
    """Raise InputError if gradients of several mini-batches are to be added up."""
    if accumulates:
        raise InputError(
            "an asynchronous schedule updates after every mini-batch, so that it accumulates no gradients; "
            "leave out accumulate(), or pass schedule='1f1b'"
        )


def require_no_recording(recorded: list[RecordedStep] | None) -> None:
    """Raise InputError if the times of a stream are to be recorded, which has no end to note them at."""
    if recorded is not None:
        raise InputError(
            "an asynchronous schedule cannot be recorded or traced, because its programs do not end; use "
            "simulate() and visualize(...), or record schedule='1f1b'"
        )


def require_no_measuring(measured: list[RankMemory] | None) -> None:
    """Raise InputError if the memory of a stream is to be measured, which has no end to note it at."""
    if measured is not None:
        raise InputError(
            "the memory of an asynchronous schedule cannot be measured, because its programs do not end; use "
            "memory(), or measure schedule='1f1b'"
        )
