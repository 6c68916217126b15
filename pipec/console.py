"""Output of a script, printed once, however many processes run the script.

``torchrun`` starts the same script on every rank. These helpers act on rank 0 and are silent on the
others, so that a training script needs no rank branches.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

P = ParamSpec("P")
T = TypeVar("T")


def is_rank_zero() -> bool:
    """True in a process started alone, and in the first of those that ``torchrun`` started."""
    return os.environ.get("RANK", "0") == "0"


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """``function`` on rank 0; on every other rank a call does nothing and returns None."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return wrapper


@functools.cache
def terminal() -> Console:
    """The console that ``log`` and ``progress`` share, so that lines appear above a moving bar."""
    return Console(quiet=not is_rank_zero(), highlight=False, emoji=False, soft_wrap=True)


def log(*objects: object) -> None:
    """``print`` on rank 0, as plain text and safe beside a running ``progress`` bar."""
    terminal().print(*map(str, objects), markup=False)  # rich would print a dataclass by its fields


class progress(Generic[T]):
    """Iterate over ``items`` behind a progress bar; ``show`` puts text at its end.

    The bar appears on rank 0 and only in a terminal: a log file gets no bar.

    >>> for step in (bar := progress(range(100), "training")):
    ...     bar.show(f"step {step}")
    """

    def __init__(self, items: Sequence[T], description: str = "") -> None:
        self.items = items
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=terminal(),
            disable=not terminal().is_terminal,
        )
        self._task = self._bar.add_task(description, total=len(items), text="")

    def __iter__(self) -> Iterator[T]:
        with self._bar:
            for item in self.items:
                yield item
                self._bar.advance(self._task)

    def show(self, text: str) -> None:
        """Show ``text``, such as the current loss, at the end of the bar."""
        self._bar.update(self._task, text=text)


STATUS_DELAY_SECONDS = 2.0
"""Blocks that take no longer than this print nothing."""


class delayed_status:
    """Prints what a ``with`` block does, and why, if it takes more than ``STATUS_DELAY_SECONDS``.

    In a terminal, a line shows the current activity and disappears at the end. Elsewhere, stderr gets one
    line.

    >>> with delayed_status("pipec: compiling, for the first time") as status:
    ...     status.now("search")
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._now = ""
        self._timer = threading.Timer(STATUS_DELAY_SECONDS, self._appear)
        self._timer.daemon = True
        self._status: Status | None = None
        self._changes = threading.Lock()

    def now(self, activity: str) -> None:
        """Show ``activity`` from now on, if anything is shown."""
        with self._changes:
            self._now = activity
            if self._status is not None:
                self._status.update(self._text())

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._timer.cancel()
        with self._changes:
            if self._status is not None:
                self._status.stop()

    def _appear(self) -> None:
        with self._changes:
            if not terminal().is_terminal:
                rank_zero_only(print)(self._text(), file=sys.stderr, flush=True)
                return
            self._status = Status(self._text(), console=terminal())
            try:
                self._status.start()
            except LiveError:  # the script shows a bar of its own
                self._status = None
                log(self._text())

    def _text(self) -> Text:
        return Text(f"{self._what}: {self._now}" if self._now else self._what)
