"""What pipec says, once however many processes run the script.

pipec speaks through ``logging.getLogger("pipec")``, and through ``warnings`` where results may not be what
the script expects. Records go to the handlers of the script; if it has none, to stderr, behind "pipec: ".
``torchrun`` starts the same script on every rank: rank 0 speaks, also that of a group, and the others are
silent.
"""

import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pipec.errors import PipecWarning

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("pipec")
"""Everything that pipec says. It begins with level INFO."""


class _StderrHandler(logging.Handler):
    """Writes to stderr if neither this logger nor the root logger has a handler of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("pipec: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


if not logger.handlers:
    logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)


def is_rank_zero() -> bool:
    """True in a process started alone, and in the first of those that ``torchrun`` started."""
    return os.environ.get("RANK", "0") == "0"


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """``function`` on rank 0; on every other rank a call does nothing and returns None."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return wrapper


_leads_group = threading.Event()


def speak_for_group() -> None:
    """Let this process, the first of a group of processes, say what all ranks of a pipeline have to say."""
    _leads_group.set()


def notice(message: str, *args: object) -> None:
    """Log what all ranks of a pipeline have to say, once."""
    if _leads_group.is_set() or is_rank_zero():
        logger.info(message, *args)


def warn(message: str) -> None:
    """Issue a warning at the line of the script, which ``-W error`` makes an error."""
    depth, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("pipec", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, PipecWarning, stacklevel=depth)


@rank_zero_only
def log(*objects: object) -> None:
    """``print`` on rank 0; the other ranks print nothing."""
    print(*objects, flush=True)


STATUS_DELAY_SECONDS = 2.0
"""Blocks that take no longer than this say nothing."""


class delayed_status:
    """Logs what a ``with`` block does if it takes long, and its seconds at its end.

    Long is more than ``STATUS_DELAY_SECONDS``.
    """

    def __init__(self, what: str) -> None:
        self._what, self._started = what, time.perf_counter()
        self._changes, self._is_logged, self._has_ended = threading.Lock(), False, False
        self._timer = threading.Timer(STATUS_DELAY_SECONDS, self._log)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._timer.cancel()
        with self._changes:
            self._has_ended = True
        if self._is_logged and kind is None:
            notice("%s: done in %.0f s", self._what, time.perf_counter() - self._started)

    def _log(self) -> None:
        with self._changes:
            if not self._has_ended:
                self._is_logged = True
                notice("%s", self._what)
