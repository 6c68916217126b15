"""Give every node the stage that its operator got in an earlier cut of the same graph.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1
"""

from dataclasses import dataclass, field, replace

from pipec.graph import TrainingGraph, is_constant, stage_of
from pipec.passes.cut_stages import assign_stages


@dataclass(frozen=True)
class RepeatCut:
    """``stages[operator]`` is the stage of each operator; the rest is as in ``TrainingGraph``."""

    stages: tuple[int, ...] = field(repr=False)
    num_stages: int
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: TrainingGraph) -> "RepeatCut":
        """The pass that repeats the cut of a graph that has just been cut.

        Later passes may put copies of a node on other stages, after which a graph no longer tells.
        """
        stages = [0] * len(graph.operators)
        for node in graph.nodes:
            if not is_constant(node):
                stages[node.meta["operator"]] = stage_of(node)
        return cls(tuple(stages), graph.num_stages, graph.ranks, graph.replicas)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        placed = assign_stages(graph, self.stages, self.num_stages)
        return replace(placed, ranks=self.ranks, replicas=self.replicas)
