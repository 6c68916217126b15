"""Training on a stream of mini-batches: the next one is read while the ranks work on one."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from typing import Any, cast

from torch import Tensor

from pipec.errors import InputError, PipecError
from pipec.runtime.executions import STEP, Executions
from pipec.runtime.processes.stop_signals import STOP_SIGNALS
from pipec.runtime.step.execution import require_synchronous
from pipec.runtime.stream.call_arguments import (
    CallArguments,
    GivenMicrobatches,
    StepArguments,
    call_arguments_of,
)
from pipec.runtime.stream.read_ahead import ReadAhead, ReadItem
from pipec.runtime.stream.stream_session import StreamSession
from pipec.runtime.stream_position import ResumableReader, StreamPosition


class StreamTraining:
    """Makes the steps of streams, and knows the position in the last of them for checkpoints."""

    def __init__(self, executions: Executions) -> None:
        self._executions = executions
        self._reader: ResumableReader | None = None
        self.last_reader: ResumableReader | None = None
        """The batches of the last stream, unless a step was made after it."""
        self._saved_position: Callable[[], StreamPosition] | None = None

    def losses(
        self, batches: Iterable[Any], resume: bool | None, microbatches: bool, weights: Any
    ) -> Generator[Tensor]:
        """The losses of ``batches``, as ``Pipeline.stream`` says."""
        reader = ResumableReader(batches, self._position_to_resume(resume))
        given = (
            GivenMicrobatches.of(each, weights) if microbatches else self._arguments(each) for each in reader
        )
        return self._track_position(reader, self.losses_of(given))

    def losses_of(self, batches: Iterator[StepArguments]) -> Generator[Tensor]:
        """The losses of ``batches``, without a position for checkpoints."""
        ahead = ReadAhead(batches)
        return (
            self._asynchronous_losses(ahead) if self._executions.may_be_asynchronous else self._losses(ahead)
        )

    def restore(self, position: Callable[[], StreamPosition] | None) -> None:
        """Begin the next stream at the position of a loaded checkpoint, if it has one."""
        self._saved_position = position
        self._reader = self.last_reader = None
        self._executions.undelivered = ()

    def _track_position(self, reader: ResumableReader, steps: Generator[Tensor]) -> Generator[Tensor]:
        """The losses of ``steps``. Checkpoints that are saved meanwhile have the position."""
        before, self._executions.undelivered = self._reader, ()
        # these count again as the loop is given their losses
        self._executions.steps.num_steps -= len(reader.undelivered)
        try:
            with contextlib.closing(steps):
                while reader.undelivered:
                    self._reader, result = reader, reader.undelivered.popleft()
                    reader.count_delivered()
                    yield self._executions.deliver(result)
                for loss in steps:
                    self._reader = self.last_reader = reader
                    reader.count_delivered()
                    yield loss
            self._reader = None
        finally:
            if self._reader is reader or (self._reader is before and self._executions.undelivered):
                self._reader = self.last_reader = reader
                reader.leave(self._executions.undelivered)
                self._executions.undelivered = ()
                self._executions.steps.num_steps += len(reader.undelivered)

    @property
    def num_undelivered(self) -> int:
        """How many of the last steps are mini-batches whose losses a loop was not given, since it ended."""
        last = self.last_reader
        return len(last.undelivered) if last is not None and last.has_ended_early else 0

    @property
    def num_trained(self) -> int:
        """The steps that were made, also those whose losses the running loop is still to be given."""
        loop = self._reader
        if self._saved_position is not None or loop is None or loop.has_ended_early:
            return self._executions.steps.num_steps
        return self._executions.steps.num_steps + len(loop.undelivered) + len(self._executions.undelivered)

    def keep_last_position(self) -> None:
        """Save the position of the stream that gave the last loss, even if it has ended by now."""
        self._reader = self.last_reader

    def _position_to_resume(self, resume: bool | None) -> StreamPosition | None:
        saved, self._saved_position = self._saved_position, None
        if saved is None or resume is False:
            return None
        if resume is None:
            self._saved_position = saved
            raise InputError(
                "the checkpoint that was loaded was made within a stream; pass resume=True to go on there "
                "with the same batches, or resume=False to begin with the first of those that are passed"
            )
        return saved()

    def position(self) -> StreamPosition | None:
        """The position of the stream that runs, was left, or is still to be resumed; None without one."""
        if self._saved_position is not None:
            return self._saved_position()
        return None if self._reader is None else self._reader.position(self._executions.undelivered)

    def _arguments(self, batch: Any) -> CallArguments:
        return call_arguments_of(batch, self._executions.has_target)

    def _losses(self, ahead: ReadAhead) -> Generator[Tensor]:
        for number in count():
            ahead.request(number)
            item = ahead.item(number)
            if item.error is not None:
                self._end_stream(item)
                return
            call = self._executions.agree(STEP, item.value)
            loss = self._executions.train(call, lambda: ahead.request(number + 1))  # noqa: B023
            ahead.forget(number)
            ahead.wait()
            ahead.release(number)
            yield loss

    def _asynchronous_losses(self, ahead: ReadAhead) -> Generator[Tensor]:
        """As ``_losses``, for an asynchronous schedule. The pipeline is drained only where it must be."""
        number, stream_session = 0, cast(StreamSession | None, None)
        try:
            while True:
                is_distributed = self._executions.agreement.is_distributed
                if stream_session is not None and not is_distributed and STOP_SIGNALS.pending:
                    # the losses of the batches that were begun come before the end
                    stream_session.drain(self._executions.optimizer.hyperparameters())
                recording = self._executions.steps.recording
                require_synchronous(
                    self._executions.steps.accumulates, recording.steps if recording is not None else None
                )
                if stream_session is None:
                    ahead.request(number)
                    item = ahead.item(number)
                    if item.error is not None:
                        self._end_stream(item)
                        return
                    self._executions.drain()
                    compiled = self._executions.compiled_stream(item.value)
                    if compiled is None:
                        yield from self._losses(ahead)
                        return
                    announce = self._announce if is_distributed else None
                    stream_session = StreamSession(compiled, ahead, number, announce)
                    self._executions.session = stream_session
                result = stream_session.result(number, self._executions.optimizer.hyperparameters())
                if result is None:
                    stream_session = None
                    continue
                number += 1
                yield self._executions.deliver(result, stream_session.found(number - 1))
        finally:
            if stream_session is self._executions.session:
                self._executions.drain()

    def _announce(self, number: int, item: ReadItem) -> Callable[[], bool]:
        """Start to compare a batch with those of the other ranks. Returns what waits for the result."""
        call_description = self._executions.agreement.describe_updates()
        if item.error is not None:
            call_description["batches"] = "no more"
        else:
            try:
                call_description |= self._executions.describe_batch(item.value)
            except PipecError as error:
                call_description["refused"] = str(error)
        return self._executions.ranks.exchange.start_comparison(
            f"announcing batch {number} of a stream", call_description
        )

    def _end_stream(self, item: ReadItem) -> None:
        """End the stream on all ranks, with the error of the iterator if it had one."""
        error = item.error
        assert error is not None
        has_ended = isinstance(error, StopIteration)
        if not self._executions.agreement.is_distributed:
            if not has_ended:
                raise error
            return
        why = "no more" if has_ended else f"{type(error).__name__}: {error}"
        self._executions.agreement.require_same_call("step", {"batches": why})
        if not has_ended:
            raise InputError(f"the iterator of batches raised {why}") from error
