"""The mini-batches of a script's stream on their way through a pipeline that is not flushed."""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from pipec.runtime.ahead import Ahead
from pipec.runtime.batches import Given
from pipec.runtime.execution import StreamExecution
from pipec.runtime.outcomes import StreamBatch
from pipec.runtime.stream_run import Groups

Split = Callable[[Given], StreamBatch | None]
"""Splits a batch, or returns None if it needs other programs than the first one."""


class Flow:
    """A run of the batches of ``ahead`` from the number ``first`` on, as long as they ``split`` alike.

    ``is_right`` tells whether what was compiled is right for the model as it is.
    """

    def __init__(
        self,
        execution: StreamExecution,
        ahead: Ahead,
        first: int,
        split: Split,
        seed: int,
        is_right: Callable[[], bool],
    ) -> None:
        self._execution, self._ahead, self._first, self._split = execution, ahead, first, split
        self._is_right = is_right
        self._readers = execution.num_readers
        self._lock = threading.Lock()
        self._batches: dict[int, StreamBatch] = {}
        self._reads: dict[int, int] = {}
        self._left: list[Mapping[str, Tensor]] = []
        self._over = False
        self._run = execution.begin(self._batch, seed)

    def results(self, number: int, groups: Groups) -> Mapping[str, Tensor] | None:
        """Those of batch ``number``, the next one; None if it is not among those of this run.

        Raises:
            ExecutionError, TransportError: a rank failed.
        """
        if not self._over and not self._is_right():
            self.drain()
        if self._over:
            return self._left.pop(0) if self._left else None
        self._ahead.allow(number + self._run.num_ahead + 1)
        try:
            with self._execution.dropping_gradients():
                results = self._run.results(groups)
        except BaseException:
            self._over = True
            raise
        self._over = results is None
        return results

    def drain(self) -> None:
        """Complete what was begun. Its results are those that come next."""
        if not self._over:
            self._over = True
            with self._execution.dropping_gradients():
                self._left = self._run.drain()

    def _batch(self, number: int) -> StreamBatch | None:
        """A batch by its number in this run, for one of the ranks that read each once."""
        item = self._ahead.item(self._first + number)
        if item.error is not None:
            return None
        with self._lock:
            if number not in self._batches:
                batch = self._split(item.value)
                if batch is None:
                    return None
                self._batches[number] = batch
            batch = self._batches[number]
            self._reads[number] = self._reads.get(number, 0) + 1
            if self._reads[number] == self._readers:
                del self._batches[number], self._reads[number]
                self._ahead.forget(self._first + number)
            return batch
