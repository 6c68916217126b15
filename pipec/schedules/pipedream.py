"""1F1B without a flush: PipeDream (Narayanan et al., SOSP 2019) and PipeDream-2BW (ICML 2021).

Mini-batches follow each other, so that in the steady state no rank is idle. Every stage updates after each of
them, and uses an older version of its weights for those that it has begun before; ``pipec.ir.Versions`` says
which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipec.errors import InputError
from pipec.ir import Schedule, Stream, Versions
from pipec.schedules.one_f_one_b import one_f_one_b


@dataclass(frozen=True)
class Asynchronous:
    """A schedule without a flush. A mini-batch has one microbatch, or at least one for each rank."""

    name: str
    versions: Versions

    def per_batch(self, num_ranks: int) -> int:
        """The fewest microbatches of a mini-batch."""
        return num_ranks if self.versions is Versions.DOUBLE else 1

    def of_batches(self, num_ranks: int, per_batch: int, num_batches: int) -> Schedule:
        """So many mini-batches, of ``per_batch`` microbatches each, that follow each other.

        Raises:
            InputError: it cannot do with so many microbatches.
        """
        least = self.per_batch(num_ranks)
        if self.versions is not Versions.DOUBLE and per_batch != 1:
            raise InputError(
                f"schedule {self.name!r} runs a mini-batch as one microbatch, but microbatches is "
                f"{per_batch}; leave it out, or take pipedream-2bw, which adds up the gradients of several"
            )
        if per_batch < least:
            raise InputError(
                f"schedule {self.name!r} needs a mini-batch of {least} microbatches or more on {num_ranks} "
                f"ranks, but microbatches is {per_batch}: with fewer, two versions of weights do not suffice"
            )
        one = one_f_one_b(num_ranks, per_batch * num_batches)
        return replace(one, name=self.name, stream=Stream(self.versions, per_batch))

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule of so many microbatches in mini-batches that are as small as can be."""
        least = self.per_batch(num_ranks)
        if num_microbatches % least:
            raise InputError(
                f"schedule {self.name!r} has mini-batches of {least} microbatches on {num_ranks} ranks, but "
                f"num_microbatches is {num_microbatches}; take a multiple of {least}"
            )
        return self.of_batches(num_ranks, least, num_microbatches // least)


pipedream = Asynchronous("pipedream", Versions.STASHED)
vertical_sync = Asynchronous("pipedream-vertical-sync", Versions.VERTICAL)
pipedream_2bw = Asynchronous("pipedream-2bw", Versions.DOUBLE)

ASYNCHRONOUS: Mapping[str, Asynchronous] = {
    each.name: each for each in (pipedream, vertical_sync, pipedream_2bw)
}
"""Schedules of streams, by name. Those of steps are in ``fixed``."""
