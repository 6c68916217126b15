"""Training on a stream of mini-batches: the next one is read while the ranks work on one."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from typing import Any, cast

from torch import Tensor

from pipec.errors import InputError, PipecError
from pipec.ir.arguments import FLAG, NONE, check_arguments
from pipec.runtime.calls import Losses
from pipec.runtime.messages.facts import Facts
from pipec.runtime.position import Position, Reading
from pipec.runtime.step.finite import NotFinite
from pipec.runtime.step.outcomes import Outcome
from pipec.runtime.stopped import StoppedTogether
from pipec.runtime.stream.ahead import Ahead, Item
from pipec.runtime.stream.batches import ITERABLE, Given, given_by
from pipec.runtime.stream.flow import CompiledStream, Flow
from pipec.runtime.stream.stream_execution import refuse_accumulating, refuse_recording

Begun = Callable[[], None]
"""What a step calls as soon as it draws no more random numbers, and before it works."""


def nothing() -> None:
    """Do nothing."""


class Streams(StoppedTogether):
    """What a user iterates over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading: Reading | None = None
        self._last_reading: Reading | None = None
        self._saved_position: Callable[[], Position] | None = None

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
        reading = Reading(batches, self._position_to_resume(resume))
        losses = self._with_position(reading, self._losses_of(map(self._given, reading)))
        return Losses(self._one_call, losses)

    def _losses_of(self, batches: Iterator[Given]) -> Generator[Tensor]:
        ahead = Ahead(batches)
        return self._stream_without_flush(ahead) if self._overlaps_steps else self._stream(ahead)

    def _with_position(self, reading: Reading, steps: Generator[Tensor]) -> Generator[Tensor]:
        """The losses of the steps, while checkpoints know the position."""
        before, self._completed = self._reading, ()
        self._num_steps -= len(reading.unseen)  # they count again as the loop is given their losses
        try:
            with contextlib.closing(steps):
                while reading.unseen:
                    self._reading, outcome = reading, reading.unseen.popleft()
                    reading.passed()
                    yield self._passed_on(outcome)
                for loss in steps:
                    self._reading = self._last_reading = reading
                    reading.passed()
                    yield loss
            self._reading = None
        finally:
            if self._reading is reading or (self._reading is before and self._completed):
                self._reading = self._last_reading = reading
                reading.leave(self._completed)
                self._completed = ()
                self._num_steps += len(reading.unseen)

    @property
    def num_left(self) -> int:
        """How many of the last steps are mini-batches whose losses a loop was not given, since it ended."""
        last = self._last_reading
        return len(last.unseen) if last is not None and last.is_left else 0

    @property
    def _num_trained(self) -> int:
        """The steps, with those whose losses the running loop is still to be given."""
        loop = self._reading
        if self._saved_position is not None or loop is None or loop.is_left:
            return self._num_steps
        return self._num_steps + len(loop.unseen) + len(self._completed)

    def stay_where_last_step_was(self) -> None:
        """Let a checkpoint be within the stream that gave the last loss, even if it is over by now."""
        self._reading = self._last_reading

    def _position_to_resume(self, resume: bool | None) -> Position | None:
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

    def _position(self) -> Position | None:
        """Where the stream is that is being iterated over, or that was left, or that was not yet resumed."""
        if self._saved_position is not None:
            return self._saved_position()
        return None if self._reading is None else self._reading.position(self._completed)

    def _stream(self, ahead: Ahead) -> Generator[Tensor]:
        for number in count():
            ahead.allow(number)
            item = ahead.item(number)
            if item.error is not None:
                self._end_stream(item)
                return
            loss = self._stream_step(item.value, lambda: ahead.allow(number + 1))  # noqa: B023
            ahead.forget(number)
            ahead.settle()
            yield loss

    def _stream_without_flush(self, ahead: Ahead) -> Generator[Tensor]:
        """As ``_stream``, where steps overlap. The pipeline is drained in between only where it must be."""
        number, flow = 0, cast(Flow | None, None)
        try:
            while True:
                if flow is not None and self._stops_here:
                    flow.drain(self.optimizer.hyperparameters())  # which gives losses, and they come first
                refuse_recording(self._recorded)
                refuse_accumulating(self._accumulates)
                if flow is None:
                    ahead.allow(number)
                    item = ahead.item(number)
                    if item.error is not None:
                        self._end_stream(item)
                        return
                    self.drain()
                    compiled = self._compiled_for(item.value)
                    if compiled is None:
                        yield from self._stream(ahead)
                        return
                    announce = self._announce if self._ranks.world.distributed else None
                    flow = self._flow = Flow(compiled, ahead, number, announce)
                outcome = flow.outcome(number, self.optimizer.hyperparameters())
                if outcome is None:
                    flow = None
                    continue
                number += 1
                yield self._passed_on(outcome, flow.found(number - 1))
        finally:
            if flow is self._flow:
                self.drain()

    def _passed_on(self, outcome: Outcome, found: NotFinite | None = None) -> Tensor:
        """The loss of a mini-batch that has been trained on, whose logs are kept."""
        self.logs = dict(outcome.logs)
        self._count_step(found)
        return outcome.loss

    def _given(self, batch: Any) -> Given:
        return given_by(batch, self._takes_target)

    @property
    @abstractmethod
    def _takes_target(self) -> bool:
        """Whether a step has a target beside the model's arguments."""

    @property
    @abstractmethod
    def _overlaps_steps(self) -> bool:
        """Whether the schedule has no flush, or a search may find one that has none."""

    @abstractmethod
    def _compiled_for(self, given: Given) -> CompiledStream | None:
        """What runs a batch, and those after it; None where steps do not overlap after all.

        Every rank calls it with the same.
        """

    @abstractmethod
    def _facts_of(self, given: Given) -> Facts:
        """What the ranks must have in common of a batch. Raises InputError if it does not fit."""

    def _announce(self, number: int, item: Item) -> Callable[[], bool]:
        """Tell the other ranks what batch this one has, or that it has no more."""
        facts = self._update_facts()
        if item.error is not None:
            facts["batches"] = "no more"
        else:
            try:
                facts |= self._facts_of(item.value)
            except PipecError as error:
                facts["refused"] = str(error)
        return self._ranks.agreement.announce(f"announcing batch {number} of a stream", number, facts)

    @abstractmethod
    def _stream_step(self, given: Given, begun: Begun) -> Tensor:
        """Make one step of a stream."""

    @abstractmethod
    def _agree_to_end(self, why: str) -> None:
        """Tell the other ranks why there are no more batches. Raises InputError if theirs is another."""

    def _end_stream(self, item: Item) -> None:
        """End the stream on all ranks, with the error of the iterator if it had one."""
        error = item.error
        assert error is not None
        has_ended = isinstance(error, StopIteration)
        if not self._ranks.world.distributed:
            if not has_ended:
                raise error
            return
        why = "no more" if has_ended else f"{type(error).__name__}: {error}"
        self._agree_to_end(why)
        if not has_ended:
            raise InputError(f"the iterator of batches raised {why}") from error
