"""Let stages be cut inside of a large operator: every step of it becomes an operator of its own.

::

    x = addmm(a, b, c)     operator 3             x = addmm(a, b, c)     operator 3
    y = attention(x)       operator 3      ->     y = attention(x)       operator 4
    z = addmm(d, y, e)     operator 3             z = addmm(d, y, e)     operator 5
    g = relu(z)            operator 4             g = relu(z)            operator 6

One call of a model's code may be many steps, such as multi-head attention, a normalisation or a similarity.
The number that autograd gives to each step tells which nodes of the backward are its own.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from pipec.graph import (
    Buffer,
    Operator,
    Parameter,
    TrainingGraph,
    depends_on_strides,
    is_collective,
    is_forward,
)
from pipec.passes.assignments.operator_blocks import operator_seconds

LARGE = 1 / 2
"""Of the time of a mean stage: what takes more makes stages uneven."""

WHOLE = 3 / 4
"""Of the time of an operator: if one of its steps takes more, taking it apart is of no use."""


@dataclass(frozen=True)
class SplitOperators:
    """Operators that are too large for ``num_stages`` stages to be even."""

    num_stages: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        size = graph.batch_size
        seconds = operator_seconds(graph, size)
        large = {op for op, time in enumerate(seconds) if time * self.num_stages > LARGE * sum(seconds)}

        def is_uneven(op: int, steps: Mapping[fx.Node, int]) -> bool:
            return _seconds_of_largest(steps, size) > WHOLE * seconds[op]

        steps = {op: found for op, found in operator_steps(graph, large).items() if not is_uneven(op, found)}
        return split_operators(graph, steps)


def operator_steps(graph: TrainingGraph, operators: Collection[int]) -> dict[int, Mapping[fx.Node, int]]:
    """The step of each node of these operators, of those that can be taken apart."""
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.meta["operator"] in operators:
            members.setdefault(node.meta["operator"], []).append(node)
    return {op: _steps(nodes) for op, nodes in members.items() if not any(map(_is_kept_whole, nodes))}


def split_operators(graph: TrainingGraph, steps: Mapping[int, Mapping[fx.Node, int]]) -> TrainingGraph:
    """Number the operators again: each step of those in ``steps`` is one."""
    operators, first = list[Operator](), list[int]()
    for op, made in enumerate(graph.operators):
        first.append(len(operators))
        operators += [*_before_last(made, steps.get(op, {})), made]
    for node in graph.nodes:
        op = node.meta["operator"]
        node.meta["operator"] = first[op] + steps.get(op, {}).get(node, 0)
    return replace(graph, operators=tuple(operators))


def _is_kept_whole(node: fx.Node) -> bool:
    """Whether the node must be on one stage with others of its operator: a buffer is held by one stage."""
    reads_buffer = any(isinstance(each.meta.get("role"), Buffer) for each in node.all_input_nodes)
    return depends_on_strides(node) or is_collective(node) or reads_buffer


def _steps(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The step of each node of an operator, numbered from 0.

    No edge of the forward leads to an earlier step, and none of the backward to a later one. Without a
    backward autograd counts no steps, and each node is one. The items of a tuple follow it to its stage.
    What is made of weights alone, such as a transposed one, is part of the step that reads it first: the
    gradient of the weight is made there.
    """
    found, number_of, latest = dict[fx.Node, int](), dict[int, int](), -1
    counted = not all(map(is_forward, nodes))
    of_weights = _made_of_weights(nodes)
    for node in (each for each in nodes if is_forward(each) and each not in of_weights):
        sequence = node.meta.get("seq_nr", latest) if counted else latest + 1
        if sequence > latest and node.target is not operator.getitem:
            number_of[sequence], latest = len(number_of), sequence
        found[node] = max(len(number_of) - 1, 0)
    last = max(found.values(), default=0)
    for node in reversed(of_weights):
        found[node] = min((found[user] for user in node.users if user in found), default=last)
        if "seq_nr" in node.meta:
            number_of.setdefault(node.meta["seq_nr"], found[node])
    for node in nodes:
        if not is_forward(node):
            own = number_of.get(node.meta.get("seq_nr", -1), last) if "custom" in node.meta else last
            sources = (found[each] for each in node.all_input_nodes if each in found and not is_forward(each))
            found[node] = min([own, *sources])
    return found


def _made_of_weights(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Of the nodes those of the forward that compute from parameters alone, in order."""
    found = dict[fx.Node, None]()
    for node in filter(is_forward, nodes):
        sources = node.all_input_nodes
        if sources and all(x in found or isinstance(x.meta.get("role"), Parameter) for x in sources):
            found[node] = None
    return found


def _seconds_of_largest(steps: Mapping[fx.Node, int], size: int) -> float:
    """The seconds of the step of an operator that takes longest."""
    sums = dict[int, float]()
    for node, step in steps.items():
        sums[step] = sums.get(step, 0.0) + node.meta["cost"].seconds(size)
    return max(sums.values())


def _before_last(made: Operator, steps: Mapping[fx.Node, int]) -> list[Operator]:
    """The steps of an operator but for the last, called after the last node of each."""
    names = {step: node.name for node, step in steps.items() if is_forward(node)}
    return [replace(made, name=names[step]) for step in range(max(steps.values(), default=0))]
