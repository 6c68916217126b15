"""Balanced stages for fixed numbers of replicas."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipec.errors import PlanError
from pipec.graph import Assignment, TrainingGraph
from pipec.passes.assignments.operator_blocks import find_colocations, operator_blocks, operator_seconds
from pipec.passes.assignments.update_cost import UpdateCost


@dataclass(frozen=True)
class CutForReplicas:
    """Cut so that the slowest stage, whose seconds its replicas share, takes as little time as possible.

    ``replicas[k]`` is the number of ranks of stage k. Costs are for microbatches of ``microbatch_size`` rows,
    with the ``updates`` of an asynchronous schedule after each mini-batch; messages are not counted.

    Raises:
        PlanError: there are fewer operators than stages.
    """

    replicas: tuple[int, ...]
    microbatch_size: int
    updates: UpdateCost | None = None

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size, self.updates)
        blocks = operator_blocks(seconds, find_colocations(graph))
        num_blocks = blocks[-1] + 1 if blocks else 0
        if num_blocks < len(self.replicas):
            raise PlanError(
                f"replicas={self.replicas} is for {len(self.replicas)} stages, but the model can be cut into "
                f"{num_blocks} at most; give fewer numbers of replicas"
            )
        work = [0.0] * num_blocks
        for block, time in zip(blocks, seconds, strict=True):
            work[block] += time
        firsts = balanced_starts(work, self.replicas)
        return Assignment(tuple(bisect_right(firsts, block) - 1 for block in blocks), len(self.replicas))


def balanced_starts(work: Sequence[float], capacities: Sequence[int]) -> list[int]:
    """The first item of each range, so that the largest work of a range divided by its capacity is least.

    Ranges are consecutive, and none is empty. For example, work of 2, 1, 1 and 2 with capacities 2 and 1
    begins at 0 and 3. Among equally good cuts, earlier ranges are as long as possible.
    """
    totals = np.array([0.0, *accumulate(work)])
    least = [np.where(np.arange(len(totals)) == 0, 0.0, np.inf)]  # of the first ranges, by where they end
    for capacity in capacities:
        ends = (
            np.maximum(least[-1][:end], (totals[end] - totals[:end]) / capacity).min(initial=np.inf)
            for end in range(len(totals))
        )
        least.append(np.array([*ends]))
    firsts, end, limit = list[int](), len(work), least[-1][-1] * (1 + 1e-12)
    for before, capacity in zip(least[-2::-1], reversed(capacities), strict=True):
        slowest = np.maximum(before[:end], (totals[end] - totals[:end]) / capacity)
        end = int(np.flatnonzero(slowest <= limit)[-1])
        firsts.insert(0, end)
    return firsts
