"""Give every node the stage that already holds the parameters its operator needs.

::

    h = mm(x, w0)     w0 is on stage 0            h = mm(x, w0)     stage 0
    y = relu(h)                            ->     y = relu(h)       stage 0
    g = mm(y, w1)     w1 is on stage 1            g = mm(y, w1)     stage 1

An operator without parameters goes with the one before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipec.errors import PlanError
from pipec.graph import Parameter, TrainingGraph, is_forward, stage_of
from pipec.passes.cut_stages import assign

Owners = Mapping[str, tuple[int, ...]]
"""The stages that hold each parameter, by FQN."""


@dataclass(frozen=True)
class FollowOwners:
    """Cut another graph of a model where the model's parameters already are, and for the same ranks."""

    num_stages: int
    owners: Owners = field(repr=False)
    ranks: tuple[int, ...] = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        stages, current = [], 0
        for op, needed in enumerate(_parameters_by_operator(graph)):
            for fqn in needed:
                current = self._stage_holding(graph, op, fqn, current)
            stages.append(current)
        return replace(assign(graph, stages, self.num_stages), ranks=self.ranks)

    def _stage_holding(self, graph: TrainingGraph, op: int, fqn: str, at_least: int) -> int:
        homes = self.owners.get(fqn, (at_least,))
        later = [stage for stage in homes if stage >= at_least]
        if not later:
            made_by = graph.operators[op]
            raise PlanError(
                f"operator {made_by.name} ({made_by.module} at {made_by.source}) uses {fqn}, which is on "
                f"stage {homes[-1]}, after stage {at_least} has begun: this call uses the model's parameters "
                "in another order than the one the stages were cut for. Compile a separate pipeline for it."
            )
        return later[0]


def owners_of(graph: TrainingGraph) -> Owners:
    """Which stages read each parameter."""
    return {
        node.meta["role"].fqn: tuple(sorted({stage_of(u) for u in node.users if u.op == "call_function"}))
        for node in graph.arguments
        if isinstance(node.meta["role"], Parameter) and node.users
    }


def _parameters_by_operator(graph: TrainingGraph) -> list[list[str]]:
    needed: list[list[str]] = [[] for _ in graph.operators]
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder" and isinstance(source.meta["role"], Parameter):
                needed[node.meta["operator"]].append(source.meta["role"].fqn)
    return needed
