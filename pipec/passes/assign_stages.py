"""Give every node the stage of its operator.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from pipec.errors import PlanError, VerifyError
from pipec.graph import (
    Assignment,
    Gradient,
    LoweringLevel,
    TrainingGraph,
    is_constant,
    is_gradient_sum,
    permuted_ranks,
    stage_of,
)
from pipec.ir import Placement
from pipec.passes.split_operators import operator_steps, split_operators

Assign = Callable[[TrainingGraph], Assignment]
"""Decides the stages of a graph, which it leaves as it is: a function of ``pipec.passes.assignments``."""


@dataclass(frozen=True)
class AssignStages:
    """Assign as ``assignment`` says, or as it finds best for the graph.

    If there are ``replica_ranks``, the assignment is for one pipeline, and ``replica_ranks[k]`` are the ranks
    that act for its rank k.

    Raises:
        PlanError: several stages add up a sparse gradient; or the assignment does not work out.
        VerifyError: the assignment is of another graph.
    """

    assignment: Assignment | Assign
    replica_ranks: Placement = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        found = self.assignment if isinstance(self.assignment, Assignment) else self.assignment(graph)
        if self.replica_ranks:
            acting = found.ranks or range(len(self.replica_ranks))
            ranks = tuple(member for rank in acting for member in self.replica_ranks[rank])
            found = replace(found, ranks=permuted_ranks(ranks))
        graph = split_operators(graph, operator_steps(graph, found.split))
        _check_assignment(graph, found)
        for node in graph.nodes:
            if node.target is operator.getitem:
                node.meta["operator"] = node.all_input_nodes[0].meta["operator"]
            if not is_constant(node):
                node.meta["stage"] = found.stages[node.meta["operator"]]
        _check_sparse_gradients(graph)
        return replace(graph, level=LoweringLevel.CUT, assignment=found)


def _check_assignment(graph: TrainingGraph, found: Assignment) -> None:
    if len(found.stages) != len(graph.operators):
        raise VerifyError(f"{len(graph.operators)} operators have stages for {len(found.stages)}")
    unknown = {*found.stages}.difference(range(found.num_stages))
    if unknown:
        raise VerifyError(f"an operator is on stage {min(unknown)} of {found.num_stages}")


def _check_sparse_gradients(graph: TrainingGraph) -> None:
    for role, node in graph.outputs:
        if not isinstance(role, Gradient):
            continue
        terms = list(_terms(node))
        stages = sorted({stage_of(term) for term in terms})
        if len(stages) > 1 and any(term.meta["val"].is_sparse for term in terms):
            raise PlanError(
                f"stages {', '.join(map(str, stages))} all use {role.fqn}, whose gradient is sparse: "
                "it cannot be sent from one to the other. "
                "Make the embedding with sparse=False, or do not tie its weight."
            )


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """The nodes of which a gradient is the sum."""
    if is_gradient_sum(gradient):
        for term in gradient.all_input_nodes:
            yield from _terms(term)
    else:
        yield gradient
