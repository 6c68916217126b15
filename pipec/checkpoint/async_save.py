"""A checkpoint that is written while the training goes on, and whose failure is always reported."""

import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from pipec.console import logger


class AsyncSave(Future[None]):
    """A checkpoint that is being written: ``result()`` waits until it is complete.

    ``result()`` raises the error, if there was one. If it is not called, the next save or load of the
    pipeline raises the error. If there is none, the process waits for the checkpoint before it ends, logs
    the error, and exits with 1.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._at_exit = multiprocessing.util.Finalize(None, self._before_exit, exitpriority=_BEFORE_OTHERS)
        threading.Thread(target=self._run, args=(write,), name="pipec checkpoint", daemon=True).start()

    def result(self, timeout: float | None = None) -> None:
        if (error := self.exception(timeout)) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._at_exit.cancel()
        return error

    @property
    def is_unobserved(self) -> bool:
        """Whether nobody has seen yet how it ended."""
        return self._at_exit.still_active()

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def _before_exit(self) -> None:
        """Wait, since other processes depend on this one. Raising here would not change the exit status."""
        if (error := self.exception()) is not None:
            logger.error("%s", error)
            multiprocessing.util.Finalize(None, _exit_with_failure, exitpriority=_AFTER_OTHERS)


def _exit_with_failure() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


_BEFORE_OTHERS, _AFTER_OTHERS = 10, -100
"""Priorities at exit: connections to other processes are closed in between."""
