"""Rewrites a captured graph so that microbatches together make what the unsplit model makes of the batch.

::

    loss = cross_entropy(logits, labels)          n = of_batch((labels != -100).sum())
                                            ->    s = cross_entropy(logits, labels, reduction="sum")
                                                  loss = s / (n * share)

Losses of microbatches are averaged, each weighted with its ``share`` of the rows. A plain mean stays as it
is. What follows from the arguments of ``step`` alone and has no rows, such as a count, is taken of the whole
batch. A sum is divided by the share.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from pipec.capture.call import plain_name
from pipec.capture.checks import leading_to_checks
from pipec.capture.conditions import refuse_unless_of_batch
from pipec.capture.markers import OF_BATCH, RESULT, SHARE
from pipec.capture.parts import (
    ADD,
    ALONG,
    ARITHMETIC,
    CONSTANTS,
    COUNTED,
    DIVIDE,
    MOVING,
    MULTIPLY,
    REDUCING,
    SHAPED,
    TERMS,
    ZEROS,
    Meaning,
    Part,
    changes_argument,
    dimensions_of,
    is_drawn,
    named_arguments,
    operator_name,
    part_of_rows,
    part_of_sums,
    place_of,
    reduction_of,
)
from pipec.capture.rewriting import Chain, put, value_of
from pipec.capture.rounds import Rounds
from pipec.capture.selections import SELECTED, SHAPING, num_told, part_of_selection
from pipec.graph import is_assumption
from pipec.torch_compat import pytree, value_symbols


def add_up(
    module: fx.GraphModule, batched: Collection[str], size: int, has_loss: bool, num_replicas: int = 1
) -> str:
    """Rewrite the graph in place. Returns the call after which it is not known how losses add up, if any.

    Args:
        module: What a front end captured of one microbatch.
        batched: The paths of the arguments that are split.
        size: The rows of the microbatch, if the graph is for these alone.
        has_loss: The first output is the loss.
        num_replicas: How many replicas the model's own collectives join.
    """
    walk = _Walk(module, {plain_name(path) for path in batched}, size, num_replicas)
    for node in list(module.graph.nodes):
        walk.visit(node)
    output = module.graph.output_node()
    loss = next(iter(pytree.tree_leaves(output.args)), None) if has_loss else None
    if loss in walk.known and walk.known[loss].part is Part.SUM and not walk.make_mean(loss, output):
        walk.known[loss] = Meaning(Part.OTHER, because=loss)
    loss = next(iter(pytree.tree_leaves(output.args)), None) if has_loss else None
    output.args = fx.map_arg(output.args, lambda node: node if node is loss else walk.marked(node))
    module.recompile()
    because = walk.known[loss].because if loss in walk.known else None
    return place_of(because) if because else ""


@dataclass
class _Walk:
    """Visits the nodes of a graph in order, and knows what it has learnt of them."""

    module: fx.GraphModule
    batched: Collection[str]
    size: int
    num_replicas: int
    known: dict[fx.Node, Meaning] = field(default_factory=dict)
    _scaled_by_rows: bool = False
    _means: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _moved: set[fx.Node] = field(default_factory=set)
    """What may have its rows in another dimension than the arguments have."""

    def __post_init__(self) -> None:
        split = [node for node in self._arguments() if plain_name(str(node.target)) in self.batched]
        sizes = [value.shape[0] for value in map(value_of, split) if value.shape[:1]]
        symbols = [x.node.expr for x in sizes if isinstance(x, torch.SymInt)]
        self._symbol = next((x for x in symbols if isinstance(x, sympy.Symbol)), None)
        fixed_size = self.size if self._symbol is None else 0
        self._checks = leading_to_checks(self.module.graph)
        self.rounds = Rounds(self.module.graph, self.num_replicas, fixed_size, self._symbol)

    def _arguments(self) -> list[fx.Node]:
        nodes = self.module.graph.find_nodes(op="placeholder")
        return [node for node in nodes if isinstance(value_of(node), Tensor)]

    def visit(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.known[node] = self._of_argument(node)
            case "get_attr":
                held = operator.attrgetter(str(node.target))(self.module)
                self.known[node] = Meaning(Part.SAME, not isinstance(held, nn.Parameter | nn.Module))
            case "call_function" if is_assumption(node):
                rows = self.size if self._symbol is None else None
                refuse_unless_of_batch(node, lambda each: self.known[each].part, rows)
            case "call_function" | "call_method" if node in self._checks:
                pass  # each microbatch is checked by itself
            case "call_function" | "call_method":
                self._scaled_by_rows |= self._symbol is None and self._may_scale_by_rows(node)
                self.known[node] = self._of_call(node)
                if changes_argument(node) and isinstance(changed := node.args[0], fx.Node):
                    self.known[changed] = self.known[node]

    def _of_argument(self, node: fx.Node) -> Meaning:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return Meaning(Part.SAME)
        split = (
            self._num_batches(value) == 1
            if self._symbol is not None
            else plain_name(str(node.target)) in self.batched
        )
        given = not isinstance(value, nn.Parameter) and not any(map(changes_argument, node.users))
        return Meaning(Part.ROWS if split else Part.SAME, given)

    def _of_call(self, node: fx.Node) -> Meaning:
        if operator_name(node) in MOVING or not self._moved.isdisjoint(node.all_input_nodes):
            self._moved.add(node)
        read = [self.known[source] for source in node.all_input_nodes]
        value = value_of(node.args[0] if operator_name(node) == "setitem" else node)
        given = all(meaning.given for meaning in read) and not is_drawn(node)
        if value is None:
            return Meaning(Part.OTHER, because=node)
        if self.rounds.is_join(node):
            return self._of_join(node)
        self.rounds.follow(node, {source: self.known[source].part for source in node.all_input_nodes})
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
            return Meaning(self._of_number(value), given, node)
        if operator_name(node) in SHAPED and not self._num_batches(value):
            return Meaning(Part.SAME, given)
        for meaning, source in zip(read, node.all_input_nodes, strict=True):
            if meaning.part is Part.OTHER and not self._tells_no_row(source, node):
                return meaning
        shapes = self.rounds.shapes(node)
        parts = [
            Part.SAME if meaning.part is Part.OTHER or source in shapes else meaning.part
            for meaning, source in zip(read, node.all_input_nodes, strict=True)
        ]
        part = self._of_tensor(node, value, parts)
        known = (part is Part.SUM) if self._symbol is None else part in (Part.SUM, Part.MEAN, Part.OTHER)
        own = self.rounds.leads_to_join(node)
        fixed = isinstance(value, Tensor) and not num_told(value) and self._num_batches(value) == 0
        if given and known and not own and fixed:
            return self._take_of_batch(node, adds_up=part is Part.SUM)
        return Meaning(part, given, node if part is Part.OTHER else None)

    def _of_join(self, node: fx.Node) -> Meaning:
        """What a collective makes of a microbatch's value, if a step is one round."""
        meaning = self.known[node.all_input_nodes[0]]
        part = self.rounds.join(node, meaning.part)
        return Meaning(part, because=(meaning.because or node) if part is Part.OTHER else None)

    def _tells_no_row(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether a call only looks up rows by whole numbers, such as those that experts are chosen by.

        Or it reads a number as a size.
        """
        value = value_of(source)
        if isinstance(value, torch.SymInt):
            return operator_name(reader) in SHAPING
        whole = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
        rows = any(self.known[each].part is Part.ROWS for each in reader.all_input_nodes)
        return (
            whole
            and rows
            and operator_name(reader) not in ARITHMETIC
            and self._num_batches(value_of(reader)) == 1
        )

    def _of_number(self, value: Any) -> Part:
        if value_symbols(value):
            return Part.OTHER
        expression = value.node.expr if hasattr(value, "node") else value
        if self._symbol is None or not isinstance(expression, sympy.Basic):
            return Part.SAME
        if self._symbol not in expression.free_symbols:
            return Part.SAME
        expression = expression.replace(lambda x: type(x).__name__ == "ToFloat", lambda x: x.args[0])
        return Part.SIZE if self._is_proportional(expression) else Part.OTHER

    def _is_proportional(self, size: sympy.Basic) -> bool:
        return self._symbol not in sympy.cancel(size / self._symbol).free_symbols

    def _of_tensor(self, node: fx.Node, value: Any, parts: Sequence[Part]) -> Part:
        """What a call returns that reads nothing unknown. ``getitem`` tells several tensors apart."""
        kinds = set(parts)
        if kinds <= {Part.SAME}:
            return Part.SAME
        if kinds & SELECTED or num_told(value):
            return self._of_selection(node, value, parts)
        if kinds & {Part.SUM, Part.MEAN}:
            return self._of_sums(node)
        if not isinstance(value, Tensor):
            return Part.ROWS
        arguments, count = named_arguments(node), self._num_batches(value, self.rounds.rows_of_round(node))
        if self._symbol is None and operator_name(node) in REDUCING and self._reduces_first(node):
            if count and node in self._moved:
                return Part.OTHER  # what is left may be the rows as well
            count = 0
        if count == 0:
            if operator_name(node) in COUNTED and (counted := self._count(node, arguments)):
                return counted
            return part_of_rows(node, arguments, Part.SIZE in kinds)
        scaled = Part.SIZE in kinds and operator_name(node) in ARITHMETIC
        return Part.ROWS if count == 1 and not scaled and not self._mixes_rows(node) else Part.OTHER

    def _of_selection(self, node: fx.Node, value: Any, parts: Sequence[Part]) -> Part:
        """What a call makes of rows that values choose, or by choosing them."""
        if self._symbol is None:
            return Part.OTHER
        arguments, count = named_arguments(node), self._num_batches(value)
        reduces = not count and not num_told(value)
        if reduces and operator_name(node) in COUNTED and (counted := self._count(node, arguments)):
            return counted
        return part_of_selection(node, value, parts, arguments, count, self._mixes_rows(node))

    def _reduces_first(self, node: fx.Node) -> bool:
        """Whether a call reduces dimension 0, and that may be the rows, which have no symbol."""
        reduced = value_of(node.all_input_nodes[0])
        return 0 in dimensions_of(node) and reduced.shape[0] % self.size == 0

    def _mixes_rows(self, node: fx.Node) -> bool:
        """Whether a call computes along the batch, so that a row depends on others."""
        if operator_name(node) not in ALONG or self._symbol is None:
            return False
        source = node.all_input_nodes[0]
        sizes, whole = tuple[Any, ...](value_of(source).shape), self.rounds.rows_of_round(source)
        along = [sizes[dim] for dim in dimensions_of(node)]
        return any(self._has_rows(size) and size.node.expr not in whole for size in along)

    def _has_rows(self, size: Any) -> bool:
        """Whether a size grows with the batch, or values tell it."""
        return self._is_of_batch(size) or bool(value_symbols(size))

    def _is_of_batch(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and self._symbol in size.node.expr.free_symbols

    def _num_batches(self, value: Any, whole: Collection[Any] = ()) -> int:
        """How many dimensions are the batch, or a multiple of it; 2 also if one grows otherwise with it.

        The sizes in ``whole`` do not count.
        """
        if not isinstance(value, Tensor):
            return 0
        if self._symbol is None:
            return int(any(isinstance(size, int) and size % self.size == 0 for size in value.shape))
        sizes = [size.node.expr for size in tuple[Any, ...](value.shape) if self._is_of_batch(size)]
        sizes = [size for size in sizes if size not in whole]
        return len(sizes) if all(map(self._is_proportional, sizes)) else 2

    def _of_sums(self, node: fx.Node) -> Part:
        """What a call makes of sums and means of microbatches. Sums that are added to others become means."""
        operands = [x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, fx.Node)]
        if operator_name(node) in ADD:
            operands = [x for x in operands if not self._is_zero(x)]
        numbers = [x for x in node.args if isinstance(x, int | float)]
        if self._symbol is None and self._may_scale_by_rows(node):
            return Part.OTHER
        parts = [self.known[operand].part for operand in operands]
        part = part_of_sums(node, parts, any(numbers))
        if self._symbol is not None and self._num_batches(value_of(node)):
            return Part.OTHER
        if operator_name(node) in DIVIDE and part is Part.SUM and self._divide_by_share(node):
            return Part.MEAN
        if operator_name(node) in TERMS and part is Part.MEAN:
            for operand in dict.fromkeys(operands):
                if self.known[operand].part is Part.SUM and not self.make_mean(operand, node):
                    return Part.OTHER
        return part

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether a node is zeros that were made to add to, and nothing was added to them yet."""
        return operator_name(node) in ZEROS and self.known[node].part is Part.SAME

    def _divide_by_share(self, quotient: fx.Node) -> bool:
        """Let a sum over a tensor, such as a count, be over the share of it. Returns whether that is done.

        The quotient is then as large as that of the batch, whatever is made of it. Of what replicas have
        joined, each has the same share.
        """
        total, divisor = quotient.args[0], quotient.args[1]
        if self._scaled_by_rows or not isinstance(divisor, fx.Node):
            return False
        if self.rounds.is_joined(divisor):
            assert isinstance(total, fx.Node)
            quotient.args = (put(total, total.name, operator.mul, total, self.num_replicas), divisor)
            return True
        share = Chain(divisor).share_of(divisor, quotient)
        quotient.replace_input_with(divisor, share)
        self.known[share] = Meaning(Part.SAME)
        return True

    def _may_scale_by_rows(self, node: fx.Node) -> bool:
        """Whether a call has a number in it that may be the rows, where they are not a symbol."""
        numbers = [
            x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, int | float)
        ]
        scales = operator_name(node) in MULTIPLY | DIVIDE | CONSTANTS
        return scales and any(number and number % self.size == 0 for number in numbers)

    def make_mean(self, total: fx.Node, reader: fx.Node) -> bool:
        """Let ``reader`` read a sum divided by the share. Returns whether that can be done."""
        shared = changes_argument(reader) and reader.args[0] is total and len(total.users) > 1
        if shared or self._scaled_by_rows or not value_of(total).is_floating_point():
            return False
        if total not in self._means:
            share = put(total, "share", SHARE, value_of(total).device)
            share = put(share, "share", torch.ops.aten._to_copy.default, share, dtype=value_of(total).dtype)
            self._means[total] = put(share, total.name, operator.truediv, total, share)
            self._means[total].meta["example_value"] = value_of(total)
            self.known[self._means[total]] = Meaning(Part.MEAN)
        reader.replace_input_with(total, self._means[total])
        return True

    def marked(self, node: fx.Node) -> fx.Node:
        """What to return instead of a result besides the loss: one that says how it adds up."""
        meaning = self.known[node]
        told = meaning.part in (Part.SUM, Part.OTHER) or self.rounds.rows_of_round(node)
        if not isinstance(value_of(node), Tensor) or not told:
            return node
        unclear = "" if meaning.part is Part.SUM else place_of(meaning.because or node)
        return put(node, node.name, RESULT, node, unclear)

    def _take_of_batch(self, node: fx.Node, adds_up: bool) -> Meaning:
        """Let the users of a node read what it is of the whole batch."""
        users = [user for user in node.users if user not in self._checks]
        whole = put(node, "of_batch", OF_BATCH, node, adds_up)
        whole.meta["example_value"] = value_of(node)
        self.known[whole] = Meaning(Part.SAME, given=True)
        for user in users:
            user.replace_input_with(node, whole)
        return self.known[whole]

    def _count(self, node: fx.Node, arguments: dict[str, Any]) -> Part | None:
        """Let a mean over targets that count be their sum over the number of them in the batch.

        None if the loss is none over targets that are classes.
        """
        target, weight = arguments.get("target"), arguments.get("weight")
        if target is None or value_of(target).is_floating_point() or reduction_of(arguments) != "mean":
            return None
        if not all(self.known[x].given for x in (target, weight) if isinstance(x, fx.Node)):
            return Part.OTHER
        chain = Chain(node)
        valid = chain("valid", torch.ne, target, arguments["ignore_index"])
        counted = valid
        if weight is not None:
            invalid = chain("invalid", torch.logical_not, valid)
            index = chain("index", torch.flatten, chain("index", torch.masked_fill, target, invalid, 0))
            weights = chain("weights", torch.gather, weight, 0, index)
            counted = chain("weights", torch.masked_fill, weights, chain("flat", torch.flatten, invalid), 0)
        count = chain("count", OF_BATCH, chain("count", torch.sum, counted), True)
        share = chain.share_of(count, node)
        total = chain.again(node, reduction=2 if isinstance(arguments["reduction"], int) else "sum")
        mean = chain(node.name, operator.truediv, total, share)
        mean.meta["example_value"] = value_of(node)
        node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not total)
        self.known[mean] = Meaning(Part.MEAN)
        return Part.MEAN
