"""An artifact of programs without end on the ranks of this process: it begins runs, or makes one step."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from pipec.artifact.directory import Artifact
from pipec.errors import InputError, PipecError
from pipec.ir import RankMemory
from pipec.ir.rounds import num_ahead
from pipec.ir.schedule import rank_of
from pipec.runtime.step.execution import Linked, Ranks
from pipec.runtime.step.finite import NotFinite, stage_of_loss
from pipec.runtime.step.outcomes import StreamBatch
from pipec.runtime.step.recording import RecordedStep
from pipec.runtime.step.span import Span
from pipec.runtime.step.updates import Updates
from pipec.runtime.stream.recovery import recover
from pipec.runtime.stream.rounds import RoundInterpreter, Source
from pipec.runtime.stream.stream_run import ProcessRun, StreamRun, ThreadsRun


class StreamExecution(Linked[RoundInterpreter]):
    """An artifact of programs without end, ready to run the mini-batches of a stream."""

    def __init__(
        self,
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: Updates | None = None,
    ) -> None:
        super().__init__(RoundInterpreter, artifact, parameters, buffers, ranks, updates)
        self.not_finite: NotFinite | None = None
        """Why nothing came of the last mini-batch, if the plan looks for that."""
        self._parameters, plan = parameters, artifact.plan
        self._num_ahead = max(
            num_ahead(each, plan.links, plan.num_microbatches) for each in artifact.programs
        )

    @property
    def num_readers(self) -> int:
        """How many ranks of this process read each mini-batch."""
        return len(self._interpreters)

    def batch(self, leaves: Sequence[object], span: Span) -> StreamBatch:
        """A mini-batch as a source tells it: split, with what the stages need of the whole of it."""
        return StreamBatch(self._microbatches(leaves, span), span.sizes, span.loss_shares, span.values)

    def begin(self, source: Source, first: StreamBatch, seed: int) -> StreamRun:
        """Begin to run the mini-batches of a source, which all have the sizes of its first one."""
        span = Span(first.sizes, sum(first.sizes), shares=first.shares, values=first.values)
        self.rehearse(first.microbatches, span, seed)
        if self._ranks.world.distributed:
            return ProcessRun(self._interpreters, self._num_ahead, source, seed)
        if self._updates is not None:
            self._updates.refresh_copies(self._parameters)
        return ThreadsRun(self._interpreters, self._num_ahead, source, seed, self._ranks.in_process)

    def found(self) -> tuple[int, NotFinite] | None:
        """The first mini-batch of the run of which nothing comes, and why; None if there is none so far."""
        plan, first = self.artifact.plan, min(each.first_nan for each in self._interpreters)
        if math.isinf(first):
            return None
        (number, place), stage = divmod(int(first), plan.num_microbatches), stage_of_loss(plan)
        return number, NotFinite(rank_of(plan.placement, stage, int(first)), stage, place)

    @contextlib.contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Forget all gradients if what is done inside a ``with`` fails, and say what weights are left."""
        try:
            yield
        except PipecError as error:
            error.add_note(recover(self._interpreters, self._ranks))
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
        span: Span,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
        measured: list[RankMemory] | None = None,
    ) -> Mapping[str, Tensor]:
        """Run a stream of one mini-batch; returns its results by name."""
        refuse_accumulating(not update)
        refuse_recording(recorded)
        refuse_measuring(measured)
        batch = self.batch(leaves, span)
        with self.dropping_gradients():
            assert self._updates is not None, "a stream updates"
            run = self.begin(lambda number: None if number else batch, batch, seed)
            groups = self._updates.optimizer.hyperparameters()
            results = run.results(groups)
            assert results is not None, "the mini-batch is there"
            run.drain(groups)
        _, self.not_finite = self.found() or (0, None)
        return results


def refuse_accumulating(accumulates: bool) -> None:
    """Raise InputError if gradients of several mini-batches are to be added up."""
    if accumulates:
        raise InputError(
            "a pipeline without a flush updates after every mini-batch, so that it accumulates no gradients; "
            "leave out accumulate(), or take schedule='1f1b'"
        )


def refuse_recording(recorded: list[RecordedStep] | None) -> None:
    """Raise InputError if the times of a stream are to be recorded, which has no end to note them at."""
    if recorded is not None:
        raise InputError(
            "a pipeline without a flush cannot be recorded or traced: its programs have no end. Look at "
            "simulate() and visualize(...), or record schedule='1f1b'"
        )


def refuse_measuring(measured: list[RankMemory] | None) -> None:
    """Raise InputError if the memory of a stream is to be measured, which has no end to note it at."""
    if measured is not None:
        raise InputError(
            "the memory of a pipeline without a flush cannot be measured: its programs have no end. Look at "
            "memory(), or measure schedule='1f1b'"
        )
