"""A thread that checks an object at regular intervals, until it is garbage-collected."""

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Watcher(Generic[T]):
    """Calls ``check(watched)`` every ``interval`` seconds until it returns True.

    The thread does not keep ``watched`` alive. It ends when ``watched`` is garbage-collected or the process
    exits.
    """

    def __init__(self, watched: T, check: Callable[[T], bool], interval: float) -> None:
        self._stopped = threading.Event()
        arguments = weakref.ref(watched), check, interval, self._stopped
        thread = threading.Thread(target=_watch, args=arguments, name="pipec watcher", daemon=True)
        thread.start()
        self._stop = weakref.finalize(watched, _end, self._stopped, thread)

    def stop(self) -> None:
        """Stop checking. Returns without waiting for a check that runs."""
        self._stopped.set()


def _watch(
    watched: "weakref.ref[T]", check: Callable[[T], bool], interval: float, stopped: threading.Event
) -> None:
    while not stopped.wait(interval):
        object = watched()
        if object is None or check(object):
            return
        del object


def _end(stopped: threading.Event, thread: threading.Thread) -> None:
    """Join the thread: one that still runs while Python shuts down can abort the process."""
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


_JOIN_SECONDS = 1.0
