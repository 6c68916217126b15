"""Take a recurrent layer apart in time: each part goes through some of the steps, and hands on the states.

::

    y, h1 = recurrence(x, h0, w)           a, h = recurrence(x[:6], h0, w)       operator 4
                                    ->     c, h1 = recurrence(x[6:], h, w)       operator 5
                                           y = cat([a, c])                       operator 5

So stages are cut between the steps of a sequence. The weights are then tied: every stage with a part reads
them, and their gradient is a sum over the parts, which is eager torch's but for rounding.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from pipec.cost.formulas import OperatorCost, operator_cost
from pipec.cost.symbolic_sizes import SymbolSubstitutions, symbol_substitutions, tensor_sizes
from pipec.graph import Parameter, TrainingGraph, is_forward, stage_of
from pipec.passes.split_operators import split_operators
from pipec.primitives import ONEDNN_LSTM, RECURRENCE, RECURRENCE_BACKWARD

SplitPoints = tuple[Fraction, ...]
"""Where the parts of a layer end, but for the last: shares of its steps, in the order that it takes them."""

_WHOLE = (Fraction(0), Fraction(1))


@dataclass(frozen=True)
class RecurrentSplit:
    """Where the parts of a layer end, and the stage of each."""

    ends: SplitPoints
    stages: tuple[int, ...]


RecurrentSplits = Mapping[str, Sequence[RecurrentSplit]]
"""How layers were taken apart: by the first of their weights that all parts read, each call in order."""

_aten = torch.ops.aten

_OUTPUT, _KEPT = 0, 3
"""What a layer returns: its output, two states, and what the backward reads."""


class _Layout(NamedTuple):
    """Where a layer's operator, and that of its backward, have which arguments and results."""

    sequence: int
    states: tuple[int, int]
    weights: Sequence[int]
    reverse: int
    backward: Any
    sequence_read: int | None
    states_read: tuple[int, int]
    results_read: Mapping[int, int]
    gradient: int
    state_gradients: tuple[int, int]
    of_states: tuple[int, int]


_LAYOUTS: Mapping[Any, _Layout] = {
    RECURRENCE: _Layout(
        sequence=1,
        states=(2, 3),
        weights=(4, 5, 6),
        reverse=7,
        backward=RECURRENCE_BACKWARD,
        sequence_read=None,
        states_read=(4, 5),
        results_read={_OUTPUT: 9, _KEPT: 10},
        gradient=1,
        state_gradients=(2, 3),
        of_states=(1, 2),
    ),
    ONEDNN_LSTM: _Layout(
        sequence=0,
        states=(5, 6),
        weights=(2, 1, 3, 4),
        reverse=7,
        backward=_aten.mkldnn_rnn_layer_backward.default,
        sequence_read=0,
        states_read=(5, 6),
        results_read={_OUTPUT: 7, 1: 8, 2: 9, _KEPT: 22},
        gradient=10,
        state_gradients=(11, 12),
        of_states=(5, 6),
    ),
}

_OF_SEQUENCE = 0
"""The backward returns the gradient of the sequence first."""


def recurrent_layers(graph: TrainingGraph) -> dict[int, fx.Node]:
    """The recurrent layers that can be taken apart in time, by operator.

    Their weights are parameters, which several stages may read. oneDNN takes no part without steps, as there
    may be where the length is a symbol.
    """
    found: dict[int, list[fx.Node]] = {}
    for node in filter(is_forward, graph.nodes):
        if node.target in _LAYOUTS:
            found.setdefault(node.meta["operator"], []).append(node)
    alone = {op: layers[0] for op, layers in found.items() if len(layers) == 1}
    return {op: layer for op, layer in alone.items() if _reads_parameters(layer) and _may_be_short(layer)}


def num_steps(layer: fx.Node) -> Any:
    """The length of the layer's sequence, which may be a symbol."""
    return _sequence(layer).meta["val"].shape[0]


def backward_of(layer: fx.Node) -> fx.Node | None:
    """The node that differentiates the layer, if one does."""
    kept = _items(layer).get(_KEPT)
    layout = _LAYOUTS[layer.target]
    return next((user for user in kept.users if user.target is layout.backward), None) if kept else None


def recurrent_splits(graph: TrainingGraph) -> RecurrentSplits:
    """How the layers of a graph that was cut were taken apart."""
    return {
        weight: tuple(
            RecurrentSplit(
                tuple(part.meta["step_range"][1] for part in parts[:-1]), tuple(map(stage_of, parts))
            )
            for parts in calls
        )
        for weight, calls in _calls(graph).items()
        if any(len(parts) > 1 for parts in calls)
    }


def repeat_recurrent_splits(graph: TrainingGraph, known: RecurrentSplits) -> TrainingGraph:
    """Take the layers apart as those of another graph of the model were."""
    ends, layers = dict[int, SplitPoints](), recurrent_layers(graph)
    for weight, calls in _calls(graph).items():
        for (layer,), parts in zip(calls, known.get(weight, ()), strict=False):
            if parts.ends and layers.get(op := layer.meta["operator"]) is layer:
                ends[op] = parts.ends
    return split_layers_in_time(graph, ends)


def stages_of_chunks(graph: TrainingGraph, known: RecurrentSplits) -> dict[int, int]:
    """By operator, the stage of each part of a layer that was taken apart again."""
    return {
        part.meta["operator"]: stage
        for weight, calls in _calls(graph).items()
        for parts, each in zip(calls, known.get(weight, ()), strict=False)
        if len(parts) > 1
        for part, stage in zip(parts, each.stages, strict=True)
    }


def _calls(graph: TrainingGraph) -> dict[str, list[list[fx.Node]]]:
    """By the parameter that multiplies the state, every call of a layer in order: its parts, or itself."""
    found: dict[str, list[list[fx.Node]]] = {}
    for node in filter(is_forward, graph.nodes):
        if node.target in _LAYOUTS and _reads_parameters(node):
            weight: fx.Node = node.args[_LAYOUTS[node.target].weights[0]]  # type: ignore[assignment]
            calls = found.setdefault(weight.meta["role"].fqn, [])
            if node.meta.get("step_range", _WHOLE)[0] == 0:
                calls.append([])
            calls[-1].append(node)
    return found


def split_layers_in_time(graph: TrainingGraph, ends: Mapping[int, SplitPoints]) -> TrainingGraph:
    """Take the layers of these operators apart. Each part is an operator of its own."""
    steps, layers, planned = (
        dict[int, Mapping[fx.Node, int]](),
        recurrent_layers(graph),
        symbol_substitutions(graph),
    )
    for op, each in ends.items():
        steps[op] = _Layer(graph, layers[op], each, planned).split_operators()
    return split_operators(graph, steps)


def _reads_parameters(layer: fx.Node) -> bool:
    weights = [layer.args[position] for position in _LAYOUTS[layer.target].weights]
    return all(
        isinstance(weight.meta.get("role"), Parameter) for weight in weights if isinstance(weight, fx.Node)
    )


def _may_be_short(layer: fx.Node) -> bool:
    return layer.target is RECURRENCE or isinstance(num_steps(layer), int)


def _sequence(layer: fx.Node) -> fx.Node:
    sequence = layer.args[_LAYOUTS[layer.target].sequence]
    assert isinstance(sequence, fx.Node)
    return sequence


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


@dataclass
class _Layer:
    """A layer of a graph, and what its parts are made of. ``steps`` are those of the operator's new nodes."""

    graph: TrainingGraph
    layer: fx.Node
    ends: SplitPoints
    planned: SymbolSubstitutions
    steps: dict[fx.Node, int] = field(default_factory=dict)

    def split_operators(self) -> Mapping[fx.Node, int]:
        """Replace the layer and its backward. Returns the step of each node of the operator."""
        last, back = len(self.ends), backward_of(self.layer)
        self._number_others(back)
        parts = self._forward()
        if back is not None:
            self._backward(back, parts)
            self._erase(back)
        results = _items(self.layer)
        for index, result in results.items():
            if result.users:
                with self._before(self.layer):
                    whole = [self._item(part, index) for part in parts]
                    joined = self._joined(whole, last) if index == _OUTPUT else whole[-1]
                result.replace_all_uses_with(joined)
        self._erase(self.layer)
        return self.steps

    def _number_others(self, back: fx.Node | None) -> None:
        """What leads to the layer goes with its first part, and what follows with the last one."""
        last, begun, backward_begun = len(self.ends), False, False
        for node in self.graph.nodes:
            begun, backward_begun = begun or node is self.layer, backward_begun or node is back
            if node.meta["operator"] == self.layer.meta["operator"]:
                behind = begun if is_forward(node) else not backward_begun
                self.steps[node] = last if behind else 0

    def _forward(self) -> list[fx.Node]:
        layout, parts = _LAYOUTS[self.layer.target], list[fx.Node]()
        arguments, bounds = list(self.layer.args), (Fraction(0), *self.ends, Fraction(1))
        with self._before(self.layer):
            for step, share in enumerate(pairwise(bounds)):
                arguments[layout.sequence] = self._slice(_sequence(self.layer), step, 0)
                part = self._put(self.layer.target, arguments, self.layer, step)
                part.meta["step_range"] = share
                self._scale(part, self.layer.meta["cost"], share[1] - share[0])
                for position, index in zip(layout.states, (1, 2), strict=True):
                    if arguments[position] is not None:
                        arguments[position] = self._item(part, index)
                parts.append(part)
        return parts

    def _backward(self, back: fx.Node, parts: Sequence[fx.Node]) -> None:
        """Go back through the parts. Weights have the sum of what each part gives, in autograd's order."""
        layout, made, last = _LAYOUTS[self.layer.target], list[fx.Node](), len(parts) - 1
        arguments = list(back.args)
        gradient = back.args[layout.gradient]
        with self._before(back):
            for step, part in reversed([*enumerate(parts)]):
                if layout.sequence_read is not None:
                    arguments[layout.sequence_read] = part.args[layout.sequence]
                for position, of in zip(layout.states_read, layout.states, strict=True):
                    arguments[position] = part.args[of]
                for index, position in layout.results_read.items():
                    arguments[position] = self._item(part, index)
                if isinstance(gradient, fx.Node):
                    arguments[layout.gradient] = self._slice(gradient, step, last)
                made.append(self._put(back.target, arguments, back, step))
                begin, end = part.meta["step_range"]
                self._scale(made[-1], back.meta["cost"], end - begin)
                for position, index, of in zip(
                    layout.state_gradients, layout.of_states, layout.states, strict=True
                ):
                    if part.args[of] is not None:
                        arguments[position] = self._item(made[-1], index)
            for index, result in _items(back).items():
                items = [self._item(each, index) for each in made]
                if index == _OF_SEQUENCE:
                    whole = self._joined(items[::-1], 0)
                else:
                    whole = items[-1] if index in layout.of_states else self._sum(items)
                result.replace_all_uses_with(whole)

    def _slice(self, sequence: fx.Node, step: int, on: int) -> fx.Node:
        """The steps of a part. A layer that goes backwards takes the last ones first."""
        length = sequence.meta["val"].shape[0]
        begin, end = (
            length * share.numerator // share.denominator
            for share in (Fraction(0), *self.ends, Fraction(1))[step : step + 2]
        )
        if self._is_reversed:
            begin, end = length - end, length - begin
        value = sequence.meta["val"].new_empty(end - begin, *sequence.meta["val"].shape[1:])
        return self._put(_aten.slice.Tensor, [sequence, 0, _size(begin), _size(end)], sequence, on, value)

    @property
    def _is_reversed(self) -> bool:
        return bool(self.layer.args[_LAYOUTS[self.layer.target].reverse])

    def _joined(self, parts: Sequence[fx.Node], step: int) -> fx.Node:
        """What parts make of the whole sequence."""
        in_order = list(reversed(parts)) if self._is_reversed else list(parts)
        return self._put(_aten.cat.default, [in_order, 0], parts[0], step)

    def _sum(self, terms: Sequence[fx.Node]) -> fx.Node:
        """The sum as autograd would make it of a weight's gradients."""
        total = terms[0]
        for term in terms[1:]:
            total = self._put(_aten.add.Tensor, [total, term], term, self.steps[term])
            total.meta.pop("custom", None)
        return total

    def _item(self, made: fx.Node, index: int) -> fx.Node:
        known = _items(made)
        if index in known:
            return known[index]
        with self.graph.module.graph.inserting_after(made):
            return self._put(operator.getitem, [made, index], made, self.steps[made], made.meta["val"][index])

    def _put(self, target: Any, args: Sequence[Any], like: fx.Node, step: int, value: Any = None) -> fx.Node:
        node = self.graph.module.graph.call_function(target, tuple(args))
        if value is None:
            value = target(*fx.map_arg(tuple(args), lambda source: source.meta["val"]))
        caused_by = self.layer if is_forward(like) else like
        node.meta = {**caused_by.meta, "phase": like.meta["phase"], "val": value}
        sizes = {each: tensor_sizes(each.meta.get("val")) for each in (node, *node.all_input_nodes)}
        cost: OperatorCost = self.layer.meta["cost"]
        node.meta["cost"] = operator_cost(node, sizes, self.planned, cost.device)
        node.meta["operator"] = self.layer.meta["operator"]
        self.steps[node] = step
        return node

    def _scale(self, part: fx.Node, whole: OperatorCost, share: Fraction) -> None:
        """What was measured of the whole layer."""
        if whole.measured is not None:
            measured = replace(whole.measured, seconds=whole.measured.seconds * float(share))
            part.meta["cost"] = replace(part.meta["cost"], measured=measured)

    def _before(self, node: fx.Node) -> Any:
        return self.graph.module.graph.inserting_before(node)

    def _erase(self, node: fx.Node) -> None:
        for each in (*_items(node).values(), node):
            del self.steps[each]
            self.graph.module.graph.erase_node(each)


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
