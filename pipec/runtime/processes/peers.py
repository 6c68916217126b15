"""The state of the other ranks as one rank knows it, and descriptions of it for messages."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipec.runtime.processes.packets import PacketKind
from pipec.runtime.processes.stall_reports import describe_absent_rank, describe_busy_rank, format_ranks
from pipec.runtime.processes.whereabouts import IN_A_CALL, Whereabouts


@dataclass
class Peer:
    """The state of another rank.

    ``received`` has the payloads of its unread packets. ``missed_heartbeats`` counts this rank's own
    heartbeats since the last packet of the other. ``activity`` describes its current wait, for the rank
    ``waiting_for``; ``last_activity`` its last finished wait. While it does not wait, ``whereabouts`` is the
    line of its script.
    """

    writer: asyncio.StreamWriter | None = None
    received: defaultdict[PacketKind, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    missed_heartbeats: int = 0
    waiting_for: int | None = None
    activity: str = ""
    last_activity: str = ""
    whereabouts: Whereabouts = IN_A_CALL
    ended_at: float | None = None
    closed_cleanly: bool = False
    final_status: str | None = None
    listening: "asyncio.Future[None] | None" = None


class Peers(dict[int, Peer]):
    """The other ranks by number, as ``rank`` sees them. It sends a heartbeat every ``interval`` seconds."""

    def __init__(self, rank: int, num_ranks: int, timeout: float, interval: float) -> None:
        super().__init__({peer: Peer() for peer in range(num_ranks) if peer != rank})
        self._rank, self._timeout, self._interval = rank, timeout, interval

    @property
    def living(self) -> list[int]:
        """The ranks whose connection has not ended."""
        return [rank for rank, peer in self.items() if peer.ended_at is None]

    def silence(self, rank: int) -> float:
        """Seconds since the last packet of a rank."""
        return self[rank].missed_heartbeats * self._interval

    def silent(self) -> str | None:
        """A description of the ranks that seem dead before the timeout; None without one."""
        ranks = [rank for rank in self.living if self._seems_dead(rank)]
        return self.silent_since(ranks) if ranks else None

    def _seems_dead(self, rank: int) -> bool:
        return self.silence(rank) > self._timeout / 2

    def without_final_status(self) -> list[int]:
        """The living ranks that have not sent a final status."""
        living = (rank for rank in self.living if not self._seems_dead(rank))
        return [rank for rank in living if self[rank].final_status is None]

    def silent_since(self, ranks: Sequence[int]) -> str:
        seconds = max(map(self.silence, ranks))
        return (
            f"{format_ranks(ranks)}: no sign of life for {seconds:.3g} s; the process is stopped, or its "
            "machine cannot be reached"
        )

    def ended(self, ranks: Iterable[int], ago: float = 0.0) -> str | None:
        """A description of the first of these ranks that ended, if at least ``ago`` seconds ago; else None.

        A script that ends while a rank seems dead has given up on that rank, which is described instead.
        """
        ended = [(at, rank) for rank in ranks if (at := self[rank].ended_at) is not None]
        if not ended or time.monotonic() - min(ended)[0] < ago:
            return None
        rank = min(ended)[1]
        if self[rank].closed_cleanly:
            return self.silent() or (
                f"rank {rank}: its script ended, or freed its pipeline, before this call"
            )
        return f"rank {rank}: its process died; its own output may say why"

    def waits_for(self, peer: int | None, activity: str) -> str:
        """A description of the chain of waits that begins at ``peer``: each rank and its activity.

        If ``peer`` is None, it begins at the first rank whose activity differs from ``activity``.
        """
        if peer is None:
            peer = next((rank for rank, other in self.items() if other.activity != activity), None)
        links, seen = [], {self._rank}
        while peer is not None and peer not in seen:
            seen.add(peer)
            other = self[peer]
            links.append(f"rank {peer} is {other.activity}" if other.activity else describe_busy_rank(peer))
            peer = other.waiting_for
        return "; ".join(links) or "all ranks do the same"

    def late(self) -> str | None:
        """A description of the ranks that others wait for; None if a lower rank reports them."""
        away = [rank for rank in self.living if not self[rank].activity or self._is_silent(rank)]
        if any(rank < self._rank and rank not in away for rank in self.living):
            return None
        descriptions = (
            describe_absent_rank(
                rank, self[rank].last_activity, self._is_silent(rank), self[rank].whereabouts
            )
            for rank in away
        )
        return "; ".join(descriptions) or None

    def has_time(self, rank: int) -> bool:
        """Whether a rank lives and is between two calls, such as to save, so that others wait for it."""
        peer = self[rank]
        return bool(peer.whereabouts.line) and peer.ended_at is None and not self._is_silent(rank)

    def is_held_up(self, peer: int | None) -> bool:
        """Whether the chain of waits that begins at ``peer`` ends at a rank that is between two calls.

        A wait for no particular rank, None, ends at any such rank.
        """
        seen = {self._rank}
        while peer not in seen:
            if peer is None:
                return any(map(self.has_time, self))
            if self.has_time(peer):
                return True
            if not self[peer].activity:
                return False
            seen.add(peer)
            peer = self[peer].waiting_for
        return False

    def left(self) -> str | None:
        """A description of the first rank that has left its loop by an exception; None without one."""
        found = next((rank for rank in self.living if self[rank].whereabouts.has_left), None)
        if found is None:
            return None
        where = self[found].whereabouts
        return f"rank {found}: its script left its loop by {where.exception}, and is at {where.line}"

    def _is_silent(self, rank: int) -> bool:
        """Whether more heartbeats are missing than a busy machine explains."""
        return self[rank].missed_heartbeats >= 3

    def not_connected(self) -> str:
        missing = [rank for rank, peer in self.items() if peer.writer is None]
        return (
            f"rank {self._rank} waited {self._timeout:g} s for {format_ranks(missing)}, which did not "
            "connect: that process was not started, died or hangs before it makes its pipeline"
        )

    def without(self, kind: PacketKind) -> list[int]:
        """The ranks from which no unread packet of a kind is there."""
        return [rank for rank, peer in self.items() if not peer.received[kind]]

    def unanswered(self, missing: Sequence[int], activity: str) -> str:
        return (
            f"rank {self._rank} waited {self._timeout:g} s for {format_ranks(missing)}; every rank must run "
            f"the same script with the same arguments. {self.waits_for(missing[0], activity)}"
        )
