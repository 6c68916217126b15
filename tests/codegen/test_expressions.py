"""Each printed expression, evaluated on real tensors, dispatches to exactly the ATen overload it means."""

import ast
import math
import operator
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.codegen.expressions import FUNCTIONS, INFIX, METHODS, expression, literal
from pipec.graph.in_place import in_place_variant
from pipec.torch_compat.run_time import OpOverload

aten = torch.ops.aten

B = sympy.Symbol("s77", integer=True, positive=True)
ROWS = 6
"""What the batch symbol is when an expression is evaluated."""

X = torch.linspace(0.1, 0.9, 24).view(ROWS, 4)
Y = torch.linspace(-1, 1, 24).view(ROWS, 4)
SQUARE = X[:4]
BATCHED, IMAGE = torch.rand(2, 3, 3), torch.rand(2, 4, 5, 5)
IDS = torch.tensor([[0, 2, 1, 1]])
TRUE = X > 0.5
CPU = {"device": torch.device("cpu"), "pin_memory": False}
FLOAT64 = {"dtype": torch.float64, "layout": torch.strided, **CPU}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OF_ONE = (
    *("abs", "cos", "erf", "exp", "log", "logical_not", "neg", "reciprocal", "relu", "rsqrt", "sigmoid"),
    *("sin", "sqrt", "t", "tanh"),
)
OF_TWO = ("logical_and", "minimum", "maximum")
ARITHMETIC = [call(X, Y), call(X, 2), call(X, -0.5), call(X, B), call(X, 12 * B), call(X, B - 1)]
TWO = [call(X, Y)]
SIZES = [call(X, [2, 3]), call(X, [B, 4], **FLOAT64)]
FACTORY = [call([2, 3], **CPU), call([B, 2 * B], **FLOAT64)]
LIKE = [call(X), call(X, dtype=torch.float64), call(X, pin_memory=False, memory_format=torch.preserve_format)]
REDUCTION = [call(X, [1]), call(X, [0, -1], True), call(X, [1], dtype=torch.float64)]
WHOLE_REDUCTION = [call(X), call(X, dtype=torch.float64)]

CALLS: dict[OpOverload, list[Arguments]] = {
    aten.add.Tensor: [*ARITHMETIC, call(X, Y, alpha=2)],
    aten.sub.Tensor: [*ARITHMETIC, call(X, Y, alpha=2)],
    aten.mul.Tensor: [*ARITHMETIC, call(X, 1 + 2j)],
    aten.div.Tensor: ARITHMETIC,
    **{getattr(aten, name).Tensor: TWO for name in COMPARISONS},
    **{getattr(aten, name).Scalar: [call(X, 0.5), call(X, B)] for name in COMPARISONS},
    aten.bitwise_and.Tensor: [call(TRUE, ~TRUE), call(IDS, IDS)],
    aten.bitwise_or.Tensor: [call(TRUE, ~TRUE), call(IDS, IDS)],
    aten.view.default: [call(X, [4, 6]), call(X, [-1]), call(X, [4 * B])],
    aten.expand.default: [call(X[:1], [B, 4]), call(X[:1], [3, -1])],
    aten.permute.default: [call(BATCHED, [2, 0, 1])],
    aten.transpose.int: [call(BATCHED, 1, -1)],
    aten.unsqueeze.default: [call(X, 1), call(X, -1)],
    aten.squeeze.dim: [call(X[:1], 0), call(X[:, :1], -1)],
    aten.squeeze.dims: [call(X[:1], [0]), call(X[:1, :1], [0, 1])],
    aten.masked_fill.Scalar: [call(X, TRUE, 2), call(X, TRUE, float("-inf")), call(X, TRUE, B)],
    aten.new_zeros.default: SIZES,
    aten.new_ones.default: SIZES,
    aten.new_full.default: [call(X, [2, 3], 0.5), call(X, [B], 7, **FLOAT64)],
    aten.new_empty.default: SIZES,
    aten.mm.default: [call(SQUARE, SQUARE)],
    aten.bmm.default: [call(BATCHED, BATCHED)],
    aten.addmm.default: [call(X[0], SQUARE, SQUARE), call(X[0], SQUARE, SQUARE, beta=2, alpha=0.5)],
    aten.baddbmm.default: [call(BATCHED, BATCHED, BATCHED), call(BATCHED, BATCHED, BATCHED, beta=0)],
    aten.convolution.default: [
        call(IMAGE, torch.rand(3, 4, 2, 2), None, [1, 1], [0, 1], [1, 1], False, [0, 0], 1),
        call(IMAGE, torch.rand(4, 2, 2, 2), X[0, :2], [2, 1], [0, 0], [1, 1], True, [1, 0], 1),
    ],
    aten.native_layer_norm.default: [call(X, [4], X[0], None, 1e-5)],
    aten.native_group_norm.default: [call(IMAGE, X[0], None, 2, 4, 25, 2, 1e-5)],
    aten.sum.dim_IntList: REDUCTION,
    aten.sum.default: WHOLE_REDUCTION,
    aten.mean.dim: REDUCTION,
    aten.mean.default: WHOLE_REDUCTION,
    aten.pow.Tensor_Scalar: [call(X, 2), call(X, -0.5), call(X, B)],
    **{getattr(aten, name).default: [call(X)] for name in OF_ONE},
    **{getattr(aten, name).default: TWO for name in OF_TWO},
    aten.cat.default: [call([X, Y]), call([X, Y], 1), call([X], -1)],
    aten.stack.default: [call([X, Y]), call([X, Y], -1)],
    aten.where.self: [call(TRUE, X, Y)],
    aten.arange.default: [call(5, **CPU), call(B, **CPU), call(3.5, **FLOAT64)],
    aten.arange.start: [call(1, B, **CPU), call(0, 2.5, **FLOAT64)],
    aten.arange.start_step: [call(1, 12, 3, **CPU), call(B - 1, -1, -1, **FLOAT64)],
    aten.full.default: [call([2], 0.5, **CPU), call([B, 1], B, **FLOAT64), call([], True, **CPU)],
    aten.ones.default: FACTORY,
    aten.zeros.default: FACTORY,
    aten.empty.memory_format: FACTORY,
    aten.full_like.default: [call(X, 0.5), call(X, 2, dtype=torch.int64, pin_memory=False)],
    aten.ones_like.default: LIKE,
    aten.zeros_like.default: LIKE,
    aten.empty_like.default: LIKE,
    aten.clone.default: [
        call(X),
        call(X, memory_format=None),
        call(X, memory_format=torch.contiguous_format),
    ],
    aten.select.int: [call(X, 0, 2), call(X, 1, -1)],
    aten.index_select.default: [call(X, 1, IDS[0])],
    aten.gather.default: [call(X, 0, IDS), call(X, 0, IDS, sparse_grad=True)],
    aten.embedding.default: [call(X, IDS), call(X, IDS, 0), call(X, IDS, -1, True)],
    aten.clamp.default: [call(X, 0.2), call(X, None, 0.5), call(X, 0.2, 0.5)],
    aten.clamp_min.default: [call(X, 0.5)],
    aten.amax.default: [call(X), call(X, [1]), call(X, [0, 1], True)],
    aten.argmax.default: [call(X), call(X, 1), call(X, -1, True)],
    aten.cumsum.default: [call(X, 1), call(X, 0, dtype=torch.float64)],
    aten.tril.default: [call(X), call(X, 1)],
    aten.triu.default: [call(X), call(X, -1)],
    aten.rsub.Scalar: [call(X, 1), call(X, 2, 3)],
    aten.split.Tensor: [call(X, 2), call(X, 2, 1), call(X, B, 0)],
    aten.split_with_sizes.default: [call(X, [1, 3], 1)],
    aten.scalar_tensor.default: [call(0.5, dtype=torch.float32, **CPU)],
    aten.constant_pad_nd.default: [call(X, [0, 1], -100.0), call(X, [1, 0, 0, 2])],
    aten.index.Tensor: [call(X, [IDS, IDS]), call(X, [TRUE]), call(X, [None, IDS])],
    aten.slice.Tensor: [
        call(X, 0, 1, 3),
        call(X, 1, 0, 2),
        call(X, 0, 1, sys.maxsize),
        call(X, 1, -2, sys.maxsize),
        call(X, 0, 0, -1),
        call(X, 0, B - 3, B),
        call(X, -1, 0, 2),
        call(X, 0, 0, 6, 2),
        call(X, 1, 2, B),
        call(X, 1, 1, sys.maxsize, 2),
    ],
    aten.gelu.default: [call(X), call(X, approximate="tanh")],
    aten._to_copy.default: [
        call(X, dtype=torch.float64),
        call(X, dtype=torch.float32),
        call(X, dtype=torch.bfloat16, layout=torch.strided),
    ],
}
"""Calls of every operator of the tables, and of some that keep their ATen form."""


class Recorder(TorchDispatchMode):
    """Every operator that reaches the dispatcher, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, Arguments]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def printed(
    target: Any, arguments: Arguments, in_place: bool = False, **meta: int
) -> tuple[str, dict[str, Tensor]]:
    """The source of a call, and the tensors that its names stand for."""
    graph, tensors = fx.Graph(), dict[str, Tensor]()

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = f"t{len(tensors)}"
        tensors[name] = leaf
        node = graph.placeholder(name)
        node.meta["val"] = leaf
        return node

    args, kwargs = torch.utils._pytree.tree_map(placed, arguments)
    node = graph.call_function(target, args, kwargs)
    node.meta |= meta
    written = node.all_input_nodes[0] if in_place else None
    return expression(node, lambda read: read.name, {B: "b"}, written), tensors


def with_number(leaf: Any) -> Any:
    return int(leaf.subs(B, ROWS)) if isinstance(leaf, sympy.Basic) else leaf


def dispatched(source: str, tensors: dict[str, Tensor]) -> tuple[Any, list[tuple[OpOverload, Arguments]]]:
    names = {"torch": torch, "math": math, "b": ROWS, "device": torch.device("cpu")}
    with Recorder() as recorder:
        result = eval(source, names, tensors)
    return result, recorder.calls


IGNORED = {
    "pin_memory": (False, None),
    "layout": (torch.strided, None),
    "device": (torch.device("cpu"), None),
}
"""Arguments that may be left out of a call, by the values that mean the same."""


def bound(target: OpOverload, arguments: Arguments) -> dict[str, Any]:
    """Every argument by its name, whether given by position, by keyword or by default."""
    args, kwargs = arguments
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    every = {a.name: given.get(a.name, a.default_value) for a in target._schema.arguments}
    return {name: value for name, value in every.items() if value not in IGNORED.get(name, ())}


def assert_same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        assert isinstance(one, Tensor), what
        assert torch.equal(one, torch.as_tensor(other)), what
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), what
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), what
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, what)
    else:
        assert one == other, what


def cases() -> Iterator[Any]:
    for target, calls in CALLS.items():
        for number, arguments in enumerate(calls):
            yield pytest.param(target, arguments, id=f"{target}-{number}")
    yield pytest.param(aten.add.Tensor, call(2, X), id="a number first")


@pytest.mark.parametrize(("target", "arguments"), list(cases()))
def test_an_expression_dispatches_the_operator_it_stands_for(
    target: OpOverload, arguments: Arguments
) -> None:
    source, tensors = printed(target, arguments)
    found, calls = dispatched(source, tensors)
    assert [called for called, _ in calls] == [target], source
    concrete = torch.utils._pytree.tree_map(with_number, arguments)
    expected, passed = bound(target, concrete), bound(target, calls[0][1])
    assert passed.keys() == expected.keys(), source
    for name, value in expected.items():
        assert_same(passed[name], value, f"{source}: {name}")
    if "empty" not in str(target):
        assert_same(found, target(*concrete[0], **concrete[1]), source)


@pytest.mark.parametrize("target", [*filter(in_place_variant, CALLS)], ids=str)
def test_a_call_that_writes_its_operand_dispatches_the_same_operator_in_place(target: OpOverload) -> None:
    variant, num_tried = in_place_variant(target), 0
    for (first, *others), kwargs in CALLS[target]:
        arguments = (first.clone(), *others), kwargs
        expected = target(*torch.utils._pytree.tree_map(with_number, arguments[0]), **kwargs)
        if expected.dtype == first.dtype:
            source, tensors = printed(target, arguments, in_place=True)
            found, calls = dispatched(source, tensors)
            assert [called for called, _ in calls] == [variant], source
            assert found is tensors["t0"]
            assert_same(found, expected, source)
            num_tried += 1
    assert num_tried or expected.dtype is torch.bool


@pytest.mark.parametrize("table", [INFIX, METHODS, FUNCTIONS], ids=["infix", "methods", "functions"])
def test_every_entry_is_called_above_in_the_form_that_the_table_gives_it(
    table: dict[OpOverload, str],
) -> None:
    for target, name in table.items():
        sources = [printed(target, arguments)[0] for arguments in CALLS[target]]
        form = f" {name} " if table is INFIX else f".{name}("
        assert any(form in source and "torch.ops" not in source for source in sources), (target, sources)


def test_an_element_of_a_result_is_read_by_its_number() -> None:
    assert printed(operator.getitem, call(X, 1))[0] == "t0[1]"


@pytest.mark.parametrize(
    ("target", "arguments", "source"),
    [
        (aten.slice.Tensor, call(X, 1, 2, B), "t0[:, 2:b]"),
        (aten._to_copy.default, call(X, dtype=torch.float64), "t0.to(dtype=torch.float64)"),
        (aten.add.Tensor, call(2, X), "torch.ops.aten.add.Tensor(2, t0)"),
    ],
)
def test_the_form_of_an_expression(target: Any, arguments: Arguments, source: str) -> None:
    assert printed(target, arguments)[0] == source


def test_random_operators_draw_from_a_generator_of_their_own() -> None:
    dropout, bernoulli = (
        printed(target, arguments, random_seed=3)[0]
        for target, arguments in (
            (aten.native_dropout.default, call(X, 0.1, True)),
            (aten.bernoulli.default, call(X)),
        )
    )
    assert dropout == "dropout(t0, 0.1, rng(3))"
    assert bernoulli == "call_with_generator(rng(3), torch.ops.aten.bernoulli.default, t0)"


LITERALS = [
    None, True, 3, -2, 0.1, 1e-300, float("inf"), -float("inf"), 2 - 1j, "it's \"quoted\"\n", torch.float32,
    torch.strided, torch.channels_last, [1, [2.5, None]], (1,), (), ("a", (True,)),
]  # fmt: skip


@pytest.mark.parametrize("value", LITERALS, ids=repr)
def test_a_literal_reads_back(value: object) -> None:
    source = literal(value, str, {})
    ast.parse(source, mode="eval")
    assert eval(source, {"torch": torch}) == value


def test_literals_that_do_not_read_back() -> None:
    assert math.isnan(eval(literal(float("nan"), str, {})))
    assert literal(torch.device("meta"), str, {}) == "device"


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="an argument of type object"):
        literal(object(), str, {})
    with pytest.raises(NotImplementedError, match="does not know how to call <built-in function len>"):
        printed(len, call(X))
