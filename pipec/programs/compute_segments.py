"""The computes that run segment by segment, because other instructions run between their segments."""

import numpy as np

from pipec.ir import GRADIENT_PHASES, ModelCollectives, SegmentCounts, SyncSpec
from pipec.ir.columns import PHASE_CODE, SEGMENT_COLUMN, ComputeColumns, InstructionColumns, Ints


def segment_counts(
    computes: ComputeColumns,
    sync_spec: SyncSpec,
    segments: SegmentCounts,
    model_collectives: ModelCollectives,
) -> Ints:
    """The number of segments in which each compute of a rank runs: 1 if it runs as a whole.

    Between the segments of a backward, gradients are reduced: after the last backward of the stage, or after
    each one if gradients are reduced every round. Between the segments of any phase, model collectives run.
    """
    counts = np.ones(len(computes), np.int32)
    for (stage, phase), number in segments.items():
        if any(collective.phase is phase for collective in model_collectives.get(stage, ())):
            counts[(computes.phases == PHASE_CODE[phase]) & (computes.stages == stage)] = number
        early = [
            bucket
            for bucket in sync_spec.buckets
            if bucket.stage == stage and bucket.segment < number - 1 and not bucket.is_tied
        ]
        if phase in GRADIENT_PHASES and early:
            own = np.flatnonzero((computes.phases == PHASE_CODE[phase]) & (computes.stages == stage))
            counts[own if any(map(sync_spec.reduces_every_round, early)) else own[-1:]] = number
    return counts


def split_into_segments(
    columns: InstructionColumns, segments: SegmentCounts
) -> tuple[InstructionColumns, Ints]:
    """The instructions with each phase split into segments, and the original instruction of each::

    2  backward  stage 0  mb 0             2  backward  stage 0  mb 0  segment 0
                                    ->     2  backward  stage 0  mb 0  segment 1
    3  backward  stage 0  mb 1  segment 0     3  backward  stage 0  mb 1  segment 0
    """
    counts = np.ones(len(columns), np.int64)
    for (stage, phase), number in segments.items():
        of_phase = (columns.phases == PHASE_CODE[phase]) & (columns.stages == stage)
        counts[of_phase & (columns.segments < 0)] = number
    numbers = np.repeat(np.arange(len(columns)), counts)
    matrix = columns.matrix[:, numbers]
    firsts = np.cumsum(counts) - counts
    divided = counts[numbers] > 1
    matrix[SEGMENT_COLUMN, divided] = (np.arange(numbers.size) - firsts[numbers])[divided]
    return InstructionColumns(matrix, columns.links), numbers
