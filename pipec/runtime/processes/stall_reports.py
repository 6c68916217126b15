"""The limit of waits, reports of long ones on the console, and descriptions of waiting ranks for messages."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipec.console import logger
from pipec.runtime.processes.whereabouts import Whereabouts

STALL_SECONDS = 10.0
"""A wait of so many seconds, or a quarter of the timeout, is reported, and again each time it doubles."""


class WaitStatus(NamedTuple):
    """A wait: the ``activity`` of a rank that waits for ``peer``, or for any rank.

    A wait that is ``expected`` to take long, as while rank 0 compiles, is not reported. One that is
    ``limited`` fails after the timeout. Waits are compared by identity.
    """

    activity: str = ""
    peer: int | None = None
    expected: bool = False
    limited: bool = False


NOT_WAITING = WaitStatus()


@dataclass(slots=True)
class CurrentWait:
    """The current wait of a rank, and the activity of its last finished wait."""

    now: WaitStatus = NOT_WAITING
    last_activity: str = ""


class WaitScope:
    """A reusable context manager in which a rank waits. Each entry is a new wait."""

    __slots__ = ("_before", "_wait", "_waits")

    def __init__(
        self, waits: CurrentWait, activity: str, peer: int | None, expected: bool, limited: bool
    ) -> None:
        self._waits, self._wait = waits, (activity, peer, expected, limited)
        self._before = NOT_WAITING

    def __enter__(self) -> None:
        self._before, self._waits.now = self._waits.now, WaitStatus(*self._wait)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._waits.now, self._waits.last_activity = self._before, self._wait[0]


class WaitLimit:
    """Finds a limited wait that takes longer than the timeout, from one heartbeat to the next.

    It counts heartbeats, which stop with the process, so that a process that was suspended blames no other.
    """

    def __init__(self, timeout: float, interval: float) -> None:
        self._num_allowed = timeout / interval
        self._wait, self._num_heartbeats = NOT_WAITING, 0

    def is_over(self, wait: WaitStatus, is_held_up: Callable[[], bool]) -> bool:
        """Whether the wait is too long. A heartbeat at which it ``is_held_up`` counts as the first."""
        if wait is not self._wait or not wait.limited or is_held_up():
            self._wait, self._num_heartbeats = wait, 0
        self._num_heartbeats += 1
        return self._num_heartbeats > self._num_allowed + 1

    def restart(self) -> None:
        """Count again from the next heartbeat: something that was waited for has arrived."""
        self._num_heartbeats = 0


class StallReporter:
    """Reports long waits of a rank, which it polls: a wait that ends between two polls costs nothing."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._first = rank, min(STALL_SECONDS, timeout / 4)
        self._is_reported, self._next = False, self._first
        self._watch(NOT_WAITING)

    def check(self, wait: WaitStatus, late: Callable[[], str | None], has_failed: bool) -> None:
        """Print who is late if this wait is long, or that a reported wait is over.

        ``late`` returns a description of the late ranks, or None if another rank reports them.
        """
        now = time.monotonic()
        if wait is not self._wait:
            if self._is_reported and not has_failed:
                _report(f"rank {self._rank} goes on after {now - self._since:.0f} s: all have arrived")
            self._watch(wait)
        elif self._is_long(now) and (ranks := late()):
            self._is_reported, self._next = True, 2 * self._next
            _report(f"rank {self._rank} has waited {now - self._since:.0f} s, {wait.activity}; {ranks}")

    def is_long(self) -> bool:
        """Whether the wait that was checked last is long enough to be reported."""
        return self._is_reported or self._is_long(time.monotonic())

    def _is_long(self, now: float) -> bool:
        return bool(self._wait.activity) and not self._wait.expected and now - self._since >= self._next

    def _watch(self, wait: WaitStatus) -> None:
        self._wait, self._since = wait, time.monotonic()
        self._next, self._is_reported = self._first, False


def _report(text: str) -> None:
    logger.warning("%s", text)


def describe_absent_rank(rank: int, last_activity: str, is_silent: bool, whereabouts: Whereabouts) -> str:
    state = "gives no sign of life" if is_silent else "is alive and elsewhere in its script"
    if whereabouts.line and not is_silent:
        state += f", {whereabouts}"
    return f"rank {rank} has not arrived: it {state}, and its last wait was {last_activity or 'none'}"


def describe_busy_rank(rank: int) -> str:
    return (
        f"rank {rank} is alive, but waits for no other rank: it hangs, computes for long, or is elsewhere in "
        "its script. All ranks make the same calls in the same order: check that no `if rank == ...`, "
        "exception or shorter loop keeps that rank from this call"
    )


def describe_overdue_wait(activity: str, timeout: float, chain: str) -> str:
    return f"{activity}, took more than {timeout:g} s; {chain}"


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
