"""A thread that makes calls, one after the other."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Call = Callable[[], object]
_Calls = SimpleQueue[Call | None]


class Worker:
    """Makes the calls it is given, which must not raise. Ends when collected, or when the process exits."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, self._calls, thread)

    def submit(self, call: Call) -> None:
        self._calls.put(call)

    def wait_until_idle(self) -> None:
        """Until every call submitted so far has been made."""
        reached = threading.Event()
        self._calls.put(reached.set)
        reached.wait()


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # and with it the tensors it holds, while this thread waits for the next


def _stop(calls: _Calls, thread: threading.Thread) -> None:
    """Joins the thread, because one that still runs while Python shuts down can abort the process."""
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


_JOIN_SECONDS = 1.0
