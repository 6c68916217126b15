"""Training on a stream of mini-batches: the next one is read while the ranks work on one."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from typing import Any, cast

from torch import Tensor

from pipec.errors import InputError, PipecError
from pipec.ir.argument_checks import FLAG, NONE, check_arguments
from pipec.runtime.call_guard import LossIterator
from pipec.runtime.messages.call_description import CallDescription
from pipec.runtime.pipeline_base import PipelineBase
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.stream_results import BatchResult
from pipec.runtime.stream.call_arguments import ITERABLE, CallArguments, call_arguments_of
from pipec.runtime.stream.read_ahead import ReadAhead, ReadItem
from pipec.runtime.stream.stream_execution import require_no_accumulation, require_no_recording
from pipec.runtime.stream.stream_session import CompiledStream, StreamSession
from pipec.runtime.stream_position import ResumableReader, StreamPosition

OnStarted = Callable[[], None]
"""What a step calls as soon as it draws no more random numbers, and before it works."""


def nothing() -> None:
    """Do nothing."""


class StreamTraining(PipelineBase):
    """What a user iterates over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader: ResumableReader | None = None
        self._last_reader: ResumableReader | None = None
        self._saved_position: Callable[[], StreamPosition] | None = None

    def stream(self, batches: Iterable[Any], resume: bool | None = None) -> Iterator[Tensor]:
        """Make a step with each of ``batches``, and yield the losses in order.

        A batch is what a DataLoader yields: a dict of keyword arguments, ``target`` among them; a pair of
        inputs and target where there is a ``loss_fn``; else positional arguments. The next batch is read on a
        thread while the ranks work on one. Every rank iterates over the same batches. With ``batch="rank0"``
        each has as many, and rank 0's count. What the iterator raises is raised here; under ``torchrun`` as
        InputError, by every rank.

        Args:
            batches: such as a DataLoader.
            resume: go on where the checkpoint that was loaded last was made, if it was made in a stream: give
                the losses that the loop had not yet got, and pass over what was trained on. False: begin with
                the first batch all the same.

        Raises:
            InputError: a batch does not fit, or the batches of some rank end before the others'. Nothing was
                changed by that batch, and every rank raises it.
            KeyboardInterrupt, SystemExit: some rank was sent SIGINT or SIGTERM; see ``before_stop``.
        """
        check_arguments({"batches": ITERABLE, "resume": FLAG | NONE}, locals())
        reader = ResumableReader(batches, self._position_to_resume(resume))
        losses = self._track_position(reader, self._losses_of(map(self._call_arguments, reader)))
        return LossIterator(self._call_guard, losses)

    def _losses_of(self, batches: Iterator[CallArguments]) -> Generator[Tensor]:
        ahead = ReadAhead(batches)
        return self._stream_asynchronously(ahead) if self._may_be_asynchronous else self._stream(ahead)

    def _track_position(self, reader: ResumableReader, steps: Generator[Tensor]) -> Generator[Tensor]:
        """The losses of the steps, while checkpoints know the position."""
        before, self._undelivered = self._reader, ()
        self._steps.num_steps -= len(reader.undelivered)  # they count again as the loop is given their losses
        try:
            with contextlib.closing(steps):
                while reader.undelivered:
                    self._reader, result = reader, reader.undelivered.popleft()
                    reader.count_delivered()
                    yield self._deliver(result)
                for loss in steps:
                    self._reader = self._last_reader = reader
                    reader.count_delivered()
                    yield loss
            self._reader = None
        finally:
            if self._reader is reader or (self._reader is before and self._undelivered):
                self._reader = self._last_reader = reader
                reader.leave(self._undelivered)
                self._undelivered = ()
                self._steps.num_steps += len(reader.undelivered)

    @property
    def num_undelivered(self) -> int:
        """How many of the last steps are mini-batches whose losses a loop was not given, since it ended."""
        last = self._last_reader
        return len(last.undelivered) if last is not None and last.has_ended_early else 0

    @property
    def _num_trained(self) -> int:
        """The steps, with those whose losses the running loop is still to be given."""
        loop = self._reader
        if self._saved_position is not None or loop is None or loop.has_ended_early:
            return self._steps.num_steps
        return self._steps.num_steps + len(loop.undelivered) + len(self._undelivered)

    def keep_last_position(self) -> None:
        """Let a checkpoint be within the stream that gave the last loss, even if it is over by now."""
        self._reader = self._last_reader

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

    def _position(self) -> StreamPosition | None:
        """Where the stream is that is being iterated over, or that was left, or that was not yet resumed."""
        if self._saved_position is not None:
            return self._saved_position()
        return None if self._reader is None else self._reader.position(self._undelivered)

    def _stream(self, ahead: ReadAhead) -> Generator[Tensor]:
        for number in count():
            ahead.request(number)
            item = ahead.item(number)
            if item.error is not None:
                self._end_stream(item)
                return
            loss = self._stream_step(item.value, lambda: ahead.request(number + 1))  # noqa: B023
            ahead.forget(number)
            ahead.wait()
            yield loss

    def _stream_asynchronously(self, ahead: ReadAhead) -> Generator[Tensor]:
        """As ``_stream``, where steps overlap. The pipeline is drained in between only where it must be."""
        number, stream_session = 0, cast(StreamSession | None, None)
        try:
            while True:
                if stream_session is not None and self._signals.sent_here():
                    stream_session.drain(
                        self.optimizer.hyperparameters()
                    )  # which gives losses, and they come first
                require_no_recording(self._recorded)
                require_no_accumulation(self._accumulates)
                if stream_session is None:
                    ahead.request(number)
                    item = ahead.item(number)
                    if item.error is not None:
                        self._end_stream(item)
                        return
                    self.drain()
                    compiled = self._compiled_stream(item.value)
                    if compiled is None:
                        yield from self._stream(ahead)
                        return
                    announce = self._announce if self._ranks.world.is_distributed else None
                    stream_session = self._stream_session = StreamSession(compiled, ahead, number, announce)
                result = stream_session.result(number, self.optimizer.hyperparameters())
                if result is None:
                    stream_session = None
                    continue
                number += 1
                yield self._deliver(result, stream_session.found(number - 1))
        finally:
            if stream_session is self._stream_session:
                self.drain()

    def _deliver(self, result: BatchResult, found: NonFinite | None = None) -> Tensor:
        """The loss of a mini-batch that has been trained on, whose logs are kept."""
        self.logs = dict(result.logs)
        self._steps.count(found, self._trained, self._accumulates)
        return result.loss

    def _call_arguments(self, batch: Any) -> CallArguments:
        return call_arguments_of(batch, self._has_target)

    @property
    @abstractmethod
    def _has_target(self) -> bool:
        """Whether a step has a target beside the model's arguments."""

    @property
    @abstractmethod
    def _may_be_asynchronous(self) -> bool:
        """Whether the schedule has no flush, or a search may find one that has none."""

    @abstractmethod
    def _compiled_stream(self, given: CallArguments) -> CompiledStream | None:
        """What runs a batch, and those after it; None where steps do not overlap after all.

        Every rank calls it with the same.
        """

    @abstractmethod
    def _digest_of_batch(self, given: CallArguments) -> CallDescription:
        """What the ranks must have in common of a batch. Raises InputError if it does not fit."""

    def _announce(self, number: int, item: ReadItem) -> Callable[[], bool]:
        """Tell the other ranks what batch this one has, or that it has no more."""
        call_description = self._update_facts()
        if item.error is not None:
            call_description["batches"] = "no more"
        else:
            try:
                call_description |= self._digest_of_batch(item.value)
            except PipecError as error:
                call_description["refused"] = str(error)
        return self._ranks.agreement.start_comparison(
            f"announcing batch {number} of a stream", number, call_description
        )

    @abstractmethod
    def _stream_step(self, given: CallArguments, begun: OnStarted) -> Tensor:
        """Make one step of a stream."""

    @abstractmethod
    def _agree_to_end(self, why: str) -> None:
        """Tell the other ranks why there are no more batches. Raises InputError if theirs is another."""

    def _end_stream(self, item: ReadItem) -> None:
        """End the stream on all ranks, with the error of the iterator if it had one."""
        error = item.error
        assert error is not None
        has_ended = isinstance(error, StopIteration)
        if not self._ranks.world.is_distributed:
            if not has_ended:
                raise error
            return
        why = "no more" if has_ended else f"{type(error).__name__}: {error}"
        self._agree_to_end(why)
        if not has_ended:
            raise InputError(f"the iterator of batches raised {why}") from error
