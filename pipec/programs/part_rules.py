"""The rules for computes that are run part by part: each part once, in order, and forwards without others."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, OPS, Instructions, Ints
from pipec.programs.faults import Fault
from pipec.programs.step_index import StepIndex


def run_in_order(step: StepIndex) -> Iterator[Fault]:
    """The parts of a compute run one after the other, each of them once."""
    for rank, columns in enumerate(step.columns):
        for own in _in_parts(columns):
            op, stage = OPS[columns.ops[own[0]]], int(columns.stages[own[0]])
            found, expected = columns.parts[own].tolist(), list(range(step.num_parts(op, stage)))
            if found != expected:
                wrong = next((k for k, part in enumerate(found) if expected[k : k + 1] != [part]), -1)
                where = f"of stage {stage}, microbatch {columns.microbatches[own[0]]}"
                message = f"{op} {where} runs its parts in the order {found}; expected {expected}"
                yield Fault((rank, int(own[wrong])), message)
        yield from _undivided_forwards(rank, columns)


def _in_parts(columns: Instructions) -> list[Ints]:
    """The numbers of the instructions of each compute that has an instruction for some part of it."""
    own = np.flatnonzero(columns.is_compute & (columns.parts >= 0))
    cells = np.stack([columns.microbatches, columns.stages, columns.ops])[:, own]
    order = np.lexsort(cells)
    bounds = np.flatnonzero(np.diff(cells[:, order], axis=1).any(axis=0)) + 1
    return np.split(own[order], bounds) if own.size else []


def _undivided_forwards(rank: int, columns: Instructions) -> Iterator[Fault]:
    """Forwards of a stage do not mix: buffers that one changes are what the next one finds."""
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    for stage in np.unique(columns.stages[forwards[columns.parts[forwards] > 0]]).tolist():
        own = forwards[columns.stages[forwards] == stage]
        later = np.flatnonzero(columns.parts[own] > 0)
        mixed = later[columns.microbatches[own[later]] != columns.microbatches[own[later - 1]]]
        for place in mixed.tolist()[:1]:
            one, other = columns.microbatches[own[[place, place - 1]]].tolist()
            message = (
                f"the forward of stage {stage}, microbatch {one} goes on behind that of microbatch {other}"
            )
            yield Fault((rank, int(own[place])), message)
