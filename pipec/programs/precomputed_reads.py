"""Which computes read what a stage computes once of its weights."""

import numpy as np

from pipec.ir import Op, Stage
from pipec.ir.columns import OP_CODE, PHASE_CODE, InstructionColumns, Ints


def precomputed_reads(columns: InstructionColumns, stage: Stage) -> tuple[Ints, Ints]:
    """The numbers of these computes of a rank, and what weights they read.

    That is a column of two numbers for each: the version, and how often the weights were freed before.
    """
    of_stage = columns.stages == stage.index
    phases = [PHASE_CODE[phase] for phase in stage.precomputed_phases]
    reads = np.flatnonzero(columns.is_compute & of_stage & np.isin(columns.phases, phases))
    freed = np.flatnonzero((columns.ops == OP_CODE[Op.RESHARD]) & of_stage)
    return reads, np.stack([columns.versions[reads], np.searchsorted(freed, reads)])
