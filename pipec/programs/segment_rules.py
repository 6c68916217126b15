"""The rules for computes that run segment by segment: each segment once, in order."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints
from pipec.programs.program_index import ProgramIndex
from pipec.programs.violation import Violation


def segments_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """The segments of a compute run once each, in order."""
    for rank, columns in enumerate(step.columns):
        for own in _split_computes(columns):
            op, stage = OPS[columns.ops[own[0]]], int(columns.stages[own[0]])
            found, expected = columns.segments[own].tolist(), list(range(step.num_segments(op, stage)))
            if found != expected:
                wrong = next((k for k, segment in enumerate(found) if expected[k : k + 1] != [segment]), -1)
                where = f"of stage {stage}, microbatch {columns.microbatches[own[0]]}"
                message = f"{op} {where} runs its segments in the order {found}; expected {expected}"
                yield Violation((rank, int(own[wrong])), message)
        yield from _undivided_forwards(rank, columns)


def _split_computes(columns: InstructionColumns) -> list[Ints]:
    """The instruction numbers of each compute that runs segment by segment."""
    own = np.flatnonzero(columns.is_compute & (columns.segments >= 0))
    cells = np.stack([columns.microbatches, columns.stages, columns.ops])[:, own]
    order = np.lexsort(cells)
    bounds = np.flatnonzero(np.diff(cells[:, order], axis=1).any(axis=0)) + 1
    return np.split(own[order], bounds) if own.size else []


def _undivided_forwards(rank: int, columns: InstructionColumns) -> Iterator[Violation]:
    """Forwards of a stage do not interleave, because one reads the buffers that the previous one changed."""
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    for stage in np.unique(columns.stages[forwards[columns.segments[forwards] > 0]]).tolist():
        own = forwards[columns.stages[forwards] == stage]
        later = np.flatnonzero(columns.segments[own] > 0)
        mixed = later[columns.microbatches[own[later]] != columns.microbatches[own[later - 1]]]
        for place in mixed.tolist()[:1]:
            one, other = columns.microbatches[own[[place, place - 1]]].tolist()
            message = (
                f"the forward of stage {stage}, microbatch {one} goes on behind that of microbatch {other}"
            )
            yield Violation((rank, int(own[place])), message)
