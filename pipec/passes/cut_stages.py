"""Give every node the stage that runs it.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1

A stage is a range of forward operators in program order, with all they caused, forward and backward.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import fx

from pipec.cost.symbols import evaluate
from pipec.errors import PlanError
from pipec.graph import (
    Form,
    Parameter,
    TrainingGraph,
    is_constant,
    is_forward,
    is_tensor,
    memory_of,
    needs_only_inputs,
    stage_of,
)
from pipec.hardware.devices import LinkModel
from pipec.ir import Mode
from pipec.planner.partition import PartitionProblem, Transfer, partition

Owners = Mapping[str, tuple[int, ...]]
"""The stages that hold each parameter, by FQN."""


@dataclass(frozen=True)
class CutStages:
    """Cut so that the slowest stage is as fast as possible, under the model of ``planner.partition``."""

    num_stages: int
    link: LinkModel

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        seconds = operator_seconds(graph, graph.batch_size)
        problem = PartitionProblem(
            seconds=seconds,
            transfers=tuple(transfers(graph, graph.batch_size)),
            num_stages=self.num_stages,
            bytes_per_second=self.link.bytes_per_second,
            latency_seconds=self.link.latency_seconds,
            forbidden_cuts=before_free_operators(seconds),
            names=[f"{op.name} of {op.module or 'the model'}" for op in graph.operators],
        )
        cuts = set(partition(problem).cuts)
        stages = list(accumulate(int(op in cuts) for op in range(len(graph.operators))))
        return assign(graph, stages, self.num_stages)


@dataclass(frozen=True)
class FollowOwners:
    """Cut another graph of the same model where its parameters already are, for the same ranks."""

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


def assign(graph: TrainingGraph, stages: Sequence[int], num_stages: int) -> TrainingGraph:
    """Put every node on the stage of its operator."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            node.meta["operator"] = node.all_input_nodes[0].meta["operator"]
        if not is_constant(node):
            node.meta["stage"] = stages[node.meta["operator"]]
    return replace(graph, form=Form.CUT, num_stages=num_stages)


def operator_seconds(graph: TrainingGraph, microbatch_size: int) -> list[float]:
    """Of each operator, forward and backward."""
    seconds = [0.0] * len(graph.operators)
    for node in graph.nodes:
        if not is_constant(node):
            seconds[node.meta["operator"]] += node.meta["cost"].seconds(microbatch_size)
    return seconds


def before_free_operators(seconds: Sequence[float]) -> frozenset[int]:
    """Boundaries that would leave a stage without work: a stage begins with an operator that takes time."""
    busy = [op for op, time in enumerate(seconds) if time > 0]
    return frozenset(range(len(seconds))) - frozenset(busy[1:])


def transfers(graph: TrainingGraph, microbatch_size: int) -> Iterator[Transfer]:
    """Every value that owns memory, with the operators that read it or a view of it."""
    readers: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        for source in filter(is_tensor, node.all_input_nodes):
            readers.setdefault(memory_of(source), set()).add(node.meta["operator"])
    differentiated = {node.meta["operator"] for node in graph.nodes if not is_forward(node)}
    for node, ops in readers.items():
        if node.op == "call_function" and is_forward(node) and not is_constant(node):
            made_by = node.meta["operator"]
            later = tuple(sorted(op for op in ops if op > made_by))
            if later and not needs_only_inputs(node):
                size = evaluate(node.meta["cost"].output_bytes, microbatch_size)
                returns = graph.mode is Mode.TRAIN and made_by in differentiated
                trained = returns and node.meta["val"].is_floating_point()
                yield Transfer(made_by, later, size, size if trained else 0)


def _parameters_by_operator(graph: TrainingGraph) -> list[list[str]]:
    needed: list[list[str]] = [[] for _ in graph.operators]
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder" and isinstance(source.meta["role"], Parameter):
                needed[node.meta["operator"]].append(source.meta["role"].fqn)
    return needed
