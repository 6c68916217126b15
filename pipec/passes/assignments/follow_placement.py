"""Assign each operator to the stage that already holds its parameters.

::

    h = mm(x, w0)     w0 is on stage 0            h = mm(x, w0)     stage 0
    y = relu(h)                            ->     y = relu(h)       stage 0
    g = mm(y, w1)     w1 is on stage 1            g = mm(y, w1)     stage 1

Buffers that the forward changes count like parameters. An operator without either is on the stage of the
operator before it. If the operators equal those of the graph that was cut first, they keep its stages.
Operators that read or change one buffer are on one stage. An operator whose parameters are on several stages,
because it was split for the first cut, is split again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipec.errors import PlanError
from pipec.graph import (
    Assignment,
    Operator,
    TrainingGraph,
    UpdatedBuffer,
    copy_graph,
    is_forward,
    source_buffers,
    source_parameters,
    stage_of,
)
from pipec.passes.assignments.operator_blocks import find_colocations
from pipec.passes.split_operators import operator_steps, split_operators

ParameterStages = Mapping[str, tuple[int, ...]]
"""The stages that hold each parameter, and each buffer that the forward changes, by FQN."""


@dataclass(frozen=True)
class FollowPlacement:
    """Cut another graph of a model by the stages of the model's parameters, and for the same ranks.

    ``first_cut`` has the operators of the first graph and their stages.
    """

    num_stages: int
    parameter_stages: ParameterStages = field(repr=False)
    ranks: tuple[int, ...] = ()
    first_cut: Sequence[tuple[Operator, int]] = field(default=(), repr=False)

    def __call__(self, graph: TrainingGraph) -> Assignment:
        split = self._operators_to_split(graph)
        if split:
            graph = copy_graph(graph)
            graph = split_operators(graph, operator_steps(graph, split))
        stages, current = list[int](), 0
        first_stages = self._stages_of_first_cut(graph)
        last_of = {colocation.first: colocation.last for colocation in find_colocations(graph)}
        needed = _parameters_by_operator(graph)
        while len(stages) < len(needed):
            first = len(stages)
            together = range(first, last_of.get(first, first) + 1)
            for op in together:
                current = max(current, first_stages.get(op, current))
                for fqn in needed[op]:
                    current = self._stage_holding(graph, op, fqn, current)
            for op in together if len(together) > 1 else ():
                self._check_all_on(graph, op, needed[op], current)
            stages += [current] * len(together)
        return Assignment(tuple(stages), self.num_stages, self.ranks, split=split)

    def _stages_of_first_cut(self, graph: TrainingGraph) -> dict[int, int]:
        """The stage of each operator in the first cut; empty if the operators differ."""
        same = [operator for operator, _ in self.first_cut] == [*graph.operators]
        return {op: stage for op, (_, stage) in enumerate(self.first_cut)} if same else {}

    def _operators_to_split(self, graph: TrainingGraph) -> frozenset[int]:
        """The operators whose parameters no single stage holds."""
        needed = enumerate(_parameters_by_operator(graph))
        stages = (
            (op, [{*self.parameter_stages[fqn]} for fqn in fqns if fqn in self.parameter_stages])
            for op, fqns in needed
        )
        return frozenset(op for op, each in stages if each and not set.intersection(*each))

    def _stage_holding(self, graph: TrainingGraph, op: int, fqn: str, at_least: int) -> int:
        """The first stage from ``at_least`` on that holds the tensor."""
        stages = self.parameter_stages.get(fqn, (at_least,))
        later = [stage for stage in stages if stage >= at_least]
        if not later:
            user = graph.operators[op]
            raise PlanError(
                f"operator {user.name} ({user.module} at {user.source}) uses {fqn} of stage {stages[-1]} "
                f"after operators of stage {at_least}: this call uses the model's parameters in another "
                "order than the call for which the stages were cut. Compile a separate pipeline for it."
            )
        return later[0]

    def _check_all_on(self, graph: TrainingGraph, op: int, needed: Sequence[str], stage: int) -> None:
        """Raise if the stage, where a buffer keeps the operator, does not hold all that it needs."""
        for fqn in needed:
            if stage not in self.parameter_stages.get(fqn, (stage,)):
                user = graph.operators[op]
                raise PlanError(
                    f"operator {user.name} ({user.module} at {user.source}) uses {fqn} of stage "
                    f"{self.parameter_stages[fqn][0]}, but must be on stage {stage} because of a buffer that "
                    "forward() changes: the stages were cut for a call that does not change the buffer. "
                    "Make the call that changes it first, or prepare() it."
                )


def parameter_stages(graph: TrainingGraph) -> ParameterStages:
    """The stages that read each parameter, and each buffer that the forward changes."""
    readers: dict[str, set[int]] = {}
    changed = {result.fqn for result in graph.results if isinstance(result, UpdatedBuffer)}
    for node in graph.arguments:
        stages = {stage_of(x) for x in node.users if x.op == "call_function"}
        fqns = (*source_parameters(node), *changed.intersection(source_buffers(node)))
        for fqn in fqns if node.users else ():
            readers.setdefault(fqn, set()).update(stages)
    return {fqn: tuple(sorted(stages)) for fqn, stages in readers.items()}


def _parameters_by_operator(graph: TrainingGraph) -> list[list[str]]:
    """The parameters and buffers that each operator reads, directly or as precomputed values."""
    needed: list[list[str]] = [[] for _ in graph.operators]
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                needed[node.meta["operator"]] += (*source_parameters(source), *source_buffers(source))
    return needed
