"""Give a tied parameter one gradient per stage that uses it, so that these are added once per step.

::

    a = mm(dy, h)              stage 3            a = mm(dy, h)              stage 3   -> gradient of wte
    b = embedding_back(...)    stage 0     ->     b = embedding_back(...)    stage 0   -> gradient of wte
    g = add(a, b)              stage 0   -> gradient of wte
"""

from dataclasses import dataclass, replace

import torch
from torch import fx

from pipec.graph import Gradient, ResultRole, TrainingGraph, stage_of
from pipec.passes.exclusive_gradients import gradient_terms


@dataclass(frozen=True)
class UntieGradients:
    """Split the gradients with terms on several stages, so that no microbatch sends a whole gradient."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        results: list[tuple[ResultRole, fx.Node]] = []
        for role, node in graph.outputs:
            if isinstance(role, Gradient):
                results += [(role, part) for part in _per_stage(graph, node)]
            else:
                results.append((role, node))
        graph.module.graph.output_node().args = (tuple(node for _, node in results),)
        graph.module.graph.eliminate_dead_code()
        return replace(graph, results=tuple(role for role, _ in results))


def _per_stage(graph: TrainingGraph, gradient: fx.Node) -> list[fx.Node]:
    """The gradient as one sum per stage. Each sum adds its terms in autograd's order."""
    terms = list(gradient_terms(gradient))
    stages = sorted({stage_of(term) for term in terms})
    if len(stages) == 1:
        return [gradient]
    return [_sum(graph, gradient, [t for t in terms if stage_of(t) == stage]) for stage in stages]


def _sum(graph: TrainingGraph, gradient: fx.Node, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        with graph.module.graph.inserting_before(gradient):
            partial = graph.module.graph.call_function(torch.ops.aten.add.Tensor, (total, term))
        partial.meta.update(
            gradient.meta, operator=min(total.meta["operator"], term.meta["operator"]), stage=stage_of(term)
        )
        total = partial
    return total
