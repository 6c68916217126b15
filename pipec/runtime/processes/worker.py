"""A thread that runs jobs one after the other."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]
_Jobs = SimpleQueue[Job | None]


class Worker:
    """Runs jobs in the order they were submitted. A job must not raise.

    The thread ends when its Worker is garbage-collected, or when the process exits.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, self._jobs, thread)

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def wait_until_idle(self) -> None:
        """Return once every job submitted so far has run."""
        reached = threading.Event()
        self._jobs.put(reached.set)
        reached.wait()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors are freed while this thread waits for the next job


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    """Join the thread: one that still runs while Python shuts down can abort the process."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


_JOIN_SECONDS = 1.0
