"""Differentiates a few of the equal blocks of a captured graph, and copies one of them for the others.

Blocks are equal if they call the same operators, with the same constants, on values of the same dtype and
shape, in the same order. Each reads values of its own and of the block before, tensors of the model that
nobody else reads, and values that all blocks read alike. A transformer's layers are such a run::

    embed | block 0 | block 1 | block 2 | ... | block 30 | block 31 | head

``without_middle`` leaves out all but the first three and the last one, and torch differentiates what remains.
``instantiate_blocks`` then compares the second and the third, and their backward, node by node. If the third
is what the second becomes when every block is replaced by the next one, so are all others: autograd derives
the backward of an operator from this operator alone, and adds gradients up in the order in which blocks
follow each other. The third is copied::

    F0 F1 F2 F31 loss B31 B2 B1 B0   ->   F0 F1 F2 F3 ... F30 F31 loss B31 B30 ... B3 B2 B1 B0

The first block may read anything in place of a block before it.
"""

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn

from pipec.capture.captured_collectives import MODEL_COLLECTIVES, sync_batch_norm
from pipec.capture.graph_calls import HOLDING_NUMBERS, fake_value, inputs_of, operator_name
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION, OUTPUT_MERGE, REQUIRE
from pipec.capture.operators import OPERATOR_ID
from pipec.graph import (
    CHECK_BRANCH,
    Buffer,
    Gradient,
    Parameter,
    TrainingGraph,
    UpdatedBuffer,
    is_forward,
    is_random,
)
from pipec.torch_compat.differentiation import unbacked_symbols
from pipec.torch_compat.symbolic_numbers import formula

TEMPLATE = 2
"""The block that is copied. It is compared with the one before."""

MIN_BLOCKS = 6
"""A run is worth its search if it has so many blocks, of which four are differentiated."""

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
    reads, in the same order for all.
    """

    blocks: Sequence[Sequence[fx.Node]]
    tensors: Sequence[Sequence[str]]

    @property
    def last(self) -> int:
        """The number of the last block."""
        return len(self.blocks) - 1

    @property
    def left_out(self) -> range:
        """The numbers of the blocks that are not differentiated."""
        return range(TEMPLATE + 1, self.last)

    @property
    def num_operators(self) -> int:
        """The operators of one block."""
        return sum(_operator(node) is not None for node in self.blocks[TEMPLATE])

    def operators(self, block: int) -> range:
        """The numbers of a block's operators."""
        numbers = (_operator(node) for node in self.blocks[block])
        first = next((number for number in numbers if number is not None), 0)
        return range(first, first + self.num_operators)


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
        if count >= MIN_BLOCKS and (count - TEMPLATE - 2) * period > saved:
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


@dataclass(frozen=True)
class _Own:
    """A block's own tensor, by its place among these, and what is known of it."""

    place: int
    key: Any = None


@dataclass(frozen=True)
class _Value:
    """A value of a block, so many blocks behind the one that reads it, by its phase and place there."""

    blocks_behind: int
    is_forward: bool
    place: int


def _equal_blocks(blocks: Sequence[Sequence[fx.Node]], names: Mapping[fx.Node, str]) -> RepeatedBlocks | None:
    """The first run of enough blocks that read the same behind its first. Their nodes have equal keys."""
    place = {node: (k, j) for k, block in enumerate(blocks) for j, node in enumerate(block)}
    readers, num_nodes = defaultdict[str, set[int]](set), Counter(names.values())
    for node, name in names.items():
        readers[name].update(place.get(user, (-1, 0))[0] for user in node.users)
    sources = [[source for node in block for source in inputs_of(node)] for block in blocks]
    own = [
        [
            x
            for x in dict.fromkeys(read)
            if x in names and readers[names[x]] == {k} and num_nodes[names[x]] == 1
        ]
        for k, read in enumerate(sources)
    ]
    own_place = {node: j for nodes in own for j, node in enumerate(nodes)}

    def read(source: fx.Node, k: int) -> fx.Node | _Own | _Value:
        if source in own_place:
            return _Own(own_place[source], value_key(fake_value(source)))
        if source in place:
            return _Value(place[source][0] - k, True, place[source][1])
        return source

    reads = [[read(source, k) for source in sources[k]] for k in range(len(blocks))]

    def is_separate(k: int) -> bool:
        return all(place.get(user, (-1, 0))[0] in (k, k + 1) for node in blocks[k] for user in node.users)

    for first in range(len(blocks) - MIN_BLOCKS + 1):
        last = first + 1
        while is_separate(last) and last + 1 < len(blocks) and reads[last + 1] == reads[first + 1]:
            last += 1
        if last - first + 1 >= MIN_BLOCKS:
            run = range(first, last + 1)
            return RepeatedBlocks([blocks[k] for k in run], [[names[x] for x in own[k]] for k in run])
    return None


def without_middle(graph: fx.Graph, runs: Sequence[RepeatedBlocks]) -> fx.Graph:
    """A copy of a captured graph without the blocks that are left out. All its arguments remain."""
    stands_for = dict[fx.Node, fx.Node]()
    for run in runs:
        for k in run.left_out:
            stands_for |= zip(run.blocks[k], run.blocks[TEMPLATE], strict=True)
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in stands_for:
            copies[node] = copied.node_copy(node, lambda read: copies[stands_for.get(read, read)])
    return copied


class IrregularBlocksError(Exception):
    """Blocks that are equal in the model are not equal in the differentiated graph."""


def instantiate_blocks(graph: TrainingGraph, runs: Sequence[RepeatedBlocks]) -> TrainingGraph:
    """The graph with all blocks of the ``runs``, in place. It was captured without their middle.

    Raises:
        IrregularBlocksError: the blocks that are there are not equal. The graph is spoiled.
    """
    for run in runs:
        graph = _Instantiation(graph, run).run()
    draws = itertools.count()
    for node in graph.nodes:
        if is_random(node):
            node.meta["random_seed"] = next(draws)
    return graph


_Part = tuple[int, bool]
"""A block, by its number, and a phase of it: True is the forward."""

_Read = fx.Node | _Own | _Value

_Kind = Gradient | UpdatedBuffer

_Result = tuple[type[_Kind], int, bool, int]
"""A result of a block: its kind, the place of its tensor, and the phase and place of the node."""


class _Instantiation:
    """Puts the middle of one run back."""

    def __init__(self, graph: TrainingGraph, blocks: RepeatedBlocks) -> None:
        self._graph = graph
        self._blocks = blocks
        self._kept = [*range(TEMPLATE + 1), blocks.last]
        self._parts: dict[_Part, list[fx.Node]] = dict(self._find_parts())
        self._place = {
            node: (part, place) for part, nodes in self._parts.items() for place, node in enumerate(nodes)
        }
        arguments = {node.meta["role"]: node for node in graph.arguments}
        roles = {role.fqn: role for role in arguments if isinstance(role, Parameter | Buffer)}
        if any(name not in roles for names in blocks.tensors for name in names):
            raise IrregularBlocksError("an argument is missing")
        self._order = {fqn: place for place, fqn in enumerate(roles)}
        self._own = [[arguments[roles[name]] for name in names] for names in blocks.tensors]
        self._own_place = {node: (k, j) for k, row in enumerate(self._own) for j, node in enumerate(row)}
        self._following = dict[int, fx.Node]()
        """What the template reads of the backward of the last block, by its place in a block."""

    def _find_parts(self) -> Iterator[tuple[_Part, list[fx.Node]]]:
        """The parts: each begins with the first node of its block, and ends before the next part."""
        nodes = list(self._graph.nodes)
        owner = {number: k for k in self._kept for number in self._blocks.operators(k)}
        for forward in (True, False):
            begins, ends = dict[int, int](), dict[int, int]()
            for place, node in enumerate(nodes):
                block = owner.get(node.meta["operator"])
                if block is not None and is_forward(node) is forward:
                    begins.setdefault(block, place)
                    ends[block] = place + 1
            order = self._kept if forward else self._kept[::-1]
            if begins and [*begins] != order:
                raise IrregularBlocksError("blocks do not follow each other")
            for block, behind in itertools.zip_longest(order, order[1:]):
                end = begins.get(behind, ends.get(block, 0))
                yield (block, forward), nodes[begins.get(block, 0) : end]

    def run(self) -> TrainingGraph:
        compared = {forward: self._compared(forward) for forward in (True, False)}
        for part, nodes in self._parts.items():
            self._check_readers(part, nodes)
        results = self._results_of(TEMPLATE)
        if results != self._results_of(TEMPLATE - 1):
            raise IrregularBlocksError("blocks have other results")
        left_out = self._blocks.left_out
        for k in left_out:
            self._copy((k, True), compared[True], self._parts[self._blocks.last, True][0])
        if compared[False]:
            for k in reversed(left_out):
                self._copy((k, False), compared[False], self._parts[TEMPLATE, False][0])
        self._redirect(left_out)
        return self._with_results(results)

    def _compared(self, forward: bool) -> list[Sequence[_Read]]:
        """What each node of the template reads, after comparing the template with the block before."""
        nodes, likes = self._parts[TEMPLATE, forward], self._parts[TEMPLATE - 1, forward]
        if len(nodes) != len(likes):
            raise IrregularBlocksError(f"blocks have {len(likes)} and {len(nodes)} nodes")
        shift = self._blocks.num_operators
        operators = self._blocks.operators(TEMPLATE)
        reads = list[Sequence[_Read]]()
        for node, like in zip(nodes, likes, strict=True):
            own = node.meta["operator"] in operators
            if like.meta["operator"] != node.meta["operator"] - shift * own or not _are_alike(node, like):
                raise IrregularBlocksError(f"{like.name} and {node.name} differ")
            sources, expected = inputs_of(node), inputs_of(like)
            if len(sources) != len(expected):
                raise IrregularBlocksError(f"{like.name} and {node.name} read other values")
            reads.append([self._compared_input(*pair) for pair in zip(sources, expected, strict=True)])
        return reads

    def _compared_input(self, source: fx.Node, like: fx.Node) -> _Read:
        """What the template reads as ``source``, and the block before as ``like``."""
        found, expected = self._reference(source, TEMPLATE), self._reference(like, TEMPLATE - 1)
        match found, expected:
            case _Value(-1, True), _Value(-1, True):
                alike = value_key(source.meta["val"]) == value_key(like.meta["val"])
            case _Value(1, False), _Value(1, False, place):
                alike = value_key(source.meta["val"]) == value_key(like.meta["val"])
                alike = alike and self._following.setdefault(place, source) is source
                found = expected
            case _:
                alike = found == expected
        if not alike:
            raise IrregularBlocksError(f"{like.name} and {source.name} are read by equal nodes, and differ")
        return found

    def _reference(self, source: fx.Node, block: int) -> _Read:
        """What ``block`` reads: a value or a tensor of its own or of its neighbours, or a value of none."""
        if source in self._own_place:
            owner, place = self._own_place[source]
            if owner == block:
                return _Own(place)
        elif source not in self._place:
            return source
        else:
            (other, forward), place = self._place[source]
            behind = self._kept.index(other) - self._kept.index(block)
            if behind == 0 or behind == (-1 if forward else 1):
                return _Value(behind, forward, place)
        raise IrregularBlocksError(f"{source.name} is read by a block that is no neighbour")

    def _check_readers(self, part: _Part, nodes: Sequence[fx.Node]) -> None:
        """Check that only neighbours read values of a block, except where the run begins or ends."""
        (block, forward), kept = part, self._kept
        if block == (kept[-1] if forward else kept[0]):
            return
        neighbour = kept[kept.index(block) + (1 if forward else -1)]
        for node in nodes:
            for user in node.users:
                reader = self._place.get(user, ((-1, False), 0))[0][0]
                if user.op != "output" and reader not in (block, neighbour):
                    raise IrregularBlocksError(f"{user.name} reads {node.name} of a block in the middle")

    def _results_of(self, block: int) -> list[_Result]:
        """The results that a block computes."""
        found = list[_Result]()
        for role, node in self._graph.outputs:
            part, place = self._place.get(node, ((-1, False), 0))
            if part[0] == block:
                names = self._blocks.tensors[block]
                if not isinstance(role, Gradient | UpdatedBuffer) or role.fqn not in names:
                    raise IrregularBlocksError(f"{role} is a result of a block in the middle")
                found.append((type(role), names.index(role.fqn), part[1], place))
        return found

    def _copy(self, part: _Part, reads: Sequence[Sequence[Any]], before: fx.Node) -> None:
        """Copy the template's part for block ``part``."""
        block, forward = part
        made = self._parts[part] = list[fx.Node]()
        shift = self._blocks.num_operators * (block - TEMPLATE)
        own, graph = self._blocks.operators(TEMPLATE), self._graph.module.graph
        for node, read in zip(self._parts[TEMPLATE, forward], reads, strict=True):
            sources = iter([self._resolved(each, block) for each in read])
            with graph.inserting_before(before):
                copied = graph.node_copy(node, functools.partial(_next, sources))
            if node.meta["operator"] in own:
                copied.meta["operator"] += shift
            if OPERATOR_ID in copied.meta.get("custom", {}):
                number = copied.meta["custom"][OPERATOR_ID]
                copied.meta["custom"] = {OPERATOR_ID: number + shift * (number in own)}
            made.append(copied)

    def _resolved(self, read: _Read, block: int) -> fx.Node:
        match read:
            case _Own(place):
                return self._own[block][place]
            case _Value(1, False, place) if block + 1 == self._blocks.last:
                return self._following[place]
            case _Value(behind, forward, place):
                return self._parts[block + behind, forward][place]
        return read

    def _redirect(self, left_out: range) -> None:
        """Let the blocks around those that were put in read these."""
        first, last = left_out[0], left_out[-1]
        for place, node in enumerate(self._parts[TEMPLATE, True]):
            for user in list(node.users):
                if self._place.get(user, ((-1, False), 0))[0][0] == self._blocks.last:
                    user.replace_input_with(node, self._parts[last, True][place])
        for place, node in self._following.items():
            for user in list(node.users):
                if self._place.get(user) and self._place[user][0] == (TEMPLATE, False):
                    user.replace_input_with(node, self._parts[first, False][place])

    def _with_results(self, results: Sequence[_Result]) -> TrainingGraph:
        """The graph with the results of the blocks that were put in, in the order of the tensors."""
        added = [
            (kind(self._blocks.tensors[k][own]), self._parts[k, forward][place])
            for k in self._blocks.left_out
            for kind, own, forward, place in results
        ]
        found = [*self._graph.outputs, *added]
        kinds = list(dict.fromkeys(type(role) for role, _ in found))
        found.sort(
            key=lambda each: (kinds.index(type(each[0])), self._order.get(getattr(each[0], "fqn", ""), 0))
        )
        for k in self._blocks.left_out:
            for node, like in zip(self._own[k], self._own[TEMPLATE], strict=True):
                if "updated" in like.meta:
                    node.meta["updated"] = like.meta["updated"]
        self._graph.module.graph.output_node().args = (tuple(node for _, node in found),)
        return replace(self._graph, results=tuple(role for role, _ in found))


def _next(sources: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(sources)


def _are_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes do the same with what they read."""
    keys = ("phase", "constant", "has_data_dependent_size")
    return (
        (node.op, node.target) == (other.op, other.target)
        and constants_key((node.args, node.kwargs)) == constants_key((other.args, other.kwargs))
        and all(node.meta.get(key) == other.meta.get(key) for key in keys)
        and value_key(node.meta["val"]) == value_key(other.meta["val"])
    )
