"""Generated expressions make the ATen calls they stand for: the same operators with the same arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipec.codegen.expressions import FUNCTIONS, INFIX, METHODS, expression

aten = torch.ops.aten
Arguments = tuple[Any, ...]


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in (0, 1), of which logarithms and roots can be taken; no two are equal."""
    size = torch.Size(shape or (2, 3)).numel()
    return ((torch.arange(size) + 1) / (size + 1)).reshape(shape or (2, 3)).to(dtype)


X, SQUARE, BATCHED = matrix(), matrix(3, 3), matrix(2, 3, 3)
YES = X > 0.5
INDEX = torch.tensor([0, 2])

ARGUMENTS: dict[Any, Arguments] = {
    aten.bitwise_and.Tensor: (YES, ~YES),
    aten.bitwise_or.Tensor: (YES, ~YES),
    aten.logical_and.default: (YES, ~YES),
    aten.logical_not.default: (YES,),
    aten.view.default: (X, [3, 2]),
    aten.expand.default: (matrix(1, 3), [2, 3]),
    aten.permute.default: (X, [1, 0]),
    aten.transpose.int: (X, 0, 1),
    aten.unsqueeze.default: (X, 1),
    aten.squeeze.dim: (matrix(1, 3), 0),
    aten.masked_fill.Scalar: (X, YES, 7.0),
    aten.new_zeros.default: (X, [4]),
    aten.new_ones.default: (X, [4]),
    aten.new_full.default: (X, [4], 3.0),
    aten.new_empty.default: (X, [0]),
    aten.mm.default: (SQUARE, SQUARE),
    aten.bmm.default: (BATCHED, BATCHED),
    aten.addmm.default: (matrix(3), SQUARE, SQUARE),
    aten.baddbmm.default: (BATCHED, BATCHED, BATCHED),
    aten.convolution.default: (
        matrix(1, 2, 5, 5), matrix(3, 2, 3, 3), matrix(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
    ),
    aten.native_layer_norm.default: (X, [3], matrix(3), matrix(3), 1e-5),
    aten.native_group_norm.default: (matrix(2, 4, 3), matrix(4), matrix(4), 2, 4, 3, 2, 1e-5),
    aten.sum.dim_IntList: (X, [1], True),
    aten.mean.dim: (X, [1], True),
    aten.pow.Tensor_Scalar: (X, 3),
    aten.cat.default: ([X, X], 1),
    aten.stack.default: ([X, X], 1),
    aten.where.self: (YES, X, -X),
    aten.arange.default: (5,),
    aten.arange.start: (2, 5),
    aten.arange.start_step: (1, 9, 2),
    aten.full.default: ([2, 2], 3.0),
    aten.ones.default: ([2, 2],),
    aten.zeros.default: ([2, 2],),
    aten.empty.memory_format: ([0],),
    aten.full_like.default: (X, 3.0),
    aten.empty_like.default: (matrix(0),),
    aten.select.int: (X, 1, 2),
    aten.index_select.default: (X, 1, INDEX),
    aten.gather.default: (X, 1, torch.tensor([[0], [2]])),
    aten.embedding.default: (SQUARE, INDEX),
    aten.clamp.default: (X, 0.3, 0.6),
    aten.clamp_min.default: (X, 0.3),
    aten.amax.default: (X, [1], True),
    aten.argmax.default: (X, 1),
    aten.cumsum.default: (X, 1),
    aten.tril.default: (SQUARE, -1),
    aten.triu.default: (SQUARE, 1),
    aten.rsub.Scalar: (X, 2),
    aten.log_softmax.int: (X, 1),
    aten.softmax.int: (X, 1),
}  # fmt: skip
"""Arguments of the operators that take more than tensors of one shape and numbers."""


def arguments_of(target: Any) -> Arguments:
    if target in ARGUMENTS:
        return ARGUMENTS[target]
    values = {"Tensor": [X, matrix(1, 3) * 0.7], "number": [0.5]}
    required = [a for a in target._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    return tuple(values[str(argument.type)].pop(0) for argument in required)


FILLED_IN = ("device", "pin_memory")
"""What Python's factory functions pass without being told; the device is that of the stage either way."""


class Recorder(TorchDispatchMode):
    """The ATen calls that reach a kernel, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        told = {name: value for name, value in kwargs.items() if name not in FILLED_IN}
        self.calls.append((func, tree_leaves((args, told))))
        return func(*args, **kwargs)


def printed(target: Any, args: Arguments) -> tuple[str, dict[str, Tensor]]:
    """The expression of one call, and the values of the names in it."""
    graph, values = fx.Graph(), dict[str, Tensor]()

    def node_for(value: Any) -> Any:
        if isinstance(value, list):
            return [node_for(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"value_{len(values)}")
        values[node.name] = value
        return node

    node = graph.call_function(target, tuple(node_for(value) for value in args))
    return expression(node, lambda read: read.name, None), values


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("target", [*INFIX, *METHODS, *FUNCTIONS], ids=str)
def test_the_ordinary_call_dispatches_to_the_operator(target: Any) -> None:
    args = arguments_of(target)
    source, values = printed(target, args)
    assert "torch.ops" not in source
    with Recorder() as found:
        result = eval(source, {"torch": torch, **values})
    with Recorder() as expected:
        direct = target(*args)
    assert [func for func, _ in found.calls] == [func for func, _ in expected.calls], source
    for (func, mine), (_, theirs) in zip(found.calls, expected.calls, strict=True):
        assert len(mine) == len(theirs), func
        assert all(map(same, mine, theirs)), (source, func, mine, theirs)
    assert all(map(same, tree_leaves(result), tree_leaves(direct))), source


def test_no_operator_is_printed_in_two_ways() -> None:
    assert len({*INFIX, *METHODS, *FUNCTIONS}) == len(INFIX) + len(METHODS) + len(FUNCTIONS)


@pytest.mark.parametrize(
    ("args", "source"),
    [
        ((X, 1, 1), "value_0[:, 1:]"),
        ((X, 1, 0, 2), "value_0[:, 0:2]"),
        ((X, -1, 1, 2), "torch.ops.aten.slice.Tensor(value_0, -1, 1, 2)"),
        ((X, 1, 0, 3, 2), "torch.ops.aten.slice.Tensor(value_0, 1, 0, 3, 2)"),
    ],
)
def test_slices_read_as_slices_where_they_can(args: Arguments, source: str) -> None:
    found, values = printed(aten.slice.Tensor, args)
    assert found == source
    assert torch.equal(eval(found, {"torch": torch, **values}), aten.slice.Tensor(*args))


def test_an_operator_without_an_ordinary_name_is_called_by_its_own() -> None:
    source, values = printed(aten.sigmoid_backward.default, (X, X))
    assert source == "torch.ops.aten.sigmoid_backward.default(value_0, value_1)"
    assert torch.equal(eval(source, {"torch": torch, **values}), aten.sigmoid_backward.default(X, X))


def test_values_that_are_no_literals_of_python_are_written_out() -> None:
    source, values = printed(aten.full_like.default, (X, float("-inf")))
    assert source == 'torch.full_like(value_0, float("-inf"))'
    assert torch.equal(eval(source, {"torch": torch, **values}), torch.full_like(X, float("-inf")))
