"""Finds runs of equal blocks in a captured graph, so that torch differentiates a few blocks of each run.

Blocks are equal if they call the same operators, with the same constants, on values of the same dtype and
shape, in the same order. Each reads values of its own and of the block before, tensors of the model that
nobody else reads, and values that all blocks read alike. A transformer's layers are such a run::

    embed | block 0 | block 1 | block 2 | ... | block 30 | block 31 | head

``without_middle`` leaves the middle of a run out. After differentiation ``instantiate_blocks`` puts it back.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn

from pipec.capture.captured_collectives import MODEL_COLLECTIVES, sync_batch_norm
from pipec.capture.graph_calls import HOLDING_NUMBERS, operator_name
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION, OUTPUT_MERGE, REQUIRE
from pipec.capture.node_insertion import fake_value, inputs_of
from pipec.capture.number_operators import OPERATOR_ID
from pipec.graph import CHECK_BRANCH
from pipec.torch_compat.differentiation import unbacked_symbols
from pipec.torch_compat.symbolic_numbers import formula

NUM_FIRST = 3
"""The blocks at the front of a run that are differentiated: the first, and two whose results are compared."""

MIN_LEFT_OUT = 2
"""A run is worth its search if it leaves out so many blocks."""

_NUM_PERIODS = 6
"""So many distances between equal nodes, the commonest, may be the length of a block."""

_UNEQUAL = {
    *MODEL_COLLECTIVES,
    sync_batch_norm,
    BATCH_COUNT,
    BATCH_FRACTION,
    CHECK_BRANCH,
    OUTPUT_MERGE,
    REQUIRE,
}
"""Nodes that are numbered or checked one by one over the whole graph, and so belong to no block."""


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """A run of equal blocks.

    ``blocks`` has the nodes of each. ``tensors`` has the names of the parameters and buffers that each alone
    reads, in the same order for all. ``num_last`` blocks at the end are differentiated: two if gradients of
    what all blocks read are added up from block to block, for then the last block adds nothing.
    """

    blocks: Sequence[Sequence[fx.Node]]
    tensors: Sequence[Sequence[str]]
    num_last: int

    @property
    def kept(self) -> list[int]:
        """The numbers of the blocks that are differentiated."""
        count = len(self.blocks)
        return [*range(NUM_FIRST), *range(count - self.num_last, count)]

    @property
    def left_out(self) -> range:
        """The numbers of the blocks that are not."""
        return range(NUM_FIRST, len(self.blocks) - self.num_last)

    @property
    def num_operators(self) -> int:
        """The operators of one block."""
        first, second, *_ = (_first_operator(block) for block in self.blocks)
        return second - first

    def operators(self, block: int) -> range:
        """The numbers of a block's operators."""
        first = _first_operator(self.blocks[block])
        return range(first, first + self.num_operators)


def _first_operator(block: Sequence[fx.Node]) -> int:
    return next((number for node in block if (number := _operator(node)) is not None), 0)


def _operator(node: fx.Node) -> int | None:
    number: int | None = node.meta.get("custom", {}).get(OPERATOR_ID)
    return number


def find_repeated_blocks(graph: fx.Graph, names: Mapping[fx.Node, str]) -> list[RepeatedBlocks]:
    """The runs of equal blocks in a captured graph that is about to be differentiated.

    ``names`` maps arguments of the graph to the parameters and buffers that they are.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    numbers = dict[Any, int]()
    keys = np.array([numbers.setdefault(_key(node), len(numbers)) for node in nodes], dtype=np.int64)
    return [*_runs(nodes, keys, names)]


def _runs(
    nodes: Sequence[fx.Node], keys: "np.ndarray[Any, Any]", names: Mapping[fx.Node, str]
) -> Iterator[RepeatedBlocks]:
    """The run that leaves out the most nodes, with those on either side of it."""
    best, saved = None, 0
    for period in _periods(keys):
        start, count = _longest_repetition(keys, period)
        if (count - NUM_FIRST - 1) * period > saved and count >= NUM_FIRST + 1 + MIN_LEFT_OUT:
            run = _equal_blocks([nodes[start + k * period :][:period] for k in range(count)], names)
            if run is not None and len(run.left_out) * period > saved:
                best, saved = run, len(run.left_out) * period
    if best is not None:
        first, last = nodes.index(best.blocks[0][0]), nodes.index(best.blocks[-1][-1]) + 1
        yield from _runs(nodes[:first], keys[:first], names)
        yield best
        yield from _runs(nodes[last:], keys[last:], names)


def _periods(keys: "np.ndarray[Any, Any]") -> list[int]:
    """The commonest distances between equal nodes, and small multiples of these."""
    last, distances = dict[int, int](), Counter[int]()
    for position, key in enumerate(keys.tolist()):
        if key in last:
            distances[position - last[key]] += 1
        last[key] = position
    common = [distance for distance, _ in distances.most_common(_NUM_PERIODS)]
    return list(dict.fromkeys(distance * times for times in (1, 2, 3, 4) for distance in common))


def _longest_repetition(keys: "np.ndarray[Any, Any]", period: int) -> tuple[int, int]:
    """Where the longest repetition with this period starts, and how many whole blocks it has."""
    differs = np.flatnonzero(keys[:-period] != keys[period:])
    bounds = np.concatenate([[-1], differs, [len(keys) - period]])
    lengths = np.diff(bounds) - 1
    longest = int(np.argmax(lengths))
    return int(bounds[longest]) + 1, int(lengths[longest]) // period + 1


def _key(node: fx.Node) -> Any:
    """What must be equal in equal blocks of a node by itself: all but which nodes it reads."""
    value = fake_value(node)
    has_attribute = any(source.op == "get_attr" for source in node.all_input_nodes)
    if node.op == "call_module" or node.target in _UNEQUAL or has_attribute or unbacked_symbols(value):
        return object()
    if _makes_constant(node):
        return object()
    return node.op, node.target, constants_key(node.args), constants_key(node.kwargs), value_key(value)


def _makes_constant(node: fx.Node) -> bool:
    """Whether differentiation makes a tensor of numbers in the arguments, one for each node."""
    if node.target is operator.getitem:
        index: Any = node.args[1]
        return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else (index,)))
    return operator_name(node) in HOLDING_NUMBERS


def constants_key(argument: Any) -> Any:
    """What must be equal in equal blocks of the arguments of a node: all but which nodes they are."""
    match argument:
        case fx.Node():
            return fx.Node
        case tuple() | list():
            return type(argument).__name__, *map(constants_key, argument)
        case dict():
            return dict, *((name, constants_key(each)) for name, each in argument.items())
        case slice(start=start, stop=stop, step=step):
            return slice, *map(constants_key, (start, stop, step))
        case bool() | int() | float() | complex() | str() | None:
            return type(argument), repr(argument)  # 1 is not True, nor 0.0 -0.0
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return argument
        case sympy.Basic():
            return argument
        case _ if argument is Ellipsis:
            return Ellipsis
    return object()


def value_key(value: Any) -> Any:
    """What is known of a value before anything is computed."""
    match value:
        case Tensor() if value.layout is torch.strided:
            sizes = tuple(map(formula, (*value.shape, *value.stride(), value.storage_offset())))
            kind = type(value) is nn.Parameter, value.dtype, value.device, value.requires_grad
            return *kind, value.dim(), sizes
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return type(value), formula(value)
        case tuple() | list():
            return tuple(map(value_key, value))
        case bool() | int() | float() | str() | None:
            return type(value), repr(value)
    return object()


def _equal_blocks(blocks: Sequence[Sequence[fx.Node]], names: Mapping[fx.Node, str]) -> RepeatedBlocks | None:
    """The longest equal run from the first block, or else from a later one, if enough blocks are equal."""
    for first in range(len(blocks) - NUM_FIRST - MIN_LEFT_OUT):
        found = _Comparison(blocks[first:], names)
        tensors = found.own_tensors()
        num_last = 1 + found.adds_gradients
        if len(tensors) >= NUM_FIRST + num_last + MIN_LEFT_OUT:
            return RepeatedBlocks(blocks[first:][: len(tensors)], tensors, num_last)
    return None


class _Comparison:
    """Compares blocks whose nodes have equal keys by what these read."""

    def __init__(self, blocks: Sequence[Sequence[fx.Node]], names: Mapping[fx.Node, str]) -> None:
        self._blocks = blocks
        self._names = names
        self._place = {node: (k, j) for k, block in enumerate(blocks) for j, node in enumerate(block)}
        self._shift = _first_operator(blocks[1]) - _first_operator(blocks[0])
        self._shared = dict[fx.Node, None]()

    @property
    def adds_gradients(self) -> bool:
        """Whether what all blocks read has a gradient, to which each block adds."""
        values = map(fake_value, self._shared)
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    def own_tensors(self) -> list[list[str]]:
        """The names of the tensors that each block alone reads, for as many blocks as are equal."""
        rows, taken = list[dict[fx.Node, fx.Node]](), set[str]()
        for k in range(len(self._blocks)):
            own = {node: node for node in rows[0]} if k == 1 else self._own_arguments(k)
            if own is None or (rows and own.keys() != rows[0].keys()):
                break
            names = {self._names[node] for node in own.values()}
            if not taken.isdisjoint(names) or len(names) < len(own):
                break
            taken |= names
            rows.append(own)
        while rows and not self._is_separate(len(rows) - 1, rows):
            rows.pop()
        return [[self._names[row[node]] for node in rows[0]] for row in rows]

    def _own_arguments(self, k: int) -> dict[fx.Node, fx.Node] | None:
        """The argument of block ``k`` for each that block 1 alone reads; None if the blocks are not equal."""
        own = dict[fx.Node, fx.Node]()
        for node, like in zip(self._blocks[k], self._blocks[1], strict=True):
            if not self._is_shifted(node, like, k - 1):
                return None
            for source, expected in zip(inputs_of(node), inputs_of(like), strict=True):
                if not self._is_equal_input(source, expected, k, own):
                    return None
        return own

    def _is_shifted(self, node: fx.Node, like: fx.Node, blocks: int) -> bool:
        number, expected = _operator(node), _operator(like)
        if number is None or expected is None:
            return number is expected
        return number == expected + blocks * self._shift

    def _is_equal_input(self, source: fx.Node, like: fx.Node, k: int, own: dict[fx.Node, fx.Node]) -> bool:
        """Whether block ``k`` reads a value as block 1 does. Notes it in ``own`` if it is the block's own."""
        (block, place), (like_block, like_place) = (self._place.get(x, (-1, -1)) for x in (source, like))
        if like_block >= 0:
            if k == 0 and like_block == 0:  # what is in front of the run is read in place of a block's value
                return block < 0 and value_key(fake_value(source)) == value_key(fake_value(like))
            return like_block <= 1 and (block, place) == (like_block + k - 1, like_place)
        if source is like and like not in own:
            self._shared[source] = None
            return True
        if block >= 0 or like in self._shared or not {source, like} <= self._names.keys():
            return False
        is_alike: bool = value_key(fake_value(source)) == value_key(fake_value(like))
        return is_alike and own.setdefault(like, source) is source

    def _is_separate(self, last: int, rows: Sequence[Mapping[fx.Node, fx.Node]]) -> bool:
        """Whether nobody else reads a block's own tensors, nor values of any but the ``last`` block."""
        for k in range(last + 1):
            readers = {user for argument in rows[k].values() for user in argument.users}
            if any(self._place.get(user, (-1, 0))[0] != k for user in readers):
                return False
            readers = {user for node in self._blocks[k] for user in node.users}
            if k < last and any(self._place.get(user, (-1, 0))[0] not in (k, k + 1) for user in readers):
                return False
        return True


def without_middle(graph: fx.Graph, runs: Sequence[RepeatedBlocks]) -> fx.Graph:
    """A copy of a captured graph without the blocks that are left out. All its arguments remain."""
    stands_for = dict[fx.Node, fx.Node]()
    for run in runs:
        for k in run.left_out:
            stands_for |= zip(run.blocks[k], run.blocks[NUM_FIRST - 1], strict=True)
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in stands_for:
            copies[node] = copied.node_copy(node, lambda read: copies[stands_for.get(read, read)])
    return copied
