"""Signals that ask a script to end: noted when they come, and followed by all ranks at the same step.

Ctrl-C and the SIGTERM of a scheduler reach some rank in the middle of something. It notes them here, and says
so in what ranks exchange before their next step or mini-batch anyway. Then all of them end there.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pipec.console import log
from pipec.runtime.processes.launch import world

FORCED_EXIT_SECONDS = 1.0
"""A second signal ends the process at once if so many seconds are between it and the first one.

Launchers and schedulers may both send the same signal.
"""

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The handlers in whose place those of this module are put. A handler of the script's own stays."""


class StopSignals:
    """The signals that this process has been sent. There is one such object, ``STOP_SIGNALS``.

    Only the main thread can put handlers in place; on another one, signals do what they did before.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._at = 0.0
        self._replaced: dict[int, Any] = {}

    @property
    def pending(self) -> int:
        """The number of the signal that has come and that nobody has followed yet, or 0."""
        return self._asked

    def install(self) -> None:
        """Note signals from now on: SIGTERM, and where ranks are processes, SIGINT, too."""
        if self._replaced or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM) if world().is_distributed else (signal.SIGTERM,):
            if signal.getsignal(number) is _DEFAULTS[number]:
                self._replaced[number] = signal.signal(number, self._note)

    def uninstall(self) -> None:
        """Let signals do what they did before, and forget those that were noted."""
        self._asked = 0
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def uninstalled(self) -> Iterator[None]:
        """Let signals do inside a ``with`` what they did before, as where no step comes for minutes.

        If it fails, so they do from then on, until ``listen`` is called again.
        """
        listened, asked = bool(self._replaced), self._asked
        self.uninstall()
        try:
            yield
        finally:
            self._asked = asked
        if listened:
            self.install()

    def _note(self, number: int, frame: object) -> None:
        if self._asked and time.monotonic() - self._at > FORCED_EXIT_SECONDS:
            raise _exit_error(number, f"{signal.Signals(number).name} came twice")
        if not self._asked:
            self._at = time.monotonic()
            once_more = "once more ends this process at once"
            told = f"pipec: {signal.Signals(number).name}: all ranks end before the next step; {once_more}\n"
            os.write(2, told.encode())  # a signal may come in the middle of a print
        self._asked = max(self._asked, number)


STOP_SIGNALS = StopSignals()

os.register_at_fork(after_in_child=STOP_SIGNALS.uninstall)


def exit_all_ranks(asked: Sequence[int], num_steps: int, before: Sequence[Callable[[], object]]) -> NoReturn:
    """End on every rank, after ``before`` was called. ``asked`` has the signal of each rank, or 0.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        SystemExit: it was SIGTERM; the status is 143, as if that had ended the process.
    """
    number = max(asked)
    STOP_SIGNALS.uninstall()
    what = f"rank {asked.index(number)} was sent {signal.Signals(number).name}"
    log(f"pipec: {what}: all ranks end after step {num_steps}")
    for call in before:
        call()
    raise _exit_error(number, f"{what}; all ranks have made {num_steps} steps")


def _exit_error(number: int, why: str) -> BaseException:
    return KeyboardInterrupt(why) if number == signal.SIGINT else SystemExit(128 + number)
