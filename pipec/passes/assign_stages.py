"""Give every node the stage of its operator.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipec.errors import PlanError
from pipec.graph import (
    Assignment,
    Gradient,
    LoweringLevel,
    TrainingGraph,
    is_constant,
    permuted_ranks,
    stage_of,
)
from pipec.ir import Placement
from pipec.passes.exclusive_gradients import gradient_terms
from pipec.passes.split_operators import operator_steps, split_operators

Assign = Callable[[TrainingGraph], Assignment]
"""Decides the stages of a graph without changing it: a function of ``pipec.passes.assignments``."""


@dataclass(frozen=True)
class AssignStages:
    """Apply an assignment, or the one that a function chooses for the graph.

    With ``replica_ranks``, the assignment is for one pipeline, and ``replica_ranks[k]`` are the replicas of
    its rank k.

    Raises:
        PlanError: a sparse gradient has terms on several stages, or the function finds no assignment.
    """

    assignment: Assignment | Assign
    replica_ranks: Placement = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        assignment = self.assignment if isinstance(self.assignment, Assignment) else self.assignment(graph)
        if self.replica_ranks:
            pipeline_ranks = assignment.ranks or range(len(self.replica_ranks))
            ranks = tuple(replica for rank in pipeline_ranks for replica in self.replica_ranks[rank])
            assignment = replace(assignment, ranks=permuted_ranks(ranks))
        graph = split_operators(graph, operator_steps(graph, assignment.split))
        for node in graph.nodes:
            if node.target is operator.getitem:
                node.meta["operator"] = node.all_input_nodes[0].meta["operator"]
            if not is_constant(node):
                node.meta["stage"] = assignment.stages[node.meta["operator"]]
        _check_sparse_gradients(graph)
        return replace(graph, level=LoweringLevel.CUT, assignment=assignment)


def _check_sparse_gradients(graph: TrainingGraph) -> None:
    for role, node in graph.outputs:
        if not isinstance(role, Gradient):
            continue
        terms = list(gradient_terms(node))
        stages = sorted({stage_of(term) for term in terms})
        if len(stages) > 1 and any(term.meta["val"].is_sparse for term in terms):
            raise PlanError(
                f"stages {', '.join(map(str, stages))} all use {role.fqn}, whose gradient is sparse: "
                "a sparse gradient cannot be sent between stages. "
                "Make the embedding with sparse=False, or do not tie its weight."
            )
