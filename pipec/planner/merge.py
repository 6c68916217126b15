"""Merges operators that some best plan keeps together: fewer downsets, the same optimum.

An operator v with no parameters and no bytes in memory may join its neighbour u if v can always follow u
(v's only predecessor) or always wait for u (v's only successor), and, at every level,

    v's own seconds + seconds of v's values without u  <=  seconds of the values u and v alone share.

Take a plan that separates them, and move v to u's stage. That stage gains at most the left-hand side and
loses the right-hand side; v's old stage loses more than it gains; nothing changes for other stages and links.
Where links work beside operators, their seconds cannot be traded for each other, so v must take none. On a
device of speed s, v takes 1/s of its seconds, so the slowest device counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.planner.downsets import Vector, is_chain
from pipec.planner.operator_graph import COLUMNS, OperatorGraph, Transfer


@dataclass(frozen=True, slots=True)
class MergedGraph:
    """``members[k]`` are the operators of the original graph that were merged into operator k."""

    graph: OperatorGraph
    members: Sequence[Sequence[int]]

    def originals(self, operators: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(op for k in operators for op in self.members[k]))


def merge_operators(
    graph: OperatorGraph, order: Sequence[int], value_seconds: Vector, overlap: bool, slowest: float
) -> MergedGraph:
    """Merge as long as any operator can be merged. A chain stays as it is: it has few downsets anyway.

    ``order`` is one that ``graph.before`` permits, ``value_seconds[level, value]`` is the time of transfers,
    and ``slowest`` is the least speed of a device.
    """
    if is_chain(graph, order):
        return MergedGraph(graph, [(op,) for op in range(len(order))])
    state = _State(graph, value_seconds)
    weightless = [
        not (graph.parameter_bytes[op] or graph.resident_bytes[op] or graph.saved_bytes[op])
        for op in range(len(graph.names))
    ]
    seconds = [time / slowest for time in graph.seconds]
    waiting = dict.fromkeys(op for op, light in enumerate(weightless) if light)
    while waiting:
        op = next(iter(waiting))
        del waiting[op]
        if overlap and seconds[op] > 0:
            continue
        home = next((u for u in state.homes(op) if state.prefers(op, u, seconds[op])), None)
        if home is not None:
            seconds[home] += seconds[op]
            weightless[home] = weightless[home] and weightless[op]
            touched = state.join(op, home)
            waiting.update(dict.fromkeys(near for near in sorted(touched) if weightless[near]))
    return _merged(graph, state)


class _State:
    """The graph while it shrinks: the neighbours of each operator, and the values that it makes or reads."""

    def __init__(self, graph: OperatorGraph, value_seconds: Vector) -> None:
        operators = range(len(graph.names))
        self.before: list[set[int]] = [set() for _ in operators]
        self.after: list[set[int]] = [set() for _ in operators]
        for u, v in graph.before:
            self.before[v].add(u)
            self.after[u].add(v)
        self.ends = [{transfer.producer, *transfer.consumers} for transfer in graph.transfers]
        self.values: list[set[int]] = [set() for _ in operators]
        for value, ends in enumerate(self.ends):
            for op in ends:
                self.values[op].add(value)
        self.value_seconds = value_seconds
        self.members: dict[int, list[int]] = {op: [op] for op in operators}

    def homes(self, op: int) -> list[int]:
        """The operators that ``op`` can always join: its only predecessor, its only successor."""
        return [next(iter(near)) for near in (self.before[op], self.after[op]) if len(near) == 1]

    def prefers(self, op: int, home: int, seconds: float) -> bool:
        others = [
            value for value in self.values[op] if home not in self.ends[value] and len(self.ends[value]) > 1
        ]
        shared = [value for value in self.values[op] if self.ends[value] == {op, home}]
        elsewhere = self.value_seconds[:, others].sum(axis=1)
        return bool(np.all(seconds + elsewhere <= self.value_seconds[:, shared].sum(axis=1)))

    def join(self, op: int, home: int) -> set[int]:
        """Make ``op`` part of ``home``, and return the operators for which this may change something."""
        self.members[home] += self.members.pop(op)
        for mine, theirs in ((self.before, self.after), (self.after, self.before)):
            for near in mine[op]:
                theirs[near].discard(op)
                if near != home:
                    theirs[near].add(home)
            mine[home] = (mine[home] | mine[op]) - {op, home}
        for value in self.values[op]:
            self.ends[value] = (self.ends[value] - {op}) | {home}
        self.values[home] |= self.values[op]
        return {home, *self.before[home], *self.after[home]}


def _merged(graph: OperatorGraph, state: _State) -> MergedGraph:
    remaining = list(state.members)
    index = {op: k for k, original in enumerate(remaining) for op in state.members[original]}
    sums = {
        column: [sum(getattr(graph, column)[op] for op in state.members[k]) for k in remaining]
        for column in COLUMNS
    }
    transfers = [_moved(transfer, index) for transfer in graph.transfers]
    before = sorted({(index[u], index[v]) for u, v in graph.before if index[u] != index[v]})
    names = [graph.names[k] for k in remaining]
    smaller = replace(graph, names=names, transfers=transfers, before=before, **sums)
    return MergedGraph(smaller, [state.members[k] for k in remaining])


def _moved(transfer: Transfer, index: dict[int, int]) -> Transfer:
    consumers = tuple(sorted({index[op] for op in transfer.consumers}))
    return replace(transfer, producer=index[transfer.producer], consumers=consumers)
