"""Cut for one pipeline, and let several ranks act for each of its ranks.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0, on ranks 0 and 2
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1, on ranks 1 and 3
"""

from dataclasses import dataclass, replace

from pipec.graph import TrainingGraph
from pipec.ir import Placement
from pipec.passes import Pass


@dataclass(frozen=True)
class ReplicatePipeline:
    """``replica_ranks[k]`` are the ranks that act for rank k of the pipeline that ``cut`` is for."""

    cut: Pass
    replica_ranks: Placement

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        graph = self.cut(graph)
        played_by = graph.ranks or range(len(self.replica_ranks))
        ranks = tuple(member for rank in played_by for member in self.replica_ranks[rank])
        return replace(graph, ranks=() if ranks == tuple(range(len(ranks))) else ranks)
