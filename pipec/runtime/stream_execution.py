"""An artifact of programs without end on the ranks of this process: it begins runs, or makes one step."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from pipec.artifact.directory import Artifact
from pipec.errors import InputError, PipecError
from pipec.ir import RankMemory
from pipec.runtime.execution import Linked, Ranks
from pipec.runtime.outcomes import StreamBatch
from pipec.runtime.recording import RecordedStep
from pipec.runtime.rounds import RoundInterpreter, Source
from pipec.runtime.span import Span
from pipec.runtime.stream_run import ProcessRun, StreamRun, ThreadsRun
from pipec.runtime.updates import Updates


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

    @property
    def num_readers(self) -> int:
        """How many ranks of this process read each mini-batch."""
        return len(self._interpreters)

    def batch(self, leaves: Sequence[object], span: Span) -> StreamBatch:
        """A mini-batch as a source tells it: split, with what the stages need of the whole of it."""
        return StreamBatch(self._microbatches(leaves, span), span.sizes, span.loss_shares, span.values)

    def begin(self, source: Source, seed: int) -> StreamRun:
        """Begin to run the mini-batches of a source."""
        if self._ranks.world.distributed:
            return ProcessRun(self._interpreters, self.artifact.programs, source, seed)
        in_process = self._ranks.in_process
        return ThreadsRun(self._interpreters, self.artifact.programs, source, seed, in_process)

    @contextlib.contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Forget all gradients if what is done inside a ``with`` fails, and say what updates were made."""
        try:
            yield
        except PipecError as error:
            made = {stage: n for each in self._interpreters for stage, n in each.num_updates.items()}
            told = ", ".join(f"stage {stage}: {made[stage]}" for stage in sorted(made))
            error.add_note(
                "updates that the stages of this process have made since the pipeline was last empty: "
                f"{told}. Stages differ in that when a pipeline without a flush fails; load a saved state to "
                "train on"
            )
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
            run = self.begin(lambda number: None if number else batch, seed)
            results = run.results(self._updates.optimizer.hyperparameters())
            assert results is not None, "the mini-batch is there"
            run.drain()
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
