"""Give every node the stage that runs it, where stages have different numbers of replicas.

::

    h = mm(x, w0)     operator 3, 2 s            h = mm(x, w0)     operator 3, stage 0, on two ranks
    g = mm(h, w1)     operator 7, 1 s     ->     g = mm(h, w1)     operator 7, stage 1, on one

A stage is a range of forward operators in program order, with all they caused, forward and backward.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipec.errors import PlanError
from pipec.graph import TrainingGraph
from pipec.passes.cut_stages import assign, blocks_of, operator_seconds, spans_of_buffers

_BISECTIONS = 60
"""Halvings of the interval in which the seconds of the slowest stage are looked for."""


@dataclass(frozen=True)
class CutForReplicas:
    """Cut so that the seconds of the slowest stage, shared by its replicas, are as few as possible.

    ``replicas[k]`` is the number of ranks of stage k. Costs are those of microbatches of ``microbatch_size``
    rows; messages are not counted.

    Raises:
        PlanError: there are fewer operators than stages.
    """

    replicas: tuple[int, ...]
    microbatch_size: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        seconds = operator_seconds(graph, self.microbatch_size)
        blocks = blocks_of(seconds, spans_of_buffers(graph))
        num_blocks = blocks[-1] + 1 if blocks else 0
        if num_blocks < len(self.replicas):
            raise PlanError(
                f"replicas={self.replicas} asks for {len(self.replicas)} stages, but the model falls into "
                f"{num_blocks} parts; give fewer numbers of replicas"
            )
        work = [0.0] * num_blocks
        for block, time in zip(blocks, seconds, strict=True):
            work[block] += time
        firsts = balanced(work, self.replicas)
        stages = [bisect_right(firsts, block) - 1 for block in blocks]
        return assign(graph, stages, len(self.replicas))


def balanced(work: Sequence[float], shares: Sequence[int]) -> list[int]:
    """The first of the consecutive items of each part, such that no part has much work for its share.

    Every part has an item. For example, work of 2, 1, 1 and 2 in shares of two and one begins at 0 and 3.
    """
    totals = [0.0, *accumulate(work)]
    low, high = 0.0, totals[-1]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _filled(totals, shares, middle)[-1] >= len(work):
            high = middle
        else:
            low = middle
    return [0, *_filled(totals, shares, high)[:-1]]


def _filled(totals: Sequence[float], shares: Sequence[int], limit: float) -> list[int]:
    """Where each part ends if it takes as many items as fit into its share of the limit, but at least one."""
    ends, end = [], 0
    for left, share in zip(range(len(shares) - 1, -1, -1), shares, strict=True):
        most = bisect_right(totals, (totals[end] + limit * share) * (1 + 1e-12)) - 1
        end = min(max(most, end + 1), len(totals) - 1 - left)
        ends.append(end)
    return ends
