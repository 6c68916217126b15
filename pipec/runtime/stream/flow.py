"""The mini-batches of a script's stream on their way through a pipeline that is not flushed."""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pipec.errors import PipecError
from pipec.runtime.step.finite import NotFinite
from pipec.runtime.step.outcomes import Outcome, StreamBatch
from pipec.runtime.stream.ahead import Ahead, Item
from pipec.runtime.stream.batches import Given
from pipec.runtime.stream.stream_execution import StreamExecution
from pipec.runtime.stream.stream_run import Groups

Announce = Callable[[int, Item], Callable[[], bool]]
"""Starts to tell the other ranks of a batch; what it returns waits for theirs, and says if it is the same."""


@dataclass(frozen=True)
class CompiledStream:
    """What runs the batches of a flow, and the seed of what they draw.

    ``split`` splits a batch, or returns None if that needs other programs than the first one; it raises a
    PipecError if the batch does not fit at all. ``is_right`` tells whether what was compiled is right for the
    model as it is now.
    """

    execution: StreamExecution
    seed: int
    split: Callable[[Given], StreamBatch | None]
    is_right: Callable[[], bool]


class Flow:
    """A run of the batches of ``ahead`` from the number ``first`` on, as long as they are ``compiled`` alike.

    Where ranks are processes, they ``announce`` each batch some time before they use it. One that some ranks
    do not have ends the run on all of them alike.
    """

    def __init__(self, compiled: CompiledStream, ahead: Ahead, first: int, announce: Announce | None) -> None:
        self._compiled, self._ahead, self._first, self._announce = compiled, ahead, first, announce
        self._execution = compiled.execution
        self._lock = threading.Lock()
        batch = compiled.split(ahead.item(first).value)
        assert batch is not None, "a stream was compiled for its first batch"
        self._batches = {0: batch}
        self._reads: dict[int, int] = {}
        self._announced: dict[int, Callable[[], bool]] = {}
        self._num_announced = self._num_allowed = first
        self._left: list[Outcome] = []
        self._refused: list[Outcome] = []
        self._num_given = 0
        self._found: tuple[int, NotFinite] | None = None
        self._over = False
        self._run = self._execution.begin(self._batch, batch, compiled.seed)
        self._leaving = weakref.finalize(self, self._run.abandon)

    def outcome(self, number: int, groups: Groups) -> Outcome | None:
        """That of batch ``number``, the next one; None if it is not among those of this run.

        ``groups`` are the hyperparameters that the script has set by now. No batch is being read afterwards.

        Raises:
            ExecutionError, TransportError: a rank failed.
        """
        if not self._over and not self._compiled.is_right():
            self.drain(groups)
        if self._over:
            self._ahead.settle()
            left = self._left or self._refused
            self._num_given += bool(left)
            return left.pop(0) if left else None
        self._read_ahead(number)
        try:
            with self._execution.dropping_gradients():
                results = self._run.results(groups)
        except BaseException:
            self._over = True
            self._take_left()  # an interrupt has completed what was begun
            self._leaving.detach()
            raise
        if results is None:
            self._close()
            return None
        self._ahead.settle()
        self._run.forget_results()
        self._num_given += 1
        return self._outcome(results)

    def found(self, number: int) -> NotFinite | None:
        """Why batch ``number``, whose results have been given, ends the stream; None if nothing is wrong."""
        if not self._over:
            self._found = self._execution.found()
        return self._found[1] if self._found and self._found[0] == number - self._first else None

    def drain(self, groups: Groups) -> list[Outcome]:
        """Complete what was begun, unless the process ends; returns the outcomes that nobody has asked for.

        They are those that come next, and leave the list then. One of which nothing came is not among them.
        Their updates have the hyperparameters of now, which are ``groups``.
        """
        if not self._over and self._leaving.alive:
            self._over = True
            with self._execution.dropping_gradients():
                self._run.drain(groups)
            self._take_left()
            self._close()
        return self._left

    def _take_left(self) -> None:
        """Keep the outcomes that nobody has asked for, apart from those of which nothing came."""
        left = [self._outcome(results) for results in self._run.left]
        self._found = self._execution.found()
        num_good = max(self._found[0] - self._num_given, 0) if self._found else len(left)
        self._left, self._refused = left[:num_good], left[num_good:]

    def _outcome(self, results: Mapping[str, Tensor]) -> Outcome:
        return Outcome.of(self._execution.artifact.plan, results)

    def _read_ahead(self, number: int) -> None:
        """Let batches be read that some rank may need for this one; announce those that have been read."""
        last = number + self._run.num_ahead + 1
        if self._announce is not None:
            if number == self._first:
                self._allow(last)
                self._ahead.settle()
            while self._num_announced <= self._num_allowed:
                number, self._num_announced = self._num_announced, self._num_announced + 1
                self._announced[number] = self._announce(number, self._ahead.item(number))
        self._allow(last)

    def _allow(self, number: int) -> None:
        self._ahead.allow(number)
        self._num_allowed = number

    def _batch(self, number: int) -> StreamBatch | None:
        """A batch by its number in this run, for one of the ranks that read each once."""
        item = self._ahead.item(self._first + number)
        if self._announce is not None and not self._announced.pop(self._first + number)():
            return None
        if item.error is not None:
            return None
        with self._lock:
            if number not in self._batches:
                split = self._split(item.value)
                if split is None:
                    return None
                self._batches[number] = split
            batch = self._batches[number]
            self._reads[number] = self._reads.get(number, 0) + 1
            if self._reads[number] == self._execution.num_readers:
                del self._batches[number], self._reads[number]
                self._ahead.forget(self._first + number)
            return batch

    def _split(self, given: Given) -> StreamBatch | None:
        try:
            return self._compiled.split(given)
        except PipecError:  # which is raised when the run is over and the batch is the next one
            return None

    def _close(self) -> None:
        """Take in what the other ranks have announced beyond the end of the run."""
        self._over = True
        self._leaving.detach()
        for wait in self._announced.values():
            wait()
        self._announced.clear()
