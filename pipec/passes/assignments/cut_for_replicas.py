"""Balanced stages for fixed numbers of replicas."""

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
"""Halvings of the interval in which the seconds of the slowest stage are searched."""


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
    low, high = 0.0, float(totals[-1])
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _possible_starts(totals, capacities, middle)[-1][-1]:
            high = middle
        else:
            low = middle
    firsts, end = list[int](), len(work)
    starts = _possible_starts(totals, capacities, high)
    for possible, capacity in zip(starts[-2::-1], reversed(capacities), strict=True):
        fitting = possible[:end] & (_furthest_ends(totals, capacity, high)[:end] >= end)
        end = int(np.flatnonzero(fitting)[-1])
        firsts.insert(0, end)
    return firsts


def _possible_starts(totals: Floats, capacities: Sequence[int], limit: float) -> list[Bools]:
    """After zero, one, two ... ranges within the limit, the items at which the next range may begin."""
    possible = [np.arange(totals.size) == 0]
    for capacity in capacities:
        starts = np.flatnonzero(possible[-1])
        ends = _furthest_ends(totals, capacity, limit)[starts]
        steps = np.bincount(starts + 1, minlength=totals.size + 1)
        steps = steps - np.bincount(np.maximum(ends, starts) + 1, minlength=totals.size + 1)
        possible.append(np.cumsum(steps)[:-1] > 0)
    return possible


def _furthest_ends(totals: Floats, capacity: int, limit: float) -> Ints:
    """For each item, the end of the longest range that begins there and is within the limit."""
    return np.searchsorted(totals, (totals + limit * capacity) * (1 + 1e-12), "right") - 1
