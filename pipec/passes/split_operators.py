"""Make each step of a large operator an operator of its own, so that a stage can begin inside it.

::

    x = addmm(a, b, c)     operator 3             x = addmm(a, b, c)     operator 3
    y = attention(x)       operator 3      ->     y = attention(x)       operator 4
    z = addmm(d, y, e)     operator 3             z = addmm(d, y, e)     operator 5
    g = relu(z)            operator 4             g = relu(z)            operator 6

One call of a model's code may have many steps, such as multi-head attention, a normalisation or a similarity.
Autograd numbers the steps, and the number says which nodes of the backward belong to a step.
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

MAX_STAGE_FRACTION = 1 / 2
"""An operator that takes more than this fraction of a mean stage's time makes stages uneven."""

MAX_STEP_FRACTION = 3 / 4
"""If one step takes more than this fraction of an operator's time, splitting the operator does not help."""


@dataclass(frozen=True)
class SplitOperators:
    """Split the operators that are too large for ``num_stages`` stages to be even."""

    num_stages: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        size = graph.batch_size
        seconds = operator_seconds(graph, size)
        limit = MAX_STAGE_FRACTION * sum(seconds)
        large = {op for op, time in enumerate(seconds) if time * self.num_stages > limit}
        steps = {
            op: step_of
            for op, step_of in operator_steps(graph, large).items()
            if _seconds_of_largest(step_of, size) <= MAX_STEP_FRACTION * seconds[op]
        }
        return split_operators(graph, steps)


def operator_steps(graph: TrainingGraph, operators: Collection[int]) -> dict[int, Mapping[fx.Node, int]]:
    """The step of each node of these operators. Operators that cannot be split are left out."""
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.meta["operator"] in operators:
            members.setdefault(node.meta["operator"], []).append(node)
    return {op: _steps(nodes) for op, nodes in members.items() if not any(map(_is_kept_whole, nodes))}


def split_operators(graph: TrainingGraph, steps: Mapping[int, Mapping[fx.Node, int]]) -> TrainingGraph:
    """Number the operators again, so that each step of those in ``steps`` is one."""
    operators, first = list[Operator](), list[int]()
    for op, whole in enumerate(graph.operators):
        first.append(len(operators))
        operators += [*_steps_before_last(whole, steps.get(op, {})), whole]
    for node in graph.nodes:
        op = node.meta["operator"]
        node.meta["operator"] = first[op] + steps.get(op, {}).get(node, 0)
    return replace(graph, operators=tuple(operators))


def _is_kept_whole(node: fx.Node) -> bool:
    """Whether the node must be on one stage with the rest of its operator: one stage holds a buffer."""
    reads_buffer = any(isinstance(each.meta.get("role"), Buffer) for each in node.all_input_nodes)
    return depends_on_strides(node) or is_collective(node) or reads_buffer


def _steps(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The step of each node of an operator, numbered from 0.

    No edge of the forward leads to an earlier step, and none of the backward to a later one. Without a
    backward autograd numbers no steps, and each node is one. The items of a tuple are in the step that makes
    the tuple. A node that depends on weights alone, such as a transpose, is in the first step that reads it,
    which makes the gradient of the weight.
    """
    step_of, number_of, latest = dict[fx.Node, int](), dict[int, int](), -1
    is_numbered = not all(map(is_forward, nodes))
    of_weights = _weights_only(nodes)
    for node in (each for each in nodes if is_forward(each) and each not in of_weights):
        sequence = node.meta.get("seq_nr", latest) if is_numbered else latest + 1
        if sequence > latest and node.target is not operator.getitem:
            number_of[sequence], latest = len(number_of), sequence
        step_of[node] = max(len(number_of) - 1, 0)
    last = max(step_of.values(), default=0)
    for node in reversed(of_weights):
        step_of[node] = min((step_of[user] for user in node.users if user in step_of), default=last)
        if "seq_nr" in node.meta:
            number_of.setdefault(node.meta["seq_nr"], step_of[node])
    for node in nodes:
        if not is_forward(node):
            own = number_of.get(node.meta.get("seq_nr", -1), last) if "custom" in node.meta else last
            inputs = (x for x in node.all_input_nodes if x in step_of and not is_forward(x))
            step_of[node] = min([own, *(step_of[x] for x in inputs)])
    return step_of


def _weights_only(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The forward nodes that depend on parameters alone, in order."""
    of_weights = dict[fx.Node, None]()
    for node in filter(is_forward, nodes):
        inputs = node.all_input_nodes
        if inputs and all(x in of_weights or isinstance(x.meta.get("role"), Parameter) for x in inputs):
            of_weights[node] = None
    return of_weights


def _seconds_of_largest(step_of: Mapping[fx.Node, int], size: int) -> float:
    """The seconds of the step of an operator that takes longest."""
    sums = dict[int, float]()
    for node, step in step_of.items():
        sums[step] = sums.get(step, 0.0) + node.meta["cost"].seconds(size)
    return max(sums.values())


def _steps_before_last(whole: Operator, step_of: Mapping[fx.Node, int]) -> list[Operator]:
    """An operator for each step but the last, named after the step's last node."""
    names = {step: node.name for node, step in step_of.items() if is_forward(node)}
    return [replace(whole, name=names[step]) for step in range(max(step_of.values(), default=0))]
