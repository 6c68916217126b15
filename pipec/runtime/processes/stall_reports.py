"""Reports of long waits on the console, and descriptions of what ranks wait for."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STALL_SECONDS = 10.0
"""Seconds, or a quarter of the timeout: a longer wait is reported, and again each time it doubles."""


class WaitStatus(NamedTuple):
    """A wait: the ``activity`` of a rank that waits for ``peer``, or for any other rank.

    One that is ``expected`` to take long, as while rank 0 compiles, is not reported. Each wait is its own
    object.
    """

    activity: str = ""
    peer: int | None = None
    expected: bool = False


NOT_WAITING = WaitStatus()


@dataclass(slots=True)
class CurrentWait:
    """The wait of a rank ``now``, and the ``last_activity`` that waited."""

    now: WaitStatus = NOT_WAITING
    last_activity: str = ""


class WaitScope:
    """A ``with`` inside which a rank waits. It can be entered again, and is a wait of its own each time."""

    __slots__ = ("_before", "_wait", "_waits")

    def __init__(self, waits: CurrentWait, activity: str, peer: int | None, expected: bool) -> None:
        self._waits, self._wait = waits, (activity, peer, expected)
        self._before = NOT_WAITING

    def __enter__(self) -> None:
        self._before, self._waits.now = self._waits.now, WaitStatus(*self._wait)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._waits.now, self._waits.last_activity = self._before, self._wait[0]


class StallReporter:
    """Looks at the waits of a rank from time to time. A wait that is over between two looks costs nothing."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._first = rank, min(STALL_SECONDS, timeout / 4)
        self._told, self._next = False, self._first
        self._follow(NOT_WAITING)

    def check(self, wait: WaitStatus, late: Callable[[], str | None], has_failed: bool) -> None:
        """Say whom this wait is for if it has taken long, or that a reported one is over.

        ``late`` says who has not come and what they do; None if another rank tells it.
        """
        now = time.monotonic()
        if wait is not self._wait:
            if self._told and not has_failed:
                _say(f"rank {self._rank} goes on after {now - self._since:.0f} s: all have arrived")
            self._follow(wait)
        elif self._is_long(now) and (what := late()):
            self._told, self._next = True, 2 * self._next
            _say(f"rank {self._rank} has waited {now - self._since:.0f} s, {wait.activity}; {what}")

    def _is_long(self, now: float) -> bool:
        return bool(self._wait.activity) and not self._wait.expected and now - self._since >= self._next

    def _follow(self, wait: WaitStatus) -> None:
        self._wait, self._since = wait, time.monotonic()
        self._next, self._told = self._first, False


def _say(what: str) -> None:
    print(f"pipec: {what}", file=sys.stderr, flush=True)


def describe_absent_rank(rank: int, last_activity: str, is_silent: bool) -> str:
    """The description of an absent rank: whether it is alive, and its last wait."""
    state = "gives no sign of life" if is_silent else "lives and is elsewhere"
    return f"rank {rank} has not arrived: it {state}, and its last wait was {last_activity or 'none'}"


def describe_busy_rank(rank: int) -> str:
    return (
        f"rank {rank} lives, but waits for no other rank: it hangs, computes that long, or is elsewhere. All "
        "ranks make the same calls in the same order: see that no `if rank == ...`, exception or shorter "
        "loop keeps that rank from this one"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
