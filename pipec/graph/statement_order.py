"""Reorders a function's statements so that less memory is held at a time.

Differentiation makes the gradient of an input before that of a weight, for example, although only the second
frees a saved value::

    dx = mm(dy, w)                dw = mm(dy.t(), x)
    dw = mm(dy.t(), x)     ->     del x
    del x, dy                     dx = mm(dy, w)
                                  del dy

The memory held while a statement runs depends only on which statements run before it and which after. A value
counts if it is made before and read after: so the best choice is a minimum cut (Ford and Fulkerson 1956).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from pipec.graph.in_place import owns_new_storage
from pipec.graph.lifetimes import BytesOf, defined_by, is_statement, storage_owners_in, temporary_bytes
from pipec.graph.phase_functions import PhaseFunction

_WINDOW_SIZES = (1, 4, 16, 64)
"""So many statements before the one that holds the most, and after it, change places: the best is taken.

What is best for that one may be bad for others, above all if many move.
"""

_MIN_GAIN = 0.01
"""The order stays what it was if the most that is held falls by less than this share."""

_MAX_ITERATIONS = 100
"""How often the statement that holds the most is looked for: in a deep model many hold as much."""

_NEVER, _ALL_VALUES = 2**30, 2**28
"""Capacities, which are numbers of 32 bits: of an edge that no cut crosses, and of all values together."""

Ints = NDArray[np.int64]


def reorder_for_memory(function: PhaseFunction, bytes_of: BytesOf) -> PhaseFunction:
    """The function with its statements in an order that holds less at a time, or as it is.

    Only statements around those that hold the most change places. Every operator keeps its inputs, and random
    ones have generators of their own, so that values keep their bits.
    """
    order = _Statements.of(function, bytes_of).best_order()
    if order is None:
        return function
    items: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in function.body:
        items[node if is_statement(node) else node.all_input_nodes[0]].append(node)
    pieces = list(items.values())
    return replace(function, body=tuple(node for number in order for node in pieces[number]))


@dataclass(frozen=True, slots=True)
class _Value:
    """A piece of memory, held from statement ``maker`` to the last of its ``readers``.

    It exists before the function if ``maker`` is -1, and afterwards if the function returns it, which counts
    as a reader after all statements.
    """

    num_bytes: int
    maker: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class _Statements:
    """The statements of a function by number: which ones each needs, and the values that they share.

    ``unread[k]`` are the bytes that statement k makes and that nobody reads.
    """

    needs: Sequence[set[int]]
    values: Sequence[_Value]
    unread: Ints

    @classmethod
    def of(cls, function: PhaseFunction, bytes_of: BytesOf) -> "_Statements":
        memory, body = storage_owners_in(function), {*function.body}
        statements = list(filter(is_statement, function.body))
        number = {node: k for k, node in enumerate(statements)}
        number |= {n: number[n.all_input_nodes[0]] for n in function.body if n not in number}
        makers = dict.fromkeys(map(memory, function.saved_in), -1)
        readers: dict[fx.Node, list[int]] = defaultdict(list)
        for k, node in enumerate(statements):
            made = list(defined_by(node, body))
            makers.update((each, k) for each in made if memory(each) is each)
            for each in (*made, *node.all_input_nodes):
                readers[memory(each)].append(k)
        for owner in map(memory, function.result_nodes):
            readers[owner].append(len(statements))
        return cls(
            needs=[{number[each] for each in n.all_input_nodes if each in number} for n in statements],
            values=[
                _Value(bytes_of(owner), maker, tuple(dict.fromkeys(readers[owner])))
                for owner, maker in makers.items()
                if owns_new_storage(owner)
            ],
            unread=np.array([temporary_bytes(node, body, bytes_of) for node in statements], np.int64),
        )

    def best_order(self) -> list[int] | None:
        """The statements in another order, if that is worth it."""
        order = np.arange(len(self.needs))
        if not len(order):
            return None
        held = self._held(order)
        first = held.max()
        for _ in range(_MAX_ITERATIONS):
            others = [self._moved(order, int(held.argmax()), reach) for reach in _WINDOW_SIZES]
            now, other = min(((self._held(each), each) for each in others), key=lambda it: _height(it[0]))
            if _height(now) >= _height(held):
                break
            order, held = other, now
        return order.tolist() if held.max() < (1 - _MIN_GAIN) * first else None

    def _held(self, order: Ints) -> Ints:
        """The bytes that are held while each statement of an order runs."""
        place = np.append(np.argsort(order), len(order))
        growth = np.zeros(len(order) + 2, np.int64)
        for value in self.values:
            growth[place[value.maker] if value.maker >= 0 else 0] += value.num_bytes
            growth[max((place[k] for k in value.readers), default=len(order)) + 1] -= value.num_bytes
        held: Ints = np.cumsum(growth)[: len(order)] + self.unread[order]
        return held

    def _moved(self, order: Ints, peak: int, reach: int) -> Ints:
        """The order that holds least while its statement number ``peak`` runs."""
        first = max(0, peak - reach)
        window = order[first : peak + reach + 1].tolist()
        at, before = window[peak - first], {*order[:first].tolist(), -1}
        earlier = _Cut(window, before, at).side_of_source(self, {*window[: peak - first]})
        moved = order.copy()
        moved[first : first + len(window)] = [
            *(k for k in window if k in earlier),
            at,
            *(k for k in window if k not in earlier and k != at),
        ]
        return moved


def _height(held: Ints) -> tuple[int, int]:
    """The maximum of a curve, and how often it is reached."""
    return int(held.max()), int((held == held.max()).sum())


class _Cut:
    """Divides the statements of a ``window`` into those to run before statement ``at`` and those after.

    The nodes of its network are the statements, what runs ``before`` the window as the source, what runs
    after it and the statement itself as the sink, and a node for each value between them.
    """

    def __init__(self, window: Sequence[int], before: set[int], at: int) -> None:
        self._window, self._before, self._at = window, before, at
        self._source, self._sink = len(window), len(window) + 1
        self._node_of = {k: number for number, k in enumerate(window)} | {at: self._sink}
        self._size = len(window) + 2

    def side_of_source(self, statements: _Statements, now_before: set[int]) -> set[int]:
        """The statements to run before. Of equally small cuts, one that moves few statements is taken."""
        capacities: dict[tuple[int, int], int] = defaultdict(int)
        for edge, capacity in self._edges(statements, now_before):
            capacities[edge] = min(capacities[edge] + capacity, _NEVER)
        data, ends = np.fromiter(capacities.values(), np.int32), np.array([*capacities]).reshape(-1, 2)
        network = csr_array((data, (ends[:, 0], ends[:, 1])), shape=(self._size, self._size))
        flow = maximum_flow(network, self._source, self._sink).flow
        left = network - flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = breadth_first_order(left, self._source, return_predecessors=False)
        return {self._window[node] for node in reached.tolist() if node < self._source}

    def _edges(self, statements: _Statements, now_before: set[int]) -> Iterator[tuple[tuple[int, int], int]]:
        for k in self._window:
            node = self._source if k == self._at else self._node_of[k]
            for needed in statements.needs[k]:
                if needed in self._node_of:
                    yield (node, self._node_of[needed]), _NEVER
            if k != self._at:
                yield ((self._source, node) if k in now_before else (node, self._sink)), 1
        values = list(self._crossing(statements))
        total = sum(num_bytes for num_bytes, _, _ in values)
        for num_bytes, maker, readers in values:
            value, self._size = self._size, self._size + 1
            yield (maker, value), 1 + num_bytes * _ALL_VALUES // total
            yield from (((value, reader), _NEVER) for reader in readers)

    def _crossing(self, statements: _Statements) -> Iterator[tuple[int, int, set[int]]]:
        """Bytes, maker and readers of the values that are held, or not, according to the cut."""
        for value in statements.values:
            maker, readers = self._node(value.maker), {self._node(k) for k in value.readers}
            held_anyway = maker == self._source and self._sink in readers
            if readers - {maker} and value.num_bytes and maker != self._sink and not held_anyway:
                yield value.num_bytes, maker, readers - {maker, self._source}

    def _node(self, statement: int) -> int:
        """The node of a statement."""
        return self._node_of.get(statement, self._source if statement in self._before else self._sink)
