"""Asynchronous 1F1B: PipeDream (Narayanan et al., SOSP 2019) and PipeDream-2BW (ICML 2021).

Mini-batches follow each other without a flush, so no rank is idle in the steady state. Every stage updates
after each mini-batch, or after one for each of its replicas. Mini-batches in flight keep using an older
version of the weights; ``pipec.ir.VersionPolicy`` defines which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipec.errors import InputError
from pipec.ir import Schedule, Stream, VersionPolicy
from pipec.schedules.replicated import one_f_one_b_in_turns


@dataclass(frozen=True)
class AsynchronousSchedule:
    """An asynchronous schedule. A mini-batch has one microbatch, or at least one for each rank."""

    name: str
    versions: VersionPolicy

    def min_microbatches(self, replicas: Sequence[int]) -> int:
        """The fewest microbatches of a mini-batch, for stages with ``replicas``."""
        return sum(replicas) if self.versions is VersionPolicy.DOUBLE else 1

    def for_batches(self, replicas: Sequence[int], per_batch: int, num_batches: int) -> Schedule:
        """A schedule of consecutive mini-batches, with ``per_batch`` microbatches each.

        Stage s has ``replicas[s]`` ranks, numbered from stage to stage, which take the microbatches in turn.
        Each runs 1F1B on its own microbatches.

        Raises:
            InputError: it cannot do with so many replicas or microbatches.
        """
        stream = Stream(self.versions, per_batch)
        if reason := stream.unsupported(replicas):
            raise InputError(f"schedule {self.name!r} {reason}")
        return replace(one_f_one_b_in_turns(self.name, replicas, per_batch * num_batches), stream=stream)

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule of these microbatches with one rank for each stage."""
        return self.for_microbatches((1,) * num_ranks, num_microbatches)

    def for_microbatches(self, replicas: Sequence[int], num_microbatches: int) -> Schedule:
        """The schedule of these microbatches in the smallest possible mini-batches.

        Raises:
            InputError: it cannot do with so many replicas or microbatches.
        """
        minimum, ranks = self.min_microbatches(replicas), sum(replicas)
        if num_microbatches % minimum:
            raise InputError(
                f"schedule {self.name!r} has mini-batches of {minimum} microbatches on {ranks} ranks, but "
                f"num_microbatches is {num_microbatches}; take a multiple of {minimum}"
            )
        return self.for_batches(replicas, minimum, num_microbatches // minimum)


pipedream = AsynchronousSchedule("pipedream", VersionPolicy.STASHED)
vertical_sync = AsynchronousSchedule("pipedream-vertical-sync", VersionPolicy.VERTICAL)
pipedream_2bw = AsynchronousSchedule("pipedream-2bw", VersionPolicy.DOUBLE)

ASYNCHRONOUS_SCHEDULES: Mapping[str, AsynchronousSchedule] = {
    each.name: each for each in (pipedream, vertical_sync, pipedream_2bw)
}
"""Asynchronous schedules, by name. Synchronous ones are in ``registry``."""
