"""The microbatches that wait in host memory, and the intervals in which their saved values are there.

Saved values are copied to the host during the next compute of the rank, and are gone from the device when
that has ended. They are copied back during the compute before their first reader::

    F0  F1  F2  F3  B0            offload of microbatch 0 beside F1, and its prefetch beside F3:
        ──      ──                it takes no memory of the device while F2 runs

A microbatch stays on the device if no compute is left between the two copies.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pipec.ir import Op, Phase
from pipec.ir.columns import OP_CODE, PHASE_CODE, ComputeColumns, InstructionColumns, Ints

_READERS = [PHASE_CODE[phase] for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)]
NUM_COMPUTES_BESIDE = 2
"""Each of the two copies runs beside one compute."""


@dataclass(frozen=True)
class OffloadIntervals:
    """The offloads of a rank: a column entry for each stage and microbatch.

    Positions count the computes of the rank from 1, split ones once for each segment. The copy to the host
    starts after position ``offloads``, and the copy back after position ``prefetches``.
    """

    stages: Ints
    microbatches: Ints
    offloads: Ints
    prefetches: Ints


def offload_intervals(computes: ComputeColumns, offload: Collection[int]) -> OffloadIntervals:
    """The saved values of the stages in ``offload`` that can wait in host memory.

    ``computes`` are those of a rank, in order.
    """
    if not offload:
        return OffloadIntervals(*(np.empty(0, np.int32),) * 4)
    count = int(computes.microbatches.max(initial=0)) + 1
    keys = computes.stages.astype(np.int64) * count + computes.microbatches
    forwards = np.flatnonzero(computes.phases == PHASE_CODE[Phase.FORWARD])
    readers = np.flatnonzero(np.isin(computes.phases, _READERS))
    made, at_last = np.unique(keys[forwards][::-1], return_index=True)
    read, at_first = np.unique(keys[readers], return_index=True)
    both, first, second = np.intersect1d(made, read, assume_unique=True, return_indices=True)
    last = forwards[::-1][at_last[first]] + 1
    reader = readers[at_first[second]] + 1
    is_long = reader - last > 1 + NUM_COMPUTES_BESIDE
    offloadable = np.flatnonzero(is_long & np.isin(both // count, list(offload)))
    last, reader, both = last[offloadable], reader[offloadable], both[offloadable]
    columns = (both // count, both % count, last, reader - NUM_COMPUTES_BESIDE)
    return OffloadIntervals(*(each.astype(np.int32) for each in columns))


def num_offloaded(columns: InstructionColumns, stage: int) -> Ints:
    """How many microbatches of a stage would be offloaded during each instruction of a program.

    The program has no offloads. For instructions between two computes the number may be too low.
    """
    computes = np.flatnonzero(columns.is_compute & (columns.ops != OP_CODE[Op.RECOMPUTE]))
    matrix = np.stack([columns.phases, columns.stages, columns.microbatches])[:, computes]
    found = offload_intervals(ComputeColumns(matrix), [stage])
    growth = np.zeros(len(columns) + 1, np.int64)
    np.add.at(growth, computes[found.offloads + 1], 1)
    np.add.at(growth, computes[found.prefetches - 1] + 1, -1)
    counts: Ints = np.cumsum(growth)[:-1]
    return counts
