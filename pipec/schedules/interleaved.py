"""Interleaved 1F1B: 1F1B over several smaller stages on each rank (Narayanan et al., SC 2021)."""

import numpy as np

from pipec.errors import InputError
from pipec.ir import Phase, Schedule
from pipec.ir.columns import PHASE_CODE, ComputeColumns, Ints
from pipec.schedules.order_builder import loop_placement, looped_name, schedule_from_orders


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Rank s holds stages s, s+p, ..., v of them; p microbatches go through one chunk, then the next.

    Rank s warms up with 2(p-s-1) + (v-1)p forwards, at most all v*m, and then alternates. With F, B and W
    of a whole rank the bubble is (p-1)(F+B+W)/v, v times shorter than that of 1F1B, for v times as many
    messages and 2(p-s-1) + (v-1)p + 1 chunks in flight on rank s. For fast links and few microbatches.

    Raises:
        InputError: m is not a multiple of p, or v is below 1.
    """
    name = looped_name("interleaved-1f1b", num_chunks)
    if num_chunks < 1:
        raise InputError(f"schedule {name!r} needs num_chunks of at least 1, got {num_chunks}")
    if num_microbatches % num_ranks:
        raise InputError(
            f"schedule {name!r} needs a number of microbatches that is a multiple of "
            f"the {num_ranks} ranks, got {num_microbatches}; "
            f"take {max(round(num_microbatches / num_ranks), 1) * num_ranks}"
        )

    numbers = np.arange(num_chunks * num_microbatches, dtype=np.int32)

    def computes(phase: Phase, rank: int) -> Ints:
        """The forwards or the backwards of a rank, in order."""
        turns, within = np.divmod(numbers, num_ranks * num_chunks)
        chunks, microbatches = np.divmod(within, num_ranks)
        if phase is Phase.BACKWARD:
            chunks = num_chunks - 1 - chunks
        codes = np.full_like(numbers, PHASE_CODE[phase])
        return np.stack([codes, chunks * num_ranks + rank, turns * num_ranks + microbatches])

    def order(rank: int) -> ComputeColumns:
        warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks, numbers.size)
        columns = np.empty((3, 2 * numbers.size), np.int32)
        columns[:, numbers + np.maximum(numbers - warmup, 0)] = computes(Phase.FORWARD, rank)
        columns[:, numbers + np.minimum(numbers + warmup + 1, numbers.size)] = computes(Phase.BACKWARD, rank)
        return ComputeColumns(columns)

    return schedule_from_orders(name, num_microbatches, loop_placement(num_ranks, num_chunks), order)
