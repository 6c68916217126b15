"""A rank's knowledge of the others: which are alive, which have ended, what each waits for, in words."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipec.runtime.processes.stall_reports import describe_absent_rank, describe_busy_rank, format_ranks


@dataclass
class Peer:
    """The state of another rank. ``missed_heartbeats`` counts this rank's own heartbeats since its last.

    ``activity`` is what it does while it waits for the rank ``waiting_for``, and ``last_activity`` what it
    did when it waited last. ``final_status`` is what it sent when the pipeline could not go on.
    """

    writer: asyncio.StreamWriter | None = None
    texts: deque[bytes] = field(default_factory=deque)
    background_texts: deque[bytes] = field(default_factory=deque)
    missed_heartbeats: int = 0
    waiting_for: int | None = None
    activity: str = ""
    last_activity: str = ""
    ended_at: float | None = None
    closed_cleanly: bool = False
    final_status: str | None = None
    listening: "asyncio.Future[None] | None" = None


class Peers(dict[int, Peer]):
    """The other ranks as ``rank`` sees them, which sends a beat every ``interval`` seconds."""

    def __init__(self, rank: int, num_ranks: int, timeout: float, interval: float) -> None:
        super().__init__({peer: Peer() for peer in range(num_ranks) if peer != rank})
        self._rank, self._timeout, self._interval = rank, timeout, interval

    @property
    def living(self) -> list[int]:
        """The ranks whose connection has not ended."""
        return [rank for rank, peer in self.items() if peer.ended_at is None]

    def silence(self, rank: int) -> float:
        """For how many seconds a rank has shown no sign of life."""
        return self[rank].missed_heartbeats * self._interval

    def silent(self) -> str | None:
        """The ranks that seem dead before the timeout, in words; None if there are none."""
        ranks = [rank for rank in self.living if self._seems_dead(rank)]
        return self.silent_since(ranks) if ranks else None

    def _seems_dead(self, rank: int) -> bool:
        return self.silence(rank) > self._timeout / 2

    def without_final_status(self) -> list[int]:
        """The ranks that live and have not said what they have now that the pipeline cannot go on."""
        living = (rank for rank in self.living if not self._seems_dead(rank))
        return [rank for rank in living if self[rank].final_status is None]

    def silent_since(self, ranks: Sequence[int]) -> str:
        seconds = max(map(self.silence, ranks))
        return (
            f"{format_ranks(ranks)}: no sign of life for {seconds:.3g} s; the process is stopped, or its "
            "machine cannot be reached"
        )

    def ended(self, ranks: Iterable[int], ago: float = 0.0) -> str | None:
        """How the connection that ended first, at least so many seconds ago, came to its end.

        A script that ends while a rank shows no sign of life has given up on that one.
        """
        ended = [(at, rank) for rank in ranks if (at := self[rank].ended_at) is not None]
        if not ended or time.monotonic() - min(ended)[0] < ago:
            return None
        rank = min(ended)[1]
        if self[rank].closed_cleanly:
            ended_script = f"rank {rank}: its script ended, or let go of its pipeline, before this call"
            return self.silent() or ended_script
        return f"rank {rank}: its process died; its own output may say why"

    def waits_for(self, peer: int | None, activity: str) -> str:
        """The chain of waits from a rank on, in words: what each rank does, and which one it waits for.

        ``peer`` None: from the first rank with another activity than this one's ``activity``.
        """
        if peer is None:
            peer = next((rank for rank, known in self.items() if known.activity != activity), None)
        links, seen = [], {self._rank}
        while peer is not None and peer not in seen:
            seen.add(peer)
            known = self[peer]
            links.append(f"rank {peer} is {known.activity}" if known.activity else describe_busy_rank(peer))
            peer = known.waiting_for
        return "; ".join(links) or "all ranks do the same"

    def late(self) -> str | None:
        """Who has not come where others wait, in words; None if a lower rank says so, or nobody knows."""
        away = [rank for rank in self.living if not self[rank].activity or self._is_silent(rank)]
        if any(rank < self._rank and rank not in away for rank in self.living):
            return None
        return (
            "; ".join(
                describe_absent_rank(rank, self[rank].last_activity, self._is_silent(rank)) for rank in away
            )
            or None
        )

    def _is_silent(self, rank: int) -> bool:
        """Whether so many heartbeats are missing that a machine with much to do is no reason."""
        return self[rank].missed_heartbeats >= 3

    def not_connected(self) -> str:
        missing = [rank for rank, peer in self.items() if peer.writer is None]
        return (
            f"rank {self._rank} waited {self._timeout:g} s for {format_ranks(missing)}, which did not come: "
            "that process was not started, died or hangs before it makes its pipeline"
        )

    def unanswered(self, activity: str) -> str:
        missing = [rank for rank, peer in self.items() if not peer.texts]
        return (
            f"rank {self._rank} waited {self._timeout:g} s for {format_ranks(missing)}; every rank must run "
            f"the same script with the same arguments. {self.waits_for(missing[0], activity)}"
        )
