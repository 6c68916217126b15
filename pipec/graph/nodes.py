"""Nodes of the training graph: their metadata, and predicates on nodes.

These are pipec's keys of ``node.meta``; torch has others there:

============ ========= ================================================================================
key          set by    meaning
============ ========= ================================================================================
``val``      capture   fake tensor (or a tuple of them): dtype, and shape in the batch symbol
``operator`` capture   the forward operator that caused the node: an index into ``TrainingGraph.operators``
``phase``    capture   ``Phase.FORWARD`` or ``Phase.BACKWARD``; ``split_backward`` refines the latter
``constant`` capture   True on forward nodes that depend on nothing but the batch size: masks, positions
``role``     capture   on placeholders: what the argument is
``random_seed`` capture   on random nodes: their part of the seed, besides the step's and the microbatch's
``updated``  capture   on buffers: True if the forward gives the buffer a new value
``has_data_dependent_size``   capture   True if its size depends on values, or if it computes with such sizes
``cost``     annotate  FLOPs, bytes and seconds
``stage``    cut       the stage that runs the node
``recompute`` mark      on forward nodes: the phase that recomputes them, ``RECOMPUTE`` or ``BACKWARD``
``segment``  a pass    number of the function of its phase that runs the node; 0 if it is missing
``row_sparse``  a pass    True on gradients that are computed for the rows that were looked up
``reuses_memory``   a pass    True on values that reuse the memory of an earlier value
============ ========= ================================================================================
"""

import functools
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch import fx

from pipec.ir import Phase
from pipec.ir.batch_axis import BatchAxis
from pipec.ops import COLLECTIVES
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import OpOverload, schema


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained tensor; its gradient is a result. ``fqn`` is its fully qualified name in the model."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Precomputed:
    """A value computed once for each version of the parameters: output ``index`` of ``precomputed``.

    It depends on the parameters ``fqns`` and on ``buffers``, which never change.
    """

    index: int
    fqns: tuple[str, ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of the model that is not trained."""

    fqn: str


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Leaf ``position`` of the flattened arguments of ``step``; ``path`` names it in messages."""

    position: int
    path: str
    batched: bool


@dataclass(frozen=True, slots=True)
class LossGradient:
    """The initial gradient of the backward: the weight of the microbatch in the loss of the mini-batch."""


@dataclass(frozen=True, slots=True)
class BatchFraction:
    """The rows of the microbatch divided by the rows of the batch: a 0-dim float64 tensor."""


@dataclass(frozen=True, slots=True)
class BatchCount:
    """A value of the whole mini-batch, such as how many labels count: output ``index`` of ``batch_counts``.

    If it ``is_sum``, it is the sum of its values for parts of the batch.
    """

    index: int
    is_sum: bool


@dataclass(frozen=True, slots=True)
class TailInput:
    """Input ``index`` of the tail: a result of each microbatch, and an argument of the tail with all rows."""

    index: int


@dataclass(frozen=True, slots=True)
class TailGradient:
    """Gradient ``index`` of the tail: a result with all rows, of which each microbatch gets its own."""

    index: int


@dataclass(frozen=True, slots=True)
class Output:
    """Leaf ``position`` of the captured function's result: the loss, or the model's output.

    If it ``is_sum``, the value for the batch is the sum over microbatches. ``axis`` says where the function
    has the rows of the batch, if that is known. If another size is merged in front of the rows, as in
    ``"(t b)"``, the graph returns the rows in front instead.
    """

    position: int
    is_sum: bool = False
    axis: BatchAxis | None = None


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """The gradient of the ``Output`` at ``position``, which the script gives, for the microbatch's rows."""

    position: int


@dataclass(frozen=True, slots=True)
class UpdatedBuffer:
    """The new value of a buffer that the forward changes."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter."""

    fqn: str


InputRole = ModelInput | LossGradient | OutputGradient | BatchFraction | BatchCount | TailInput | TailGradient
"""The arguments of a graph that a step brings, or that another function of it makes."""

ArgumentRole = Parameter | Precomputed | Buffer | InputRole
ResultRole = Output | UpdatedBuffer | Gradient | TailInput | TailGradient


def send(value: torch.Tensor, target: int) -> torch.Tensor:
    """Node: sends ``value`` to stage ``target``. Its only user is one ``recv``."""
    return value


def recv(sent: torch.Tensor) -> torch.Tensor:
    """Node: receives the value of a ``send`` node."""
    return sent


def size_expression(expression: sympy.Basic, *sizes: int) -> Any:
    """Node: the value of an expression. ``sizes`` are those of its symbols, in alphabetical order."""
    symbols = sorted(expression.free_symbols, key=str)
    value: Any = expression.subs(dict(zip(symbols, sizes, strict=True)))
    if isinstance(value, BooleanAtom):
        return bool(value)
    return int(value) if value.is_integer else float(value)


def stage_of(node: fx.Node) -> int:
    stage = node.meta["stage"]
    assert isinstance(stage, int)
    return stage


def segment_of(node: fx.Node) -> int:
    """The segment of its phase that runs the node."""
    segment: int = node.meta.get("segment", 0)
    return segment


def is_forward(node: fx.Node) -> bool:
    return node.meta["phase"] is Phase.FORWARD


def is_constant(node: fx.Node) -> bool:
    return bool(node.meta.get("constant"))


def source_parameters(node: fx.Node) -> tuple[str, ...]:
    """The parameter that an argument of the graph is, or the parameters from which it is computed."""
    match node.meta.get("role"):
        case Parameter(fqn=fqn):
            return (fqn,)
        case Precomputed(fqns=fqns):
            return fqns
    return ()


def source_buffers(node: fx.Node) -> tuple[str, ...]:
    """The buffer that an argument of the graph is, or the buffers from which it is computed."""
    match node.meta.get("role"):
        case Buffer(fqn=fqn):
            return (fqn,)
        case Precomputed(buffers=fqns):
            return fqns
    return ()


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor: not a tuple, not a number."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_data_dependent_number(node: fx.Node) -> bool:
    """Whether the node's value is a data-dependent number, such as how many rows a mask selects."""
    return node.target in (torch.ops.aten.sym_size.int, size_expression)


def is_contiguous(node: fx.Node) -> bool:
    """Whether a tensor is contiguous."""
    tensor, step = node.meta["val"], sympy.Integer(1)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if sympy.expand(sympy.sympify(stride) - step) != 0 and size != 1:
            return False
        step *= sympy.sympify(size)
    return True


def has_data_dependent_size(node: fx.Node) -> bool:
    """Whether the size of the node's value depends on values, so that no message can carry it."""
    return bool(node.meta.get("has_data_dependent_size"))


def is_row_sparse(node: fx.Node) -> bool:
    """Whether the node is the gradient of a table, computed for the rows that were looked up."""
    return bool(node.meta.get("row_sparse"))


def reuses_memory(node: fx.Node) -> bool:
    """Whether the node's value reuses the memory of an earlier one."""
    return bool(node.meta.get("reuses_memory"))


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers. Attention without dropout draws none, nor does its gradient."""
    if not isinstance(node.target, OpOverload):
        return False
    arguments = schema(node.target).arguments
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if any(argument.name == "philox_seed" for argument in arguments):  # where the forward drew
        return False
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(dropout != 0.0)
    return True


def is_collective(node: fx.Node) -> bool:
    """Whether the node is a collective of the replicas of a stage."""
    return node.target in COLLECTIVES


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares memory with its first input, so that recomputing it is free."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload) or not _returns_views(node.target):
        return False
    return bool(node.all_input_nodes)  # not of the conjugate of a complex number


@functools.cache
def _returns_views(operator: OpOverload) -> bool:
    returned = [result.alias_info for result in schema(operator).returns]
    is_view = any(info is not None and not info.is_write for info in returned)
    return is_view or operator is torch.ops.aten._unsafe_view.default


def depends_on_strides(node: fx.Node) -> bool:
    """Whether the node's value depends on the strides of its input."""
    return node.target in (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that owns the memory of this one: the base of a view, or itself."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_gradient_sum(node: fx.Node) -> bool:
    """Whether the node is autograd's sum of the gradients of several uses of a value."""
    return (
        node.target is torch.ops.aten.add.Tensor
        and not node.kwargs
        and "custom" not in node.meta
        and not any(is_forward(term) for term in node.all_input_nodes)
    )


def is_same_for_all(node: fx.Node, known: Collection[sympy.Basic], varying: Collection[str]) -> bool:
    """Whether all microbatches compute the same value.

    It then follows from weights, values of the whole batch, buffers but the ``varying`` ones, and ``known``
    sizes alone.
    """
    seen, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        match each.meta.get("role"):
            case Parameter() | Precomputed() | BatchCount():
                continue
            case Buffer(fqn=fqn) if fqn not in varying:
                continue
            case None if not (is_random(each) or is_collective(each) or _reads_unknown(each, known)):
                waiting += {*each.all_input_nodes} - seen
                seen.update(each.all_input_nodes)
            case _:
                return False
    return True


def _reads_unknown(node: fx.Node, known: Collection[sympy.Basic]) -> bool:
    """Whether an argument of a node is a number with symbols that are not ``known``."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    numbers = (sympy.sympify(each) for each in leaves if isinstance(each, sympy.Basic | torch.SymInt))
    return any(not number.free_symbols.issubset(known) for number in numbers)


def leading_to(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    found, pending = set[fx.Node](), [*nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def depends_on_inputs_only(node: fx.Node) -> bool:
    """Whether a forward node depends on the model's inputs and constants alone.

    Any stage can compute such a node: it needs no random number and no other replica.
    """
    if "depends_on_inputs_only" not in node.meta:
        if node.op == "placeholder":
            answer = isinstance(node.meta["role"], ModelInput | BatchFraction | BatchCount)
        else:
            answer = (
                is_forward(node)
                and not is_random(node)
                and not is_collective(node)
                and all(map(depends_on_inputs_only, node.all_input_nodes))
            )
        node.meta["depends_on_inputs_only"] = answer
    return bool(node.meta["depends_on_inputs_only"])
