"""Stages with given numbers of replicas."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipec.errors import PlanError
from pipec.graph import Assignment, TrainingGraph
from pipec.passes.assignments.operator_blocks import find_colocations, operator_blocks, operator_seconds
from pipec.passes.assignments.update_cost import UpdateCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_BISECTIONS = 60
"""Halvings of the interval in which the seconds of the slowest stage are looked for."""


@dataclass(frozen=True)
class CutForReplicas:
    """Cut so that the seconds of the slowest stage, shared by its replicas, are as few as possible.

    ``replicas[k]`` is the number of ranks of stage k. Costs are those of microbatches of ``microbatch_size``
    rows, with the ``updates`` after each mini-batch where there is no flush; messages are not counted.

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
                f"replicas={self.replicas} asks for {len(self.replicas)} stages, but the model falls into "
                f"{num_blocks} parts; give fewer numbers of replicas"
            )
        work = [0.0] * num_blocks
        for block, time in zip(blocks, seconds, strict=True):
            work[block] += time
        firsts = balanced_starts(work, self.replicas)
        return Assignment(tuple(bisect_right(firsts, block) - 1 for block in blocks), len(self.replicas))


def balanced_starts(work: Sequence[float], capacities: Sequence[int]) -> list[int]:
    """The first of the consecutive items of each part, such that no part has much work for its share.

    Every part has an item. For example, work of 2, 1, 1 and 2 in capacities of two and one begins at 0 and 3.
    Among cuts that are equally good, earlier parts are as long as they can be.
    """
    totals = np.array([0.0, *accumulate(work)])
    low, high = 0.0, float(totals[-1])
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _reached(totals, capacities, middle)[-1][-1]:
            high = middle
        else:
            low = middle
    firsts, end = list[int](), len(work)
    for reached, share in zip(_reached(totals, capacities, high)[-2::-1], reversed(capacities), strict=True):
        fitting = reached[:end] & (_furthest(totals, share, high)[:end] >= end)
        end = int(np.flatnonzero(fitting)[-1])
        firsts.insert(0, end)
    return firsts


def _reached(totals: Floats, capacities: Sequence[int], limit: float) -> list[Bools]:
    """After none, one, two ... parts, at which items the next one may begin if none exceeds its limit."""
    reached = [np.arange(totals.size) == 0]
    for share in capacities:
        starts = np.flatnonzero(reached[-1])
        ends = _furthest(totals, share, limit)[starts]
        steps = np.bincount(starts + 1, minlength=totals.size + 1)
        steps = steps - np.bincount(np.maximum(ends, starts) + 1, minlength=totals.size + 1)
        reached.append(np.cumsum(steps)[:-1] > 0)
    return reached


def _furthest(totals: Floats, share: int, limit: float) -> Ints:
    """Where a part ends that begins at each item and takes as many as fit into its share of the limit."""
    return np.searchsorted(totals, (totals + limit * share) * (1 + 1e-12), "right") - 1
