"""Assign each operator to the stage that already holds its parameters.

::

    h = mm(x, w0)     w0 is on stage 0            h = mm(x, w0)     stage 0
    y = relu(h)                            ->     y = relu(h)       stage 0
    g = mm(y, w1)     w1 is on stage 1            g = mm(y, w1)     stage 1

Buffers that the forward changes count like parameters. An operator without either is on the stage of the
operator before it. If the operators equal those of the graph that was cut first, they keep its stages.
Operators that read or change one buffer are on one stage. An operator whose parameters are on several stages,
because it was split for the first cut, is split again. The tail is on the stage of its last operator, which
must hold all tensors that the tail reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from pipec.errors import PlanError
from pipec.graph import (
    Assignment,
    Operator,
    TailInput,
    TrainingGraph,
    UpdatedBuffer,
    copy_graph,
    is_forward,
    source_buffers,
    source_parameters,
    stage_of,
)
from pipec.passes.assignments.operator_blocks import Colocation, find_colocations
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
        colocations = {colocation.first: colocation for colocation in _colocations(graph)}
        needed = _tensors_by_operator(graph)
        while len(stages) < len(needed):
            first = len(stages)
            colocation = colocations.get(first, Colocation("", first, first))
            together = range(first, colocation.last + 1)
            current = max(current, *(first_stages.get(op, current) for op in together))
            if colocation.reason:
                current = self._stage_holding_all(graph, colocation, needed, current)
            for fqn in needed[first] if not colocation.reason else ():
                current = self._stage_holding(graph, first, fqn, current)
            stages += [current] * len(together)
        return Assignment(tuple(stages), self.num_stages, self.ranks, split=split)

    def _stages_of_first_cut(self, graph: TrainingGraph) -> dict[int, int]:
        """The stage of each operator in the first cut; empty if the operators differ."""
        same = [operator for operator, _ in self.first_cut] == [*graph.operators]
        return {op: stage for op, (_, stage) in enumerate(self.first_cut)} if same else {}

    def _operators_to_split(self, graph: TrainingGraph) -> frozenset[int]:
        """The operators whose parameters no single stage holds."""
        tail, needed = _tail_operator(graph), enumerate(_tensors_by_operator(graph))
        stages = (
            (op, [{*self.parameter_stages[fqn]} for fqn in fqns if fqn in self.parameter_stages])
            for op, fqns in needed
        )
        return frozenset(op for op, each in stages if op != tail and each and not set.intersection(*each))

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

    def _stage_holding_all(
        self, graph: TrainingGraph, colocation: Colocation, needed: Sequence[Sequence[str]], at_least: int
    ) -> int:
        """The first stage from ``at_least`` on that holds all tensors of the colocated operators."""
        together = range(colocation.first, colocation.last + 1)
        uses = [
            (op, fqn, self.parameter_stages[fqn])
            for op in together
            for fqn in needed[op]
            if fqn in self.parameter_stages
        ]
        for stage in range(at_least, self.num_stages):
            if all(stage in stages for _, _, stages in uses):
                return stage
        op, fqn, stages = next(use for use in uses if at_least not in use[2])
        user = graph.operators[op]
        raise PlanError(
            f"operator {user.name} ({user.module} at {user.source}) uses {fqn} of stage {stages[-1]}, but no "
            f"stage from stage {at_least} on holds all tensors that must be on one stage because "
            f"{colocation.reason}: the stages were cut for another call, in which they need not be. Make "
            "this call before that one, or prepare() it."
        )


def parameter_stages(graph: TrainingGraph) -> ParameterStages:
    """The stages that read each parameter, and each buffer that the forward changes."""
    readers: dict[str, set[int]] = {}
    results = (*graph.results, *graph.tail_results)
    changed = {result.fqn for result in results if isinstance(result, UpdatedBuffer)}
    read = [(node, {stage_of(x) for x in node.users if x.op == "call_function"}) for node in graph.arguments]
    tail = _tail_operator(graph)
    if tail is not None:
        read += [(node, {graph.assignment.stages[tail]}) for node in _tail_arguments(graph)]
    for node, stages in read:
        fqns = (*source_parameters(node), *changed.intersection(source_buffers(node)))
        for fqn in fqns if node.users else ():
            readers.setdefault(fqn, set()).update(stages)
    return {fqn: tuple(sorted(stages)) for fqn, stages in readers.items()}


def _colocations(graph: TrainingGraph) -> list[Colocation]:
    """The colocations, and the tail's last operator, which reads all that the tail does."""
    found, tail = find_colocations(graph), _tail_operator(graph)
    if tail is None or any(each.first <= tail <= each.last for each in found):
        return found
    return [*found, Colocation(f"{graph.findings.tail} needs all rows", tail, tail)]


def _tensors_by_operator(graph: TrainingGraph) -> list[list[str]]:
    """The parameters and buffers that each operator reads, directly or as precomputed values."""
    needed: list[list[str]] = [[] for _ in graph.operators]
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                needed[node.meta["operator"]] += (*source_parameters(source), *source_buffers(source))
    tail = _tail_operator(graph)
    if tail is not None:
        for node in _tail_arguments(graph):
            needed[tail] += (*source_parameters(node), *source_buffers(node))
    return needed


def _tail_operator(graph: TrainingGraph) -> int | None:
    """The last operator of the tail, on whose stage the tail is."""
    inputs = (node for role, node in graph.outputs if isinstance(role, TailInput))
    return next((node.meta["operator"] for node in inputs), None)


def _tail_arguments(graph: TrainingGraph) -> Sequence[fx.Node]:
    return graph.tail.find_nodes(op="placeholder") if graph.tail else ()
