"""Which microbatches wait in host memory, and when what they have saved is not on the device.

What a forward saved is copied to the host while the rank computes what comes next, and is gone from the
device when that is over. It is copied back while the rank computes what comes before the first reader::

    F0  F1  F2  F3  B0            offload of microbatch 0 beside F1, and its prefetch beside F3:
        ──      ──                it takes no memory of the device while F2 runs

A microbatch with no compute left in between stays where it is.
"""

from dataclasses import dataclass

import numpy as np

from pipec.ir import Op, Phase
from pipec.ir.columns import OP_CODE, PHASE_CODE, ComputeColumns, InstructionColumns, Ints

_READERS = [PHASE_CODE[phase] for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)]
_BESIDE = 2
"""The copy out and the copy back each take place beside one compute."""


@dataclass(frozen=True)
class OffloadIntervals:
    """What is offloaded from the device of a rank: a column entry for each stage and microbatch.

    Positions count the computes of the rank from 1, split ones once for each segment. A microbatch is copied
    from behind position ``offloads`` on, and back from behind position ``prefetches`` on.
    """

    stages: Ints
    microbatches: Ints
    offloads: Ints
    prefetches: Ints


def offload_intervals(cells: ComputeColumns) -> OffloadIntervals:
    """What of a rank's saved values can wait in host memory while it runs these cells in order."""
    count = int(cells.microbatches.max(initial=0)) + 1
    keys = cells.stages.astype(np.int64) * count + cells.microbatches
    forwards = np.flatnonzero(cells.phases == PHASE_CODE[Phase.FORWARD])
    readers = np.flatnonzero(np.isin(cells.phases, _READERS))
    made, at_last = np.unique(keys[forwards][::-1], return_index=True)
    read, at_first = np.unique(keys[readers], return_index=True)
    both, first, second = np.intersect1d(made, read, assume_unique=True, return_indices=True)
    last = forwards[::-1][at_last[first]] + 1
    reader = readers[at_first[second]] + 1
    apart = np.flatnonzero(reader - last > 1 + _BESIDE)
    last, reader, both = last[apart], reader[apart], both[apart]
    found = (both // count, both % count, last, reader - _BESIDE)
    return OffloadIntervals(*(each.astype(np.int32) for each in found))


def next_computes(columns: InstructionColumns, numbers: Ints) -> Ints:
    """For each of these instructions of a rank the number of the next compute, or the number of all."""
    computes = np.flatnonzero(columns.is_compute)
    found: Ints = np.append(computes, len(columns))[np.searchsorted(computes, numbers, "right")]
    return found


def copy_dependencies(events: InstructionColumns) -> tuple[Ints, Ints]:
    """Which compute waits for which copy, entry by entry, where the rows are of all ranks in order.

    A compute waits for the prefetch of what it reads first. The one behind the compute behind an offload
    takes the memory that the offload gives back.
    """
    offloads = np.flatnonzero(events.ops == OP_CODE[Op.OFFLOAD])
    prefetches = np.flatnonzero(events.ops == OP_CODE[Op.PREFETCH])
    if not offloads.size:
        return offloads, offloads
    users = next_computes(events, next_computes(events, offloads))
    involved = np.flatnonzero(events.is_compute | (events.ops == OP_CODE[Op.PREFETCH]))
    order = involved[np.lexsort([involved, events.microbatches[involved], events.stages[involved]])]
    readers = np.append(order, len(events))[np.argsort(order)[np.searchsorted(involved, prefetches)] + 1]
    copies, found = np.concatenate([offloads, prefetches]), np.concatenate([users, readers])
    there = found < len(events)
    return found[there], copies[there]


def num_offloaded(columns: InstructionColumns, stage: int) -> Ints:
    """How many microbatches of a stage would be offloaded while each instruction of a program runs.

    The program is one without offloads. Of what stands between two computes this may say too few.
    """
    computes = np.flatnonzero(columns.is_compute & (columns.ops != OP_CODE[Op.RECOMPUTE]))
    matrix = np.stack([columns.phases, columns.stages, columns.microbatches])[:, computes]
    found = offload_intervals(ComputeColumns(matrix))
    own = found.stages == stage
    growth = np.zeros(len(columns) + 1, np.int64)
    np.add.at(growth, computes[found.offloads[own] + 1], 1)
    np.add.at(growth, computes[found.prefetches[own] - 1] + 1, -1)
    counts: Ints = np.cumsum(growth)[:-1]
    return counts
