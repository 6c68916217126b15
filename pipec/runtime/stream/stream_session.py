"""The mini-batches of a script's stream in flight through an asynchronous pipeline."""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pipec.errors import PipecError
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.rank_state import GroupHyperparameters
from pipec.runtime.step.stream_results import BatchResult, StreamBatch
from pipec.runtime.stream.call_arguments import StepArguments
from pipec.runtime.stream.read_ahead import ReadAhead, ReadItem

Announce = Callable[[int, ReadItem], Callable[[], bool]]
"""Starts to tell the other ranks of a batch; what it returns waits for theirs, and says if it is the same."""


@dataclass(frozen=True)
class CompiledStream:
    """The compiled execution of a stream's batches, and their seed.

    ``split`` splits a batch, or returns None if that needs other programs than the first one; it raises a
    PipecError if the batch does not fit at all. ``is_valid`` tells whether what was compiled is right for the
    model as it is now.
    """

    execution: Execution
    seed: int
    split: Callable[[StepArguments], StreamBatch | None]
    is_valid: Callable[[], bool]


class StreamSession:
    """A run of the batches of ``ahead`` from number ``first`` on, as long as ``compiled`` is valid for them.

    If ranks are processes, they ``announce`` each batch before they use it. A batch that some ranks do not
    have ends the run on all ranks.
    """

    def __init__(
        self, compiled: CompiledStream, ahead: ReadAhead, first: int, announce: Announce | None
    ) -> None:
        self._compiled, self._ahead, self._first, self._announce = compiled, ahead, first, announce
        self._execution = compiled.execution
        self._lock = threading.Lock()
        batch = compiled.split(ahead.item(first).value)
        assert batch is not None, "a stream was compiled for its first batch"
        self._batches = {0: batch}
        self._reads: dict[int, int] = {}
        self._announced: dict[int, Callable[[], bool]] = {}
        self._num_announced = first
        self._left: list[BatchResult] = []
        self._refused: list[BatchResult] = []
        self._num_returned = 0
        self._found: tuple[int, NonFinite] | None = None
        self._over = False
        self._run = self._execution.begin(self._batch, batch, compiled.seed)
        self._leaving = weakref.finalize(self, self._run.abandon)

    def result(self, number: int, groups: GroupHyperparameters) -> BatchResult | None:
        """The result of batch ``number``, the next one; None if it is not part of this run.

        ``groups`` are the hyperparameters that the script has set by now. No batch is being read afterwards.

        Raises:
            ExecutionError, TransportError: a rank failed.
        """
        if not self._over and not self._compiled.is_valid():
            self.drain(groups)
        if self._over:
            self._ahead.wait()
            left = self._left or self._refused
            self._num_returned += bool(left)
            return left.pop(0) if left else None
        self._read_ahead(number)
        try:
            with self._execution.drop_gradients_on_failure():
                results = self._run.results(groups)
        except BaseException:
            self._over = True
            self._take_left()  # an interrupt has completed what was begun
            self._leaving.detach()
            raise
        if results is None:
            self._close()
            return None
        self._ahead.wait()
        self._ahead.release(number - self._run.max_batches_ahead - 1)  # no rank has one so old in flight
        self._run.forget_results()
        self._num_returned += 1
        return self._batch_result(results)

    def found(self, number: int) -> NonFinite | None:
        """Why batch ``number``, whose results were returned, ends the stream; None if it does not."""
        if not self._over:
            self._found = self._execution.found()
        return self._found[1] if self._found and self._found[0] == number - self._first else None

    def drain(self, groups: GroupHyperparameters) -> list[BatchResult]:
        """Complete the mini-batches in flight, unless the process ends; returns the unrequested results.

        These are the next results, without those of skipped steps; the caller removes them from the list as
        they are requested. Their updates use the present hyperparameters, ``groups``.
        """
        if not self._over and self._leaving.alive:
            self._over = True
            with self._execution.drop_gradients_on_failure():
                self._run.drain(groups)
            self._take_left()
            self._close()
        return self._left

    def _take_left(self) -> None:
        """Store the unrequested results, without those of skipped steps."""
        left = [self._batch_result(results) for results in self._run.left]
        self._found = self._execution.found()
        num_finite = max(self._found[0] - self._num_returned, 0) if self._found else len(left)
        self._left, self._refused = left[:num_finite], left[num_finite:]

    def _batch_result(self, results: Mapping[str, Tensor]) -> BatchResult:
        return BatchResult.of(self._execution.artifact.plan, results)

    def _read_ahead(self, number: int) -> None:
        """Request the batches that some rank may need for this one; announce those that have been read."""
        last = number + self._run.max_batches_ahead + 1
        if self._announce is not None:
            if number == self._first:
                self._ahead.request(last)
                self._ahead.wait()
            for each in range(self._num_announced, self._ahead.num_allowed):
                self._announced[each] = self._announce(each, self._ahead.item(each))
            self._num_announced = self._ahead.num_allowed
        self._ahead.request(last)

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

    def _split(self, given: StepArguments) -> StreamBatch | None:
        try:
            return self._compiled.split(given)
        except PipecError:  # which is raised when the run is over and the batch is the next one
            return None

    def _close(self) -> None:
        """Receive what the other ranks have announced beyond the end of the run."""
        self._over = True
        self._leaving.detach()
        for wait in self._announced.values():
            wait()
        self._announced.clear()
