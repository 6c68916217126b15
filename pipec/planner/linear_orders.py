"""A few linear orders of a graph that is too wide to list all its downsets.

Each rule takes operators one by one: the best of those whose predecessors are all taken. It is also applied
from the back, where an operator is ready once all its successors are taken::

    a -> b -> c -> f      depth first      a d e b c f
    a -> d -> e -> f      breadth first    a b d c e f
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]

Rule = Callable[[int, int], tuple[float, int]]
"""The priority of an operator, least first, from the operator and the step at which it became ready."""


@dataclass(frozen=True, slots=True)
class WideGraph:
    """Operators 0 to n - 1, and pairs of them, the first of which is taken before the second.

    ``ends`` has the operators that make or read each value, and ``value_seconds`` what its transfer takes.
    """

    seconds: Figures
    before: Sequence[tuple[int, int]]
    ends: Sequence[Sequence[int]]
    value_seconds: Figures

    def reversed(self) -> "WideGraph":
        before = [(v, u) for u, v in self.before]
        return WideGraph(self.seconds, before, self.ends, self.value_seconds)


def linear_orders(graph: WideGraph) -> list[list[int]]:
    """Different orders of the operators, all of which their precedence permits."""
    backwards = [order[::-1] for order in _orders(graph.reversed())]
    return list(map(list, dict.fromkeys(map(tuple, [*_orders(graph), *backwards]))))


def _orders(graph: WideGraph) -> list[list[int]]:
    broad, deep = _Width(graph), _Width(graph)
    return [
        _order(graph, lambda op, step: (0.0, step)),  # breadth first
        _order(graph, lambda op, step: (0.0, -step)),  # depth first
        _order(graph, lambda op, step: (broad.growth(op), step), broad.take),  # least crossing values
        _order(graph, lambda op, step: (deep.growth(op), -step), deep.take),
    ]


def _order(graph: WideGraph, rule: Rule, take: Callable[[int], None] = lambda op: None) -> list[int]:
    """The operators in the order of a rule; ``take`` is called with each."""
    after: list[list[int]] = [[] for _ in graph.seconds]
    missing = [0] * len(graph.seconds)
    for u, v in dict.fromkeys(graph.before):
        after[u].append(v)
        missing[v] += 1
    ready = {op: 0 for op, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        op = min(ready, key=lambda op: (rule(op, ready[op]), op))
        del ready[op]
        order.append(op)
        take(op)
        for successor in after[op]:
            missing[successor] -= 1
            if not missing[successor]:
                ready[successor] = len(order)
    return order


class _Width:
    """The seconds of the values that cross from the operators taken so far to the others."""

    def __init__(self, graph: WideGraph) -> None:
        self.value_seconds: list[float] = graph.value_seconds.tolist()
        self.missing = [len(ends) for ends in graph.ends]
        self.num_ends = tuple(self.missing)
        self.values: list[list[int]] = [[] for _ in graph.seconds]
        for value, ends in enumerate(graph.ends):
            for op in ends if len(ends) > 1 else ():
                self.values[op].append(value)

    def growth(self, op: int) -> float:
        """By how many seconds more crosses if ``op`` is taken: its values begin to cross, or cease to."""
        return sum(
            self.value_seconds[value]
            * ((self.missing[value] == self.num_ends[value]) - (self.missing[value] == 1))
            for value in self.values[op]
        )

    def take(self, op: int) -> None:
        for value in self.values[op]:
            self.missing[value] -= 1
