"""The rules for what a stage computes once of its weights: before it is read, and of the same weights."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Instruction, Op, stages_on
from pipec.ir.columns import OP_CODE
from pipec.programs.precomputed_reads import precomputed_reads
from pipec.programs.program_index import ProgramIndex, Violation


def violations(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a ``precompute``."""
    plan, stage, microbatch = step.plan, instruction.stage, instruction.microbatch
    if stage not in stages_on(plan.placement, rank) or not plan.stages[stage].precomputed_phases:
        yield f"precompute names stage {stage}; expected one of this rank with something to precompute"
    if not (0 <= microbatch < plan.num_microbatches if plan.sync_spec.stream else microbatch == -1):
        yield f"precompute names microbatch {microbatch}; expected one in a stream, and none in a step"
    others = (instruction.peer, instruction.slot, instruction.bucket, instruction.segment)
    if instruction.link or any(other != -1 for other in (*others, instruction.model_collective)):
        yield "precompute names a link, peer, slot, bucket, segment or model collective; expected none"


def precomputed_before_read(step: ProgramIndex) -> Iterator[Violation]:
    """What is computed once of the weights is there before it is read, and of the weights that are read.

    Refused where forwards read it::

        forward stage 0 mb 0, precompute stage 0, forward stage 0 mb 1
    """
    for stage in step.plan.stages:
        for rank in set(step.plan.placement[stage.index]) if stage.precomputed_phases else ():
            yield from _of_stage(step, rank, stage.index)


def _of_stage(step: ProgramIndex, rank: int, number: int) -> Iterator[Violation]:
    columns = step.columns[rank]
    of_stage = columns.stages == number
    made = np.flatnonzero(of_stage & (columns.ops == OP_CODE[Op.PRECOMPUTE]))
    freed = np.flatnonzero(of_stage & (columns.ops == OP_CODE[Op.RESHARD]))
    of_weights = zip(columns.versions[made].tolist(), np.searchsorted(freed, made).tolist(), strict=True)
    first: dict[tuple[int, int], int] = {}
    for at, weights in zip(made.tolist(), of_weights, strict=True):
        is_repeated = first.setdefault(weights, at) != at
        if is_repeated and weights[0] != 0:  # the first periods of a stream all have version 0
            yield Violation((rank, at), f"precompute of stage {number} runs again on the same weights")
    reads, uses = precomputed_reads(columns, step.plan.stages[number])
    distinct, places = np.unique(uses, axis=1, return_index=True)
    for weights, place in zip(map(tuple, distinct.T.tolist()), places.tolist(), strict=True):
        at = int(reads[place])
        if first.pop(weights, len(columns)) > at:
            what = f"{columns[at].op} of stage {number}"
            yield Violation((rank, at), f"{what} reads what is not computed of its weights before")
    for at in first.values():
        yield Violation((rank, at), f"precompute of stage {number} is not read")
