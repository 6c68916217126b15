"""SIGINT and SIGTERM end all ranks after the same step.

Ctrl-C and the SIGTERM of a scheduler may reach one rank in the middle of a step. It records the signal, and
sends it with the call digest before the next step or mini-batch. Then all ranks exit there.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pipec.console import logger, notice
from pipec.runtime.processes.launch import world

FORCED_EXIT_SECONDS = 1.0
"""A second signal ends the process at once if it comes so many seconds after the first.

An earlier one does not: launcher and scheduler may both send the same signal.
"""

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The handlers that this module replaces. A handler that the script installed stays."""


class StopSignals:
    """The pending stop signal of this process, and the handlers that record it; see ``STOP_SIGNALS``.

    Only the main thread can install handlers; on another thread, ``install`` does nothing.
    """

    def __init__(self) -> None:
        self.pending = 0
        """The number of the pending signal, or 0."""
        self._first_at = 0.0
        self._replaced: dict[int, Any] = {}

    def install(self) -> None:
        """Record SIGTERM from now on, and SIGINT where each rank is a process."""
        if self._replaced or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM) if world().is_distributed else (signal.SIGTERM,):
            if signal.getsignal(number) is _DEFAULTS[number]:
                self._replaced[number] = signal.signal(number, self._record)

    def uninstall(self) -> None:
        """Restore the previous handlers, and drop the pending signal."""
        self.pending = 0
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def uninstalled(self) -> Iterator[None]:
        """The previous handlers inside a ``with``, for work of minutes between two steps.

        If it raises, they stay until ``install`` is called again.
        """
        was_installed, pending = bool(self._replaced), self.pending
        self.uninstall()
        try:
            yield
        finally:
            self.pending = pending
        if was_installed:
            self.install()

    def _record(self, number: int, frame: object) -> None:
        if self.pending and time.monotonic() - self._first_at > FORCED_EXIT_SECONDS:
            raise _exit_error(number, f"{signal.Signals(number).name} came twice")
        if not self.pending:
            self._first_at = time.monotonic()
            text = (
                f"pipec: {signal.Signals(number).name}: all ranks end before the next step; once more "
                "ends this process at once\n"
            )
            if logger.isEnabledFor(logging.WARNING):
                os.write(2, text.encode())  # a signal may come in the middle of a print
        self.pending = max(self.pending, number)


STOP_SIGNALS = StopSignals()

os.register_at_fork(after_in_child=STOP_SIGNALS.uninstall)


def exit_all_ranks(
    signals: Sequence[int], num_steps: int, before: Sequence[Callable[[], object]]
) -> NoReturn:
    """Exit on every rank, after the calls in ``before``. ``signals`` has each rank's pending signal, or 0.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        SystemExit: the signal was SIGTERM; the status is 143, as of a process that it ended.
    """
    number = max(signals)
    STOP_SIGNALS.uninstall()
    what = f"rank {signals.index(number)} was sent {signal.Signals(number).name}"
    notice(f"{what}: all ranks end after step {num_steps}")
    for call in before:
        call()
    raise _exit_error(number, f"{what}; all ranks have made {num_steps} steps")


def _exit_error(number: int, why: str) -> BaseException:
    return KeyboardInterrupt(why) if number == signal.SIGINT else SystemExit(128 + number)
