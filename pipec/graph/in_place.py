"""Finds the statements that may write their result into an operand, because nothing reads it later.

::

    y = mm(x, w)                       y = mm(x, w)
    z = y.view([b, 8, 4]) + h    ->    z = y.view([b, 8, 4]).add_(h)

    dy = mm(dz, w)                     dy = mm(dz, w)
    dx = gelu_backward(dy, x)    ->    dx = gelu_backward(dy, x, grad_input=dy)

This saves memory, and time where values are larger than caches. Operators must be elementwise, so that each
element is read before it is written, or be known to read a row before they write it. No bit changes.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipec.graph.nodes import (
    depends_on_strides,
    is_collective,
    is_constant,
    is_contiguous,
    is_random,
    is_row_sparse,
    is_tensor,
    is_view,
    recv,
    send,
    storage_owner,
)
from pipec.primitives import cross_entropy_gradient
from pipec.torch_compat.run_time import OpOverload, schema
from pipec.torch_compat.symbolic_numbers import formula

aten = torch.ops.aten

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
"""Operators whose result has the same bits with the operands swapped."""

ELEMENTWISE: Mapping[Any, OpOverload] = {
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Elementwise operators, each with the overload that takes the destination."""

ROWWISE: Mapping[Any, OpOverload] = {
    aten._log_softmax.default: aten._log_softmax.out,
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
    aten._softmax.default: aten._softmax.out,
    aten._softmax_backward_data.default: aten._softmax_backward_data.out,
}
"""Operators whose kernels on CPUs read all of a row before they write it, each with its out variant.

``tests/graph/test_in_place.py`` checks this for every type, size and dimension.
"""


def owns_new_storage(owner: fx.Node) -> bool:
    """Whether a function allocates memory for the value."""
    is_computed = owner.op == "call_function" and owner.target is not recv and not is_constant(owner)
    return is_computed and not is_row_sparse(owner)


def in_place_operands(
    body: Sequence[fx.Node], saved_in: Sequence[fx.Node], results: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The operand into which each statement of a function writes its result, for statements that do.

    The function allocated the operand's memory, or the operand was saved for this statement. Nothing else
    reads that memory: it is not sent, saved or returned. The operand covers all of it, in the layout of the
    result.
    """
    nodes, saved = {*body}, {*saved_in}
    returned = set(map(storage_owner, results))
    operands: dict[fx.Node, fx.Node] = {}
    for node in body:
        for operand in _operands(node):
            owner = storage_owner(operand)
            if owner in nodes:
                is_last = {*storage_readers(owner)} == {node}
            else:
                is_last = owner in saved and may_overwrite_saved(node) and _is_last(node, owner, nodes)
            is_free = is_last and owner not in returned and _is_fresh(owner)
            if is_free and _is_whole(operand, owner) and _same_layout(operand, node):
                operands[node] = operand
                break
    return operands


def may_overwrite_saved(node: fx.Node) -> bool:
    """Whether an operator may write into a saved value.

    Operators in functions that torch compiles may not, since such a function may run more than once.
    """
    return node.target is cross_entropy_gradient


def _is_last(node: fx.Node, owner: fx.Node, body: set[fx.Node]) -> bool:
    """Whether a node is the last reader of a saved value.

    The node is the only reader in its function. If a later function reads the value, it is among the results
    of this one.
    """
    readers = {*storage_readers(owner)}
    is_shared = any(each.target is send or each.op == "output" or is_collective(each) for each in readers)
    return not is_shared and readers & body == {node}


@functools.cache
def in_place_variant(target: Any) -> OpOverload | None:
    """The in-place variant of an elementwise operator, which writes its first operand."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(getattr(torch.ops, target.namespace), f"{target.overloadpacket.__name__}_", None)
    variants = (getattr(packet, name) for name in packet.overloads()) if packet else ()
    return next((each for each in variants if _arguments(each) == _arguments(target)), None)


def out_variant(target: Any) -> OpOverload | None:
    """The out variant of an operator, whose last argument is the destination."""
    return ELEMENTWISE.get(target) or ROWWISE.get(target)


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema(target).arguments]


def storage_readers(owner: fx.Node) -> Iterator[fx.Node]:
    """All readers of a node's memory, under any of its names."""
    for user in owner.users:
        yield from storage_readers(user) if user.op == "call_function" and is_view(user) else (user,)


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a node can write into, and that share memory with none of its other operands."""
    if not is_tensor(node) or is_random(node):
        return
    for operand in _writable(node):
        if isinstance(operand, fx.Node) and is_tensor(operand):
            others = [each for each in node.all_input_nodes if each is not operand]
            if storage_owner(operand) not in map(storage_owner, others):
                yield operand


def _writable(node: fx.Node) -> Iterator[Any]:
    """The operands that the operator of a node can write into."""
    if in_place_variant(node.target):
        yield from node.args[: 2 if node.target in COMMUTATIVE and not node.kwargs else 1]
    elif node.target in ELEMENTWISE or (node.target in ROWWISE and _has_rows(node)):
        yield from node.args
    elif node.target is cross_entropy_gradient:
        yield node.args[1]


def _has_rows(node: fx.Node) -> bool:
    """Whether kernels process the operands row by row: on a CPU, with contiguous rows."""
    operands = [each for each in node.all_input_nodes if is_tensor(each)]
    return node.meta["val"].device.type == "cpu" and all(map(is_contiguous, operands))


def _is_fresh(owner: fx.Node) -> bool:
    """Whether an operator of ATen allocated the memory. Other operators may return memory that they keep."""
    maker = owner.all_input_nodes[0] if owner.target is operator.getitem else owner
    is_aten = isinstance(maker.target, OpOverload) and maker.target.namespace == "aten"
    return is_aten and owns_new_storage(owner)


def _is_whole(operand: fx.Node, owner: fx.Node) -> bool:
    """Whether the operand covers each element of its memory once."""
    node = operand
    while node is not owner:
        if depends_on_strides(node) or node.target is operator.getitem:
            return False
        node = node.all_input_nodes[0]
    one, other = operand.meta["val"], owner.meta["val"]
    return one.dtype == other.dtype and bool(formula(one.numel()) == formula(other.numel()))


def _same_layout(operand: fx.Node, node: fx.Node) -> bool:
    """Whether two values have the same type, shape and strides.

    False for 0-dim tensors, which are too small to matter.
    """
    a, b = operand.meta["val"], node.meta["val"]
    if a.layout is not torch.strided or b.layout is not torch.strided or not a.dim():
        return False
    same_type = a.dtype == b.dtype and not a.dtype.is_complex and a.device == b.device
    return same_type and _sizes(a) == _sizes(b)


def _sizes(value: Tensor) -> list[Any]:
    return [*map(formula, (*value.shape, *value.stride()))]
