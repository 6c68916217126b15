"""The order of statements: what they need comes first, and less is held at a time."""

import itertools
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from pipec.graph.lifetimes import function_memory
from pipec.graph.phase_functions import PhaseFunction
from pipec.graph.statement_order import reorder_for_memory
from pipec.ir import Phase

STACK, EMPTY = torch.ops.aten.stack.default, torch.empty(0)


def function_of(reads: list[list[int]], num_saved: int, results: list[int]) -> PhaseFunction:
    """A function whose values, after those that are saved, are made of values by number."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for each in [[] for _ in range(num_saved)] + reads:
        node = graph.create_node("call_function", STACK, ([nodes[number] for number in each],))
        node.meta = {"val": EMPTY, "phase": Phase.BACKWARD, "operator": 0}
        nodes.append(node)
    body, saved, out = nodes[num_saved:], nodes[:num_saved], [nodes[number] for number in results]
    return PhaseFunction(0, Phase.BACKWARD, tuple(body), (), (), tuple(saved), tuple(out), ())


def peak(function: PhaseFunction, sizes: dict[fx.Node, int]) -> int:
    return function_memory(function, sizes.__getitem__).peak


def least_peak(function: PhaseFunction, sizes: dict[fx.Node, int]) -> int:
    """The least of all orders."""
    orders = (order for order in itertools.permutations(function.body) if is_order(order))
    return min(peak(replace(function, body=order), sizes) for order in orders)


def is_order(body: tuple[fx.Node, ...]) -> bool:
    number = {node: k for k, node in enumerate(body)}
    return all(number.get(each, -1) < k for node, k in number.items() for each in node.all_input_nodes)


def test_weight_gradients_are_made_while_their_inputs_are_there() -> None:
    """Of dx3, dw3, dx2, dw2, dx1, dw1: each dw lets go of what was saved, and each dx needs room."""
    x1, x2, x3, dy = range(4)
    function = function_of([[dy], [dy, x3], [4], [4, x2], [6], [6, x1]], 4, [8, 5, 7, 9])
    sizes = dict.fromkeys((*function.saved_in, *function.body), 100)
    sizes |= {function.body[k]: 1 for k in (1, 3, 5)}
    ordered = reorder_for_memory(function, sizes.__getitem__)
    assert [function.body.index(node) for node in ordered.body] == [1, 0, 3, 2, 4, 5]
    assert peak(function, sizes) == 501
    assert peak(ordered, sizes) == least_peak(function, sizes)


def test_an_order_that_gains_nothing_is_left_alone() -> None:
    function = function_of([[0], [1], [2]], 1, [3])
    sizes = dict.fromkeys((*function.saved_in, *function.body), 100)
    assert reorder_for_memory(function, sizes.__getitem__) is function


@st.composite
def functions(draw: st.DrawFn) -> tuple[PhaseFunction, dict[fx.Node, int]]:
    num_saved, num_made = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    reads = [
        draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        for number in range(num_saved, num_saved + num_made)
    ]
    last = num_saved + num_made - 1
    results = draw(st.lists(st.integers(num_saved, last), min_size=1, unique=True))
    function = function_of(reads, num_saved, results)
    nodes = (*function.saved_in, *function.body)
    return function, {node: draw(st.integers(0, 9)) for node in nodes}


@settings(max_examples=75, deadline=None)
@given(functions())
def test_less_is_held_in_any_other_order(made: tuple[PhaseFunction, dict[fx.Node, int]]) -> None:
    function, sizes = made
    ordered = reorder_for_memory(function, sizes.__getitem__)
    assert is_order(ordered.body)
    assert sorted(ordered.body) == sorted(function.body)
    assert ordered is function or peak(ordered, sizes) < peak(function, sizes)
    assert peak(ordered, sizes) >= least_peak(function, sizes)
