"""Inserts the computation of what a stage computes once of its weights, before the first phase that reads it.

For example, with parameters that are gathered for use::

    wait_unshard  stage 0  bucket 0             wait_unshard  stage 0  bucket 0
    forward       stage 0  mb 0                 precompute    stage 0
    forward       stage 0  mb 1         ->      forward       stage 0  mb 0
    reshard       stage 0  bucket 0             forward       stage 0  mb 1
                                                reshard       stage 0  bucket 0

In a stream it is computed of each version of the weights.
"""

import numpy as np

from pipec.ir import Instruction, Op, Plan
from pipec.ir.columns import OP_CODE, PHASE_CODE, InstructionColumns, insert_instructions


def with_precomputes(columns: InstructionColumns, plan: Plan) -> InstructionColumns:
    """The program of a rank with a ``precompute`` for each version, and each gathering, of the weights."""
    places, added = list[int](), list[Instruction]()
    for stage in plan.stages if any(each.precomputed_phases for each in plan.stages) else ():
        of_stage = columns.stages == stage.index
        phases = [PHASE_CODE[phase] for phase in stage.precomputed_phases]
        reads = np.flatnonzero(columns.is_compute & of_stage & np.isin(columns.phases, phases))
        freed = np.flatnonzero((columns.ops == OP_CODE[Op.RESHARD]) & of_stage)
        uses = np.stack([columns.versions[reads], np.searchsorted(freed, reads)])
        _, first = np.unique(uses, axis=1, return_index=True)
        for number in reads[np.sort(first)].tolist():
            read = columns[number]
            microbatch = read.microbatch if plan.sync_spec.stream else -1
            places.append(number)
            added.append(Instruction(Op.PRECOMPUTE, stage.index, microbatch, version=read.version))
    return insert_instructions(columns, places, added)
