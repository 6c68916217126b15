"""Which cells are run part by part: those between whose parts something else stands."""

import numpy as np

from pipec.ir import GRADIENT_PHASES, Ending, Joins, Parts
from pipec.ir.columns import PHASE_CODE, Cells, Ints


def parts_run_apart(cells: Cells, ending: Ending, parts: Parts, joins: Joins) -> Ints:
    """For each cell of a rank, in how many parts it is run: 1 if it is run as a whole.

    Between the parts of a backward there are sums of gradients: of the last one of its stage, or of each one
    if gradients are summed after each round. Between the parts of any phase there is what replicas join.
    """
    counts = np.ones(len(cells), np.int32)
    for (stage, phase), number in parts.items():
        if any(join.phase is phase for join in joins.get(stage, ())):
            counts[(cells.phases == PHASE_CODE[phase]) & (cells.stages == stage)] = number
        early = [
            bucket
            for bucket in ending.buckets
            if bucket.stage == stage and bucket.part < number - 1 and not bucket.lent
        ]
        if phase in GRADIENT_PHASES and early:
            own = np.flatnonzero((cells.phases == PHASE_CODE[phase]) & (cells.stages == stage))
            counts[own if any(map(ending.reduces_each_round, early)) else own[-1:]] = number
    return counts
