"""What ranks wait for, as their heartbeats say: who is lost, which wait is too long, and who is late."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STALL_SECONDS = 10.0
"""A wait of so many seconds, or a quarter of the timeout, is reported, and again each time it doubles."""


class WaitStatus(NamedTuple):
    """A wait: the ``activity`` of a rank that waits for ``peer``, or for any rank.

    A wait that is ``expected`` to take long, as while rank 0 compiles, is not reported. One that is
    ``limited`` fails after the timeout. Waits of one rank are told apart by identity.
    """

    activity: str = ""
    peer: int | None = None
    expected: bool = False
    limited: bool = False


NOT_WAITING = WaitStatus()


@dataclass
class _RankState:
    """What a rank said last. ``missed_heartbeats`` counts this rank's own since then.

    ``wait`` is its ``wait_number``-th; it has lasted for ``num_heartbeats`` of that rank, of which
    ``num_limited`` count for the timeout; it is reported after ``next_report`` seconds. ``line`` is where its
    script is between two calls.
    """

    has_joined: bool = False
    was_closed: bool = False
    has_ended: bool = False
    missed_heartbeats: int = 0
    wait_number: int = -1
    wait: WaitStatus = NOT_WAITING
    num_heartbeats: int = 0
    num_limited: int = 0
    next_report: float = 0.0
    last_activity: str = ""
    line: str = ""

    @property
    def is_living(self) -> bool:
        return self.has_joined and not self.has_ended


class Judge:
    """Finds ranks that are lost, waits that are too long, and ranks that are late.

    Rank 0 judges all ranks; another rank judges rank 0, and its own waits once rank 0 has ended. Time is
    counted in heartbeats, one every ``interval`` seconds, which stop with their process: so one that was
    suspended blames no other.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float, interval: float) -> None:
        known = range(num_ranks) if rank == 0 else sorted({0, rank})
        self._rank, self._timeout, self._interval = rank, timeout, interval
        self._states = {each: _RankState() for each in known}
        self._states[rank].has_joined = True
        self._first_report = min(STALL_SECONDS, timeout / 4)

    def join(self, rank: int) -> None:
        self._states[rank].has_joined = True

    def heard(self, rank: int) -> None:
        self._states[rank].missed_heartbeats = 0

    def note(self, rank: int, number: int, wait: WaitStatus, last_activity: str, line: str) -> None:
        """Take the heartbeat of a rank."""
        state = self._states[rank]
        lasts = number == state.wait_number
        state.wait_number, state.wait, state.last_activity, state.line = number, wait, last_activity, line
        state.num_heartbeats = state.num_heartbeats + 1 if lasts else 0
        state.num_limited = state.num_limited + 1 if lasts else 0
        state.next_report = state.next_report if lasts else 0.0

    def close(self, rank: int) -> None:
        self._states[rank].was_closed = True

    def end(self, rank: int) -> bool:
        """Note the end of a rank's connection; returns whether its script had closed it."""
        self._states[rank].has_ended = True
        return self._states[rank].was_closed

    def beat(self) -> None:
        """Count a heartbeat of this rank."""
        for rank in self._others():
            self._states[rank].missed_heartbeats += 1

    def answering(self) -> list[int]:
        """The other ranks that live and are not silent."""
        return [rank for rank in self._others() if not self._is_silent(rank)]

    def lost(self) -> str | None:
        """A description of the ranks without a sign of life for the timeout; None without one."""
        silence = {rank: self._states[rank].missed_heartbeats * self._interval for rank in self._others()}
        lost = [rank for rank, seconds in silence.items() if seconds >= self._timeout]
        if not lost:
            return None
        return (
            f"{format_ranks(lost)}: no sign of life for {max(silence.values()):.3g} s; the process is "
            "stopped, or its machine cannot be reached"
        )

    def overdue(self) -> str | None:
        """A description of a limited wait that takes longer than the timeout; None without one.

        While a rank is silent, none is: that one is likely to be lost.
        """
        if any(map(self._is_silent, self._others())):
            return None
        for rank in self._states if self._rank == 0 else [self._rank] * self._states[0].has_ended:
            state = self._states[rank]
            if not state.wait.limited or not state.is_living:
                continue
            if self._is_held_up(rank, state.wait.peer):
                state.num_limited = 0
            elif state.num_limited * self._interval > self._timeout + self._interval:
                activity = state.wait.activity
                chain = self.chain(rank, state.wait.peer, activity)
                return f"rank {rank}: {describe_overdue_wait(activity, self._timeout, chain)}"
        return None

    def chain(self, rank: int, peer: int | None, activity: str) -> str:
        """A description of the chain of waits of a rank that begins at ``peer``: each rank and its activity.

        If ``peer`` is None, it begins at the first rank whose activity differs from ``activity``.
        """
        if self._rank != 0:
            return "rank 0, which knows what other ranks do, has ended" * self._states[0].has_ended
        if peer is None:
            others = ((each, state) for each, state in self._states.items() if each != rank)
            peer = next((each for each, state in others if state.wait.activity != activity), None)
        links, seen = [], {rank}
        while peer is not None and peer not in seen:
            seen.add(peer)
            doing = self._states[peer].wait.activity
            links.append(f"rank {peer} is {doing}" if doing else _describe_busy_rank(peer))
            peer = self._states[peer].wait.peer
        return "; ".join(links) or "all ranks do the same"

    def report(self) -> str | None:
        """A line for the console once a wait has become long, and each time it doubles; else None.

        Rank 0 reports the first rank that waits; another rank only that rank 0 is silent.
        """
        if self._rank != 0 and not self._is_silent(0):
            return None
        for rank, state in self._states.items():
            seconds = self._waited(rank)
            is_long = state.wait.activity and not state.wait.expected and seconds >= self._first_report
            if is_long and state.is_living:
                if seconds >= state.next_report and (late := self._late()):
                    state.next_report = 2 * seconds
                    return f"rank {rank} has waited {seconds:.0f} s, {state.wait.activity}; {late}"
                return None
        return None

    def _others(self) -> list[int]:
        return [rank for rank, state in self._states.items() if rank != self._rank and state.is_living]

    def _is_silent(self, rank: int) -> bool:
        """Whether more heartbeats are missing than a busy machine explains."""
        return self._states[rank].missed_heartbeats >= 3

    def _is_held_up(self, rank: int, peer: int | None) -> bool:
        """Whether the chain of waits that begins at ``peer`` ends at a rank that is between two calls.

        A wait for no particular rank, None, ends at any such rank.
        """
        seen = {rank}
        while peer not in seen and (peer is None or peer in self._states):
            if peer is None:
                return any(map(self._is_between_calls, self._states))
            if self._is_between_calls(peer):
                return True
            if not self._states[peer].wait.activity:
                return False
            seen.add(peer)
            peer = self._states[peer].wait.peer
        return False

    def _is_between_calls(self, rank: int) -> bool:
        """Whether a rank lives and is between two calls, such as to save, so that others wait for it."""
        state = self._states[rank]
        return bool(state.line) and state.is_living and not self._is_silent(rank)

    def _waited(self, rank: int) -> float:
        return self._states[rank].num_heartbeats * self._interval

    def _late(self) -> str:
        """A description of the ranks that others wait for."""
        late = []
        for rank, state in self._states.items():
            is_silent = self._is_silent(rank)
            if not state.has_joined:
                late.append(f"rank {rank} has not connected")
            elif state.is_living and (is_silent or not state.wait.activity):
                doing = (
                    f"elsewhere in its script, at {state.line}" if state.line else "inside a call of pipec"
                )
                doing = "gives no sign of life" if is_silent else f"is alive and {doing}"
                last = state.last_activity or "none"
                late.append(f"rank {rank} has not arrived: it {doing}, and its last wait was {last}")
        return "; ".join(late)


def _describe_busy_rank(rank: int) -> str:
    return (
        f"rank {rank} is alive, but waits for no other rank: it hangs, computes for long, or is elsewhere in "
        "its script. All ranks make the same calls in the same order: check that no `if rank == ...`, "
        "exception or shorter loop keeps that rank from this call"
    )


def describe_overdue_wait(activity: str, timeout: float, chain: str) -> str:
    return f"{activity}, took more than {timeout:g} s" + f"; {chain}" * bool(chain)


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
