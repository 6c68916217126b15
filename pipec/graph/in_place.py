"""Finds the statements of a function that may write into the memory of an operand that is not read later.

::

    y = mm(x, w)                       y = mm(x, w)
    z = y.view([b, 8, 4]) + h    ->    z = y.view([b, 8, 4]).add_(h)

    dy = mm(dz, w)                     dy = mm(dz, w)
    dx = gelu_backward(dy, x)    ->    dx = gelu_backward(dy, x, grad_input=dy)

That saves memory, and time where values are larger than caches. Operators have to be elementwise, so that
each element is read before it is written, or known to read a row before they write it. Every value keeps its
bits.
"""

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from pipec.graph.nodes import (
    accumulates_in_place,
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
from pipec.graph.phase_functions import PhaseFunction
from pipec.primitives import cross_entropy_gradient
from pipec.torch_compat import OpOverload

aten = torch.ops.aten

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
"""What has the same bits with its operands the other way round."""

ELEMENTWISE: Mapping[Any, OpOverload] = {
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Elementwise operators that can be told where to write, and what is told."""

ROWWISE: Mapping[Any, OpOverload] = {
    aten._log_softmax.default: aten._log_softmax.out,
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
    aten._softmax.default: aten._softmax.out,
    aten._softmax_backward_data.default: aten._softmax_backward_data.out,
}
"""The same of operators whose kernels on CPUs read all of a row before they write its elements, one by one.

``tests/graph/test_in_place.py`` shows that for every type, size and dimension.
"""


def owns_new_storage(owner: fx.Node) -> bool:
    """Whether a value takes memory because a function made it."""
    made_here = owner.op == "call_function" and owner.target is not recv and not is_constant(owner)
    return made_here and not accumulates_in_place(owner) and not is_row_sparse(owner)


def in_place_operands(function: PhaseFunction) -> dict[fx.Node, fx.Node]:
    """The operand that each such statement of the function is written into, by statement.

    The function made the operand's memory, or it was saved for this statement, and nobody else reads that: it
    is not sent, saved or returned either. The operand is all of that memory, and lies there as the value
    would have.
    """
    body, saved = {*function.body}, {*function.saved_in}
    leaving = set(map(storage_owner, function.result_nodes))
    found: dict[fx.Node, fx.Node] = {}
    for node in function.body:
        for operand in _operands(node):
            owner = storage_owner(operand)
            if owner in body:
                is_last = {*storage_readers(owner)} == {node}
            else:
                is_last = owner in saved and may_overwrite_saved(node) and _is_last(node, owner, body)
            own = is_last and owner not in leaving and _is_fresh(owner)
            if own and _is_whole(operand, owner) and _alike(operand, node):
                found[node] = operand
                break
    return found


def may_overwrite_saved(node: fx.Node) -> bool:
    """Whether an operator may write into a saved value.

    Functions that torch compiles may run more than once, so their operators may not.
    """
    return node.target is cross_entropy_gradient


def _is_last(node: fx.Node, owner: fx.Node, body: set[fx.Node]) -> bool:
    """Whether one node is the only reader of a saved value.

    Values that a later function reads are among the function's results.
    """
    seen = {*storage_readers(owner)}
    shared = any(each.target is send or each.op == "output" or is_collective(each) for each in seen)
    return not shared and seen & body == {node}


@functools.cache
def in_place_variant(target: Any) -> OpOverload | None:
    """The in-place variant of an elementwise operator, which writes its first operand."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(getattr(torch.ops, target.namespace), f"{target._schema.name.split('::')[1]}_", None)
    variants = (getattr(packet, name) for name in packet.overloads()) if packet else ()
    return next((each for each in variants if _arguments(each) == _arguments(target)), None)


def out_variant(target: Any) -> OpOverload | None:
    """The out variant of an operator, whose last argument is the destination."""
    return ELEMENTWISE.get(target) or ROWWISE.get(target)


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def storage_readers(owner: fx.Node) -> Iterator[fx.Node]:
    """All readers of a node's memory, under any of its names."""
    for user in owner.users:
        yield from storage_readers(user) if user.op == "call_function" and is_view(user) else (user,)


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call may write into: it can, and no other one is in the same memory."""
    if not is_tensor(node) or is_random(node):
        return
    for operand in _writable(node):
        if isinstance(operand, fx.Node) and is_tensor(operand):
            others = [each for each in node.all_input_nodes if each is not operand]
            if storage_owner(operand) not in map(storage_owner, others):
                yield operand


def _writable(node: fx.Node) -> Iterator[Any]:
    """The operands into which the operator of a node could write."""
    if in_place_variant(node.target):
        yield from node.args[: 2 if node.target in COMMUTATIVE and not node.kwargs else 1]
    elif node.target in ELEMENTWISE or (node.target in ROWWISE and _has_rows(node)):
        yield from node.args
    elif node.target is cross_entropy_gradient:
        yield node.args[1]


def _has_rows(node: fx.Node) -> bool:
    """Whether kernels process the operands row by row: on CPUs, where rows are contiguous."""
    operands = [each for each in node.all_input_nodes if is_tensor(each)]
    return node.meta["val"].device.type == "cpu" and all(map(is_contiguous, operands))


def _is_fresh(owner: fx.Node) -> bool:
    """Whether an operator of torch made the memory. Others may return memory that they keep."""
    maker = owner.all_input_nodes[0] if owner.target is operator.getitem else owner
    is_torchs = isinstance(maker.target, OpOverload) and maker.target.namespace == "aten"
    return is_torchs and owns_new_storage(owner)


def _is_whole(operand: fx.Node, owner: fx.Node) -> bool:
    """Whether the operand covers each element of its memory once."""
    node = operand
    while node is not owner:
        if depends_on_strides(node) or node.target is operator.getitem:
            return False
        node = node.all_input_nodes[0]
    one, other = operand.meta["val"], owner.meta["val"]
    return one.dtype == other.dtype and str(one.numel()) == str(other.numel())


def _alike(operand: fx.Node, node: fx.Node) -> bool:
    """Whether two values have the same layout. Sizes may be symbols, and are compared as text.

    A single number is not worth it.
    """
    a, b = operand.meta["val"], node.meta["val"]
    if a.layout is not torch.strided or b.layout is not torch.strided or not a.dim():
        return False
    same_type = a.dtype == b.dtype and not a.dtype.is_complex and a.device == b.device
    return same_type and f"{a.shape} {a.stride()}" == f"{b.shape} {b.stride()}"
