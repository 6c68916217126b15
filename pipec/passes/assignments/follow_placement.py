"""The stage that already holds the parameters an operator needs.

::

    h = mm(x, w0)     w0 is on stage 0            h = mm(x, w0)     stage 0
    y = relu(h)                            ->     y = relu(h)       stage 0
    g = mm(y, w1)     w1 is on stage 1            g = mm(y, w1)     stage 1

The same holds of buffers that the forward changes. An operator without any goes with the one before it. But
if all operators are those of the graph that was cut first, they are on the same stages. What reads or changes
one buffer stays together. An operator that was split for the cut, so that its parameters are on several
stages, is split again.
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
    """Cut another graph of a model where the model's parameters already are, and for the same ranks.

    ``first_cut`` has the operators of the first graph, and the stage of each.
    """

    num_stages: int
    parameter_stages: ParameterStages = field(repr=False)
    ranks: tuple[int, ...] = ()
    first_cut: Sequence[tuple[Operator, int]] = field(default=(), repr=False)

    def __call__(self, graph: TrainingGraph) -> Assignment:
        split = self._divided(graph)
        if split:
            graph = copy_graph(graph)
            graph = split_operators(graph, operator_steps(graph, split))
        stages, current = list[int](), 0
        known = self._stages_as_before(graph)
        last_of = {span.first: span.last for span in find_colocations(graph)}
        needed = _parameters_by_operator(graph)
        while len(stages) < len(needed):
            first = len(stages)
            together = range(first, last_of.get(first, first) + 1)
            for op in together:
                current = max(current, known.get(op, current))
                for fqn in needed[op]:
                    current = self._stage_holding(graph, op, fqn, current)
            for op in together if len(together) > 1 else ():
                self._check_all_on(graph, op, needed[op], current)
            stages += [current] * len(together)
        return Assignment(tuple(stages), self.num_stages, self.ranks, split=split)

    def _stages_as_before(self, graph: TrainingGraph) -> dict[int, int]:
        """The stage of each operator, if they are those of the first cut."""
        same = [operator for operator, _ in self.first_cut] == [*graph.operators]
        return {op: stage for op, (_, stage) in enumerate(self.first_cut)} if same else {}

    def _divided(self, graph: TrainingGraph) -> frozenset[int]:
        """The operators that need parameters no single stage holds."""
        needed = enumerate(_parameters_by_operator(graph))
        homes = (
            (op, [{*self.parameter_stages[fqn]} for fqn in fqns if fqn in self.parameter_stages])
            for op, fqns in needed
        )
        return frozenset(op for op, each in homes if each and not set.intersection(*each))

    def _stage_holding(self, graph: TrainingGraph, op: int, fqn: str, at_least: int) -> int:
        homes = self.parameter_stages.get(fqn, (at_least,))
        later = [stage for stage in homes if stage >= at_least]
        if not later:
            made_by = graph.operators[op]
            raise PlanError(
                f"operator {made_by.name} ({made_by.module} at {made_by.source}) uses {fqn}, which is on "
                f"stage {homes[-1]}, after stage {at_least} has begun: this call uses the model's parameters "
                "in another order than the one the stages were cut for. Compile a separate pipeline for it."
            )
        return later[0]

    def _check_all_on(self, graph: TrainingGraph, op: int, needed: Sequence[str], stage: int) -> None:
        """Of the operators that a buffer keeps on one stage."""
        for fqn in needed:
            if stage not in self.parameter_stages.get(fqn, (stage,)):
                made_by = graph.operators[op]
                raise PlanError(
                    f"operator {made_by.name} ({made_by.module} at {made_by.source}) uses {fqn} of stage "
                    f"{self.parameter_stages[fqn][0]}, but a buffer that forward() changes keeps it on stage "
                    f"{stage}: "
                    "the stages were cut for a call that does not change it. Make the call that does "
                    "first, or prepare() it."
                )


def parameter_stages(graph: TrainingGraph) -> ParameterStages:
    """Which stages read each parameter, and each buffer that the forward changes."""
    readers: dict[str, set[int]] = {}
    changed = {result.fqn for result in graph.results if isinstance(result, UpdatedBuffer)}
    for node in graph.arguments:
        stages = {stage_of(x) for x in node.users if x.op == "call_function"}
        held = (*source_parameters(node), *changed.intersection(source_buffers(node)))
        for fqn in held if node.users else ():
            readers.setdefault(fqn, set()).update(stages)
    return {fqn: tuple(sorted(stages)) for fqn, stages in readers.items()}


def _parameters_by_operator(graph: TrainingGraph) -> list[list[str]]:
    """What each operator reads of the model, itself or by what was precomputed of it, buffers included."""
    needed: list[list[str]] = [[] for _ in graph.operators]
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                needed[node.meta["operator"]] += (*source_parameters(source), *source_buffers(source))
    return needed
