"""One run of periodic programs on the ranks of this process, from an empty pipeline to an empty one.

The script requests the results of one mini-batch after another. The request for mini-batch i carries the
hyperparameters of the update after it, and lets ranks work ahead. So learning-rate schedulers step by
mini-batch, whichever stage updates, and whenever it does.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipec.errors import PipecError, TransportError
from pipec.runtime.messages.cuda import on_callers_streams
from pipec.runtime.messages.transport import InProcessTransport
from pipec.runtime.processes.worker import Worker
from pipec.runtime.step.interpreter import BatchSource, GroupHyperparameters, Interpreter
from pipec.runtime.step.stream_results import StreamBatch

ResultsByName = Mapping[str, Tensor]


class StreamRun(ABC):
    """A run that has begun. ``source`` tells its mini-batches.

    Some rank may have begun ``max_batches_ahead`` mini-batches after the last one whose results were
    requested.
    """

    def __init__(
        self, interpreters: Sequence[Interpreter], max_batches_ahead: int, source: BatchSource, seed: int
    ) -> None:
        self._interpreters, self._source = interpreters, source
        self.max_batches_ahead = max_batches_ahead
        self._results: dict[int, ResultsByName] = {}
        self._num_requested = self._num_returned = 0
        self._end: int | None = None
        self._drains = self._is_complete = False
        self._last: GroupHyperparameters = ()
        self._changed = threading.Condition()
        for each in interpreters:
            each.begin(self._batch, self._emit, seed)

    def results(self, groups: GroupHyperparameters) -> ResultsByName | None:
        """The results of the next mini-batch; None if there is none, and the run is over.

        Raises:
            ExecutionError, TransportError: a rank failed.
        """
        number, self._num_requested, self._last = self._num_requested, self._num_requested + 1, groups
        self._request(number, groups)
        if number in self._results:
            return self._results[number]
        self._num_requested = number
        self._finish()
        return None

    @abstractmethod
    def _request(self, number: int, groups: GroupHyperparameters) -> None:
        """Let ranks run until the results of a mini-batch are known, or there are none."""

    def drain(self, groups: GroupHyperparameters) -> None:
        """Complete all mini-batches in flight, and end the run.

        ``groups`` are the hyperparameters of the updates whose last mini-batch was not requested.
        """
        self._last = groups
        self._drain_at_once()
        self._finish()

    @property
    def left(self) -> list[ResultsByName]:
        """The results of completed mini-batches that were not returned; none if the run did not complete."""
        if not self._is_complete:
            return []
        assert self._end is not None, "a run that is over has ended"
        return [self._results[number] for number in range(self._num_returned, self._end)]

    @abstractmethod
    def _finish(self) -> None:
        """Wait until every mini-batch that was begun is over."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop at once, because the process ends or nobody can ask for results any longer."""

    def _drain_at_once(self) -> None:
        """Let no rank begin what none has begun when all have made the last update that was requested."""
        with self._changed:
            self._drains = True
        self._stop_at(self._num_requested + self.max_batches_ahead if self._num_requested else 0)

    def _batch(self, number: int) -> StreamBatch | None:
        with self._changed:
            if self._has_ended(number):
                return None
        batch = self._source(number)
        if batch is None:
            self._stop_at(number)
        return batch

    def _has_ended(self, number: int) -> bool:
        """Whether a mini-batch is beyond the end of the run."""
        return self._end is not None and number >= self._end

    def _stop_at(self, number: int) -> None:
        with self._changed:
            self._end = number if self._end is None else min(self._end, number)
            self._changed.notify_all()

    def _emit(self, number: int, results: ResultsByName) -> None:
        """Keep the results of a mini-batch. Every rank has them, one after the other."""
        with self._changed:
            if number >= self._num_returned:
                self._results.setdefault(number, results)
            self._changed.notify_all()

    def forget_results(self) -> None:
        """Drop the results of the next mini-batch, which the script receives."""
        with self._changed:
            del self._results[self._num_returned]
            self._num_returned += 1


class ThreadedStreamRun(StreamRun):
    """Every rank is in this process, on a thread of ``in_process``."""

    def __init__(
        self,
        interpreters: Sequence[Interpreter],
        max_batches_ahead: int,
        source: BatchSource,
        seed: int,
        in_process: InProcessTransport,
    ) -> None:
        super().__init__(interpreters, max_batches_ahead, source, seed)
        self._in_process = in_process
        self._groups: dict[int, GroupHyperparameters] = {}
        self._num_advanced: Counter[int] = Counter()
        self._failure: BaseException | None = None
        self._over = False
        self._jobs = [functools.partial(self._work, each) for each in interpreters]
        self._worker = Worker("pipec stream")
        self._worker.submit(on_callers_streams(in_process.devices, self._run))

    def _request(self, number: int, groups: GroupHyperparameters) -> None:
        with self._changed:
            self._groups[number] = groups
            self._changed.notify_all()
        self._wait_until(lambda: number in self._results or self._has_ended(number))

    def abandon(self) -> None:
        with self._changed:
            is_running = not self._over
        if is_running:
            self._in_process.fail(TransportError("the stream is not asked for results any longer"))
            self._give_up()
            with self._changed:
                self._changed.wait_for(lambda: self._over)
        self._forget()

    def _forget(self) -> None:
        for each in self._interpreters:
            each.forget()

    def _finish(self) -> None:
        self._wait_until(lambda: self._over)

    def _wait_until(self, reached: Any) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or reached())
        except BaseException as interrupt:  # such as Ctrl-C; a second one does not wait for what was begun
            self._drain_at_once()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._over)
            except BaseException:
                self._in_process.fail(interrupt)
                self._give_up()
            raise
        if self._failure is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._over)
            raise self._failure

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._in_process.run(self._jobs)
        except BaseException as error:
            failure = error
        if not isinstance(failure, PipecError):  # after which somebody asks what is left
            self._forget()
        with self._changed:
            self._failure, self._over, self._is_complete = failure, True, failure is None
            self._changed.notify_all()

    def _work(self, interpreter: Interpreter) -> None:
        """Run a rank: advance as far as the script has requested, and to the end once that is known."""
        number = 0
        try:
            while (groups := self._allowed(number)) is not None:
                interpreter.advance(number, groups)
                self._forget_groups(number)
                number += 1
            interpreter.finish(self._last)
        except BaseException:
            self._give_up()
            raise

    def _forget_groups(self, number: int) -> None:
        """Drop hyperparameters that every rank has used."""
        with self._changed:
            self._num_advanced[number] += 1
            if self._num_advanced[number] == len(self._interpreters):
                del self._groups[number], self._num_advanced[number]

    def _give_up(self) -> None:
        """Wake every rank that waits for the script, so that it notices that it has to stop."""
        with self._changed:
            self._drains = True
        self._stop_at(0)

    def _allowed(self, number: int) -> GroupHyperparameters | None:
        """The hyperparameters of an update once it is requested, or None if nobody will request it."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._groups or self._drains or self._has_ended(number))
            return self._groups.get(number)


class ProcessStreamRun(StreamRun):
    """The rank of this process, on the thread of the script."""

    def abandon(self) -> None:
        """Do nothing: this rank works only while results are requested."""

    def _request(self, number: int, groups: GroupHyperparameters) -> None:
        (interpreter,) = self._interpreters
        interpreter.advance(number, groups)

    def _finish(self) -> None:
        (interpreter,) = self._interpreters
        interpreter.finish(self._last)
        interpreter.forget()
        self._is_complete = True
