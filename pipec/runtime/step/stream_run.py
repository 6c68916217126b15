"""One run of periodic programs on the ranks of this process, from an empty pipeline to an empty one.

The script requests the results of one mini-batch after another. The request for mini-batch i carries the
hyperparameters of the update after it, and lets ranks work ahead. So learning-rate schedulers step by
mini-batch, whichever stage updates, and whenever it does.
"""

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from torch import Tensor

from pipec.errors import PipecError, TransportError
from pipec.runtime.messages.cuda import on_callers_streams
from pipec.runtime.messages.transport import InProcessTransport
from pipec.runtime.processes.worker import Worker
from pipec.runtime.step.interpreter import BatchSource, Interpreter
from pipec.runtime.step.rank_state import GroupHyperparameters
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.stream_results import StreamBatch

ResultsByName = Mapping[str, Tensor]

_Request = tuple[int, GroupHyperparameters]

_Requests = SimpleQueue[_Request | None]
"""The mini-batches that the script requests of a rank, then None."""


class StreamRun:
    """A run that has begun. ``source`` tells its mini-batches.

    Some rank may have begun ``max_batches_ahead`` mini-batches after the last one whose results were
    requested. If every rank is in this process, each works on a thread of ``in_process``; otherwise the rank
    of this process works on the script's thread, while results are requested.
    """

    def __init__(
        self,
        interpreters: Sequence[Interpreter],
        max_batches_ahead: int,
        source: BatchSource,
        seed: int,
        in_process: InProcessTransport | None,
    ) -> None:
        self._interpreters, self._source, self._in_process = interpreters, source, in_process
        self.max_batches_ahead = max_batches_ahead
        self._results: dict[int, ResultsByName] = {}
        self._num_requested = self._num_returned = 0
        self._end: int | None = None
        self._is_complete = self._over = False
        self._failure: BaseException | None = None
        self._last: GroupHyperparameters = ()
        self._changed = threading.Condition()
        for each in interpreters:
            each.begin(self._batch, self._emit, seed)
        self._requests: list[_Requests] = [SimpleQueue() for _ in interpreters]
        if in_process is not None:
            self._worker = Worker("pipec stream")
            self._worker.submit(on_callers_streams(in_process.devices, self._run))

    def results(self, groups: GroupHyperparameters) -> ResultsByName | None:
        """The results of the next mini-batch; None if there is none, and the run is over.

        Raises:
            ExecutionError, TransportError: a rank failed.
        """
        number, self._num_requested, self._last = self._num_requested, self._num_requested + 1, groups
        if self._in_process is None:
            self._interpreters[0].advance(number, groups)
        else:
            self._ask((number, groups), lambda: number in self._results or self._has_ended(number))
        if number in self._results:
            return self._results[number]
        self._num_requested = number
        self._finish()
        return None

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

    def forget_results(self) -> None:
        """Drop the results of the next mini-batch, which the script receives."""
        with self._changed:
            del self._results[self._num_returned]
            self._num_returned += 1

    def abandon(self) -> None:
        """Stop at once, because the process ends or nobody can ask for results any longer."""
        if self._in_process is None:  # this rank works only while results are requested
            return
        if not self._over:
            self._in_process.fail(TransportError("the stream is not asked for results any longer"))
            self._stop_at(0, and_finish=True)
            with self._changed:
                self._changed.wait_for(lambda: self._over)
        self._forget()

    def _finish(self) -> None:
        """Wait until every mini-batch that was begun is over."""
        if self._in_process is None:
            self._interpreters[0].finish(self._last)
            self._forget()
            self._is_complete = True
        else:
            self._ask(None, lambda: self._over)

    def _forget(self) -> None:
        for each in self._interpreters:
            each.forget()

    def _drain_at_once(self) -> None:
        """Let no rank begin what none has begun when all have made the last update that was requested."""
        ahead = self._num_requested + self.max_batches_ahead if self._num_requested else 0
        self._stop_at(ahead, and_finish=True)

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

    def _stop_at(self, number: int, and_finish: bool = False) -> None:
        """End the run before a mini-batch, and let ranks finish that wait for the script."""
        with self._changed:
            self._end = number if self._end is None else min(self._end, number)
            self._changed.notify_all()
        for requests in self._requests if and_finish else ():
            requests.put(None)

    def _emit(self, number: int, results: ResultsByName) -> None:
        """Keep the results of a mini-batch. Every rank has them, one after the other."""
        with self._changed:
            if number >= self._num_returned:
                self._results.setdefault(number, results)
            self._changed.notify_all()

    # ranks on threads of this process

    def _run(self) -> None:
        assert self._in_process is not None
        pairs = zip(self._interpreters, self._requests, strict=True)
        failure: BaseException | None = None
        try:
            self._in_process.run([functools.partial(self._work, *each) for each in pairs])
        except BaseException as error:
            failure = error
        if not isinstance(failure, PipecError):  # after which somebody asks what is left
            self._forget()
        with self._changed:
            self._failure, self._over, self._is_complete = failure, True, failure is None
            self._changed.notify_all()

    def _work(self, interpreter: Interpreter, requests: _Requests) -> None:
        """Run a rank: advance as far as the script has requested, and then to the end."""
        try:
            while (request := requests.get()) is not None:
                interpreter.advance(*request)
            interpreter.finish(self._last)
        except BaseException:
            self._stop_at(0, and_finish=True)
            raise

    def _ask(self, request: _Request | None, reached: Callable[[], bool]) -> None:
        """Request something of all ranks, and wait for it."""
        try:
            for requests in self._requests:
                requests.put(request)
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or reached())
        except BaseException as interrupt:  # such as Ctrl-C; a second one does not wait for what was begun
            self._drain_at_once()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._over)
            except BaseException:
                assert self._in_process is not None
                self._in_process.fail(interrupt)
                self._stop_at(0, and_finish=True)
            raise
        if self._failure is not None:
            raise self._failure


def restore_common_version(interpreters: Sequence[Interpreter], ranks: Ranks) -> str:
    """Put a consistent version into the parameters after a failure, if there is one; says what was found.

    Stages are ahead of each other, so that no stage may stop at once and leave the model whole. But a stage
    keeps the versions that mini-batches in flight read. The newest one that every stage still has, with its
    buffers, is restored. The ranks that live all call this.
    """
    held = [(stage, found) for each in interpreters for stage, found in each.held_versions.items()]
    every = ranks.exchange_final_status(json.dumps([(stage, sorted(found)) for stage, found in held]))
    held += [(stage, {*found}) for reply in every for stage, found in json.loads(reply or "[]")]
    common = max(set.intersection(*(found for _, found in held)), default=None) if None not in every else None
    for each in interpreters:
        each.restore(common)
    if common is not None:
        return (
            f"the parameters and buffers are those after {common} mini-batches since the pipeline was last "
            "empty, the newest that all stages held, and can be saved. The optimizer's state may be some "
            "updates further; load a checkpoint to train on as if nothing had happened"
        )
    listed = "; ".join(
        f"stage {stage} holds {', '.join(map(str, sorted(found))) or 'none, for its update was cut off'}"
        for stage, found in sorted(held)
    )
    return (
        "no version of the weights is held by all stages, so that their parameters do not fit together: "
        f"{listed}, in mini-batches since the pipeline was last empty. Load a checkpoint to train on"
    )
