"""Puts the blocks that were left out of a differentiated graph back: copies of one that is there.

The second and the third block of a run, and their backward, are compared node by node. If the third is what
the second becomes when every block is replaced by the next one, so are all blocks up to the last ones, which
torch has differentiated itself: autograd derives the backward of an operator from this operator alone, and
adds gradients up in the order in which blocks follow each other::

    F0 F1 F2 F31 loss B31 B2 B1 B0   ->   F0 F1 F2 F3 ... F30 F31 loss B31 B30 ... B3 B2 B1 B0
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from pipec.capture.node_insertion import inputs_of
from pipec.capture.number_operators import OPERATOR_ID
from pipec.capture.repeated_blocks import NUM_FIRST, RepeatedBlocks, constants_key, value_key
from pipec.graph import (
    Buffer,
    Gradient,
    Parameter,
    ResultRole,
    TrainingGraph,
    UpdatedBuffer,
    is_forward,
    is_random,
)

TEMPLATE = NUM_FIRST - 1
"""The block that is copied. It is compared with the one before."""


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


@dataclass(frozen=True)
class _Own:
    """A block's own tensor, by its place among these."""

    place: int


@dataclass(frozen=True)
class _Value:
    """A value of a block, so many blocks behind the one that reads it, by its phase and place there."""

    blocks_behind: int
    is_forward: bool
    place: int


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
        self._behind_template = blocks.kept[NUM_FIRST]
        self._parts: dict[_Part, list[fx.Node]] = dict(_parts(list(graph.nodes), blocks))
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
        """What the template reads of the backward of the block behind, by its place in a block."""

    def run(self) -> TrainingGraph:
        self._compare_arguments()
        compared = {forward: self._compared(forward) for forward in (True, False)}
        for part, nodes in self._parts.items():
            self._check_readers(part, nodes)
        results = self._results_of(TEMPLATE)
        if results != self._results_of(TEMPLATE - 1):
            raise IrregularBlocksError("blocks have other results")
        left_out = self._blocks.left_out
        for k in left_out:
            self._copy((k, True), compared[True], self._parts[self._behind_template, True][0])
        if compared[False]:
            for k in reversed(left_out):
                self._copy((k, False), compared[False], self._parts[TEMPLATE, False][0])
        self._redirect(left_out)
        return self._with_results(results)

    def _compare_arguments(self) -> None:
        kinds = [[(type(x.meta["role"]), value_key(x.meta["val"])) for x in row] for row in self._own]
        if any(row != kinds[0] for row in kinds):
            raise IrregularBlocksError("blocks have tensors of other shapes")

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
            case _Value(-1, True, place), _Value(-1, True):
                alike = _are_alike(self._parts[TEMPLATE - 1, True][place], like)
            case _Value(1, False), _Value(1, False, place):
                alike = _are_alike(self._parts[TEMPLATE, False][place], source)
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
            behind = self._blocks.kept.index(other) - self._blocks.kept.index(block)
            if behind == 0 or behind == (-1 if forward else 1):
                return _Value(behind, forward, place)
        raise IrregularBlocksError(f"{source.name} is read by a block that is no neighbour")

    def _check_readers(self, part: _Part, nodes: Sequence[fx.Node]) -> None:
        """Check that only neighbours read values of a block, except where the run begins or ends."""
        (block, forward), kept = part, self._blocks.kept
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
            case _Value(1, False, place) if block + 1 == self._behind_template:
                return self._following[place]
            case _Value(behind, forward, place):
                return self._parts[block + behind, forward][place]
        return read

    def _redirect(self, left_out: range) -> None:
        """Let the blocks around those that were put in read these."""
        first, last = left_out[0], left_out[-1]
        for place, node in enumerate(self._parts[TEMPLATE, True]):
            for user in list(node.users):
                if self._place.get(user, ((-1, False), 0))[0][0] == self._behind_template:
                    user.replace_input_with(node, self._parts[last, True][place])
        for place, node in self._following.items():
            for user in list(node.users):
                if self._place.get(user) and self._place[user][0] == (TEMPLATE, False):
                    user.replace_input_with(node, self._parts[first, False][place])

    def _with_results(self, results: Sequence[_Result]) -> TrainingGraph:
        """The graph with the results of the blocks that were put in."""
        found = self._graph.outputs
        for kind in (UpdatedBuffer, Gradient):
            added = [
                (kind(self._blocks.tensors[k][own]), self._parts[k, forward][place])
                for k in self._blocks.left_out
                for each, own, forward, place in results
                if each is kind
            ]
            found = self._merged(found, added) if added else found
        for k in self._blocks.left_out:
            for node, like in zip(self._own[k], self._own[TEMPLATE], strict=True):
                if "updated" in like.meta:
                    node.meta["updated"] = like.meta["updated"]
        self._graph.module.graph.output_node().args = (tuple(node for _, node in found),)
        return replace(self._graph, results=tuple(role for role, _ in found))

    def _merged(
        self, results: Sequence[tuple[ResultRole, fx.Node]], added: Sequence[tuple[_Kind, fx.Node]]
    ) -> list[tuple[ResultRole, fx.Node]]:
        """The results with those of one kind that are ``added``, in the order of the tensors.

        The gradient of a tied tensor may come later, in the place of another of its names.
        """
        waiting = deque(sorted(added, key=lambda each: self._order[each[0].fqn]))
        same = [type(role) is type(added[0][0]) for role, _ in results]
        last = max(place for place, is_same in enumerate(same) if is_same)
        merged, latest = list[tuple[ResultRole, fx.Node]](), -1
        for place, (role, node) in enumerate(results):
            if same[place] and isinstance(role, _Kind):
                order = self._order[role.fqn]
                while waiting and max(latest, self._order[waiting[0][0].fqn]) < order:
                    merged.append(waiting.popleft())
                latest = max(latest, order)
            merged.append((role, node))
            if place == last:
                merged.extend(waiting)
        return merged


def _parts(nodes: Sequence[fx.Node], blocks: RepeatedBlocks) -> Iterator[tuple[_Part, list[fx.Node]]]:
    """The parts: each begins with the first node of its block, and ends before the next part."""
    owner = {number: k for k in blocks.kept for number in blocks.operators(k)}
    for forward in (True, False):
        begins, ends = dict[int, int](), dict[int, int]()
        for place, node in enumerate(nodes):
            block = owner.get(node.meta["operator"])
            if block is not None and is_forward(node) is forward:
                begins.setdefault(block, place)
                ends[block] = place + 1
        order = blocks.kept if forward else blocks.kept[::-1]
        if not begins:
            yield from (((block, forward), []) for block in order)
            continue
        if [*begins] != order:
            raise IrregularBlocksError("blocks do not follow each other")
        for block, behind in itertools.zip_longest(order, order[1:]):
            end = ends[block] if behind is None else begins[behind]
            yield (block, forward), [*nodes[begins[block] : end]]


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
