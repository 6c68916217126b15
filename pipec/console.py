"""What pipec says, once however many processes run the script.

pipec speaks through ``logging.getLogger("pipec")``, and through ``warnings`` where results may not be what
the script expects. Records go to the handlers of the script; if it has none, to stderr, behind "pipec: ".
``torchrun`` starts the same script on every rank: rank 0 speaks, and the others are silent.
"""

import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from rich import get_console
from rich.console import Console
from rich.status import Status
from rich.text import Text

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


@rank_zero_only
def notice(message: str, *args: object) -> None:
    """Log what all ranks have to say, once."""
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


@functools.cache
def terminal() -> Console:
    """The console of activities: stderr, since stdout is the script's."""
    return Console(stderr=True, quiet=not is_rank_zero(), highlight=False, emoji=False, soft_wrap=True)


STATUS_DELAY_SECONDS = 2.0
"""Blocks that take no longer than this say nothing."""


class delayed_status:
    """Says what a ``with`` block does, and why, if it takes more than ``STATUS_DELAY_SECONDS``.

    In a terminal, a line shows the activity and its ``progress``, whose text changes, and disappears at the
    end; of several blocks, nested or on several threads, it shows the last one. Elsewhere, and beside a
    progress bar, both are logged once, and the seconds that the block took when it ends.
    """

    def __init__(self, what: str, progress: object = "") -> None:
        self._what, self._progress = what, progress
        self._started = time.perf_counter()
        self._is_logged = self._has_ended = False
        self._timer = threading.Timer(STATUS_DELAY_SECONDS, self._appear)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._timer.cancel()
        with _STATUS_LINE.changes:
            self._has_ended = True
            _STATUS_LINE.remove(self)
        if self._is_logged and kind is None:
            notice("%s: done in %.0f s", self._what, time.perf_counter() - self._started)

    def _appear(self) -> None:
        with _STATUS_LINE.changes:
            if logger.isEnabledFor(logging.INFO) and not self._has_ended and not _STATUS_LINE.add(self):
                self._is_logged = True
                notice("%s", self)

    def __str__(self) -> str:
        return f"{self._what}: {progress}" if (progress := str(self._progress)) else self._what


class status:
    """Shows what a ``with`` block does from its begin on, in a terminal alone."""

    def __init__(self, activity: str) -> None:
        self._activity = activity

    def now(self, activity: str) -> None:
        self._activity = activity
        _STATUS_LINE.draw()

    def __enter__(self) -> Self:
        if terminal().is_terminal:
            _STATUS_LINE.add(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _STATUS_LINE.remove(self)

    def __str__(self) -> str:
        return f"{self._activity} ..."


class _StatusLine:
    """The one line in a terminal that shows the last activity in progress, unless a bar is there."""

    def __init__(self) -> None:
        self._activities: list[object] = []
        self._line: Status | None = None
        self.changes = threading.RLock()

    def add(self, activity: object) -> bool:
        """Show ``activity`` until it is removed. False: there is no terminal, or a bar is shown."""
        with self.changes:
            if not terminal().is_terminal or _script_shows_bar():
                return False
            self._activities.append(activity)
            self.draw()
            return True

    def remove(self, activity: object) -> None:
        with self.changes:
            if activity in self._activities:
                self._activities.remove(activity)
                self.draw()

    def draw(self) -> None:
        """Show the last activity as it is now."""
        with self.changes:
            if not self._activities:
                if self._line is not None:
                    self._line.stop()
                self._line = None
            elif self._line is not None:
                self._line.update(_Current(self._activities[-1]))
            else:
                self._line = Status(_Current(self._activities[-1]), console=terminal())
                self._line.start()


class _Current:
    """The text of an activity whenever the line is drawn, some times a second."""

    def __init__(self, activity: object) -> None:
        self._activity = activity

    def __rich__(self) -> Text:
        return Text(f"pipec: {self._activity}", overflow="ellipsis", no_wrap=True)


_STATUS_LINE = _StatusLine()


def _script_shows_bar() -> bool:
    """Whether a bar of tqdm, as of transformers' Trainer, or of rich is in the terminal."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is not None:
        with tqdm.tqdm.get_lock():
            if any(not bar.disable for bar in tqdm.tqdm._instances):
                return True
    console = get_console()
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))
