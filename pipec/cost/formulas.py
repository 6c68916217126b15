"""The cost of one node of an ATen graph: FLOPs, bytes moved, bytes made, as sympy expressions.

FLOPs of matrix products, convolutions and attention come from the registry of ``torch.utils.flop_counter``,
where a multiply-add counts two. Those of other operators come from ``tables``. They need only the right order
of magnitude, because memory traffic bounds such operators.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from pipec.cost.operator_tables import (
    ALLOCATIONS,
    DATA_MOVEMENT,
    FLOPS_PER_INPUT,
    FLOPS_PER_OUTPUT,
    GATHER_SOURCES,
    RECURRENT_OPERATORS,
    SCATTER_SOURCES,
    SHAPE_ONLY,
    RecurrentOperator,
)
from pipec.cost.symbolic_sizes import (
    SymbolSubstitutions,
    TensorSize,
    evaluate_cost,
    product,
    substitute_symbols,
    total,
)
from pipec.graph import is_collective, is_view
from pipec.hardware.devices import Arithmetic, DeviceModel
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import OpOverload, schema

NodeSizes = Mapping[fx.Node, tuple[TensorSize, ...]]
"""The tensors that make up each node's value."""


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """How long a node took with microbatches of ``microbatch_size`` rows."""

    seconds: float
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of running one node once, as expressions in the microbatch size ``MICROBATCH``.

    ``bytes_moved`` counts the memory that is read and written. ``output_bytes`` is the size of the node's
    value when it is dense, as it is saved or sent; a view has a size too, though making it moves nothing.
    ``launches`` is how many kernels start, one after the other. ``dtype`` is what the node computes in.
    ``arithmetic`` tells products from the rest. ``known`` is False where no formula for FLOPs was found, so
    that the bytes alone decide. ``measured`` is from a profile, if there is one.
    """

    flops: sympy.Expr
    bytes_moved: sympy.Expr
    output_bytes: sympy.Expr
    launches: int
    dtype: str
    arithmetic: Arithmetic
    known: bool
    device: DeviceModel = field(repr=False)
    measured: MeasuredTime | None = None

    def seconds(self, microbatch_size: int) -> float:
        """Time on ``device``. A measured time grows with the microbatch as the formulas do."""
        if self.measured is None:
            return self.modelled_seconds(microbatch_size)
        there = self.modelled_seconds(self.measured.microbatch_size)
        return self.measured.seconds * (self.modelled_seconds(microbatch_size) / there if there else 1.0)

    def modelled_seconds(self, microbatch_size: int) -> float:
        """Time that the formulas and the device model give."""
        if not self.launches:
            return 0.0
        computed, moved = (evaluate_cost(each, microbatch_size) for each in (self.flops, self.bytes_moved))
        seconds = self.device.seconds(computed, moved, self.dtype, self.arithmetic)
        return seconds + (self.launches - 1) * self.device.launch_seconds


def operator_cost(
    node: fx.Node, sizes: NodeSizes, substitutions: SymbolSubstitutions, device: DeviceModel
) -> OperatorCost:
    """The cost of a node. ``sizes`` has it and its inputs, in the symbols that ``substitutions`` replaces."""
    free = launches_no_kernel(node) or not sizes[node]
    computed = sympy.Integer(0) if free else flops(node, sizes)
    moved = sympy.Integer(0) if free else bytes_moved(node, sizes)
    return OperatorCost(
        flops=substitute_symbols(sympy.Integer(0) if computed is None else computed, substitutions),
        bytes_moved=substitute_symbols(moved, substitutions),
        output_bytes=substitute_symbols(total(size.dense_bytes for size in sizes[node]), substitutions),
        launches=0 if free else _launches(node, sizes, substitutions),
        dtype=_computed_in(node, sizes),
        arithmetic=_arithmetic(node),
        known=computed is not None,
        device=device,
    )


def node_bytes(node: fx.Node, size: int) -> int:
    """Bytes of the node's value with microbatches of ``size`` rows. ``AnnotateCost`` must have run."""
    if "cost" in node.meta:
        return evaluate_cost(node.meta["cost"].output_bytes, size)
    held: torch.Tensor = node.meta["val"]
    return int(held.numel()) * held.itemsize


def operator_name(node: fx.Node) -> str:
    """``_softmax`` for an operator of ATen, ``library::name`` for another.

    In-place variants share the name.
    """
    if not isinstance(node.target, OpOverload):
        return str(node.target)
    name, _, _ = str(node.target.name()).partition(".")
    return name.removeprefix("aten::").removesuffix("_")


def launches_no_kernel(node: fx.Node) -> bool:
    """Whether a node starts no kernel: an argument, a view, an allocation, picking from a tuple.

    Collectives between replicas are costed separately.
    """
    if node.op != "call_function" or node.target is operator.getitem or is_collective(node):
        return True
    return is_view(node) or operator_name(node) in ALLOCATIONS


def flops(node: fx.Node, sizes: NodeSizes) -> sympy.Expr | None:
    """The arithmetic operations of one node, or None if no formula is known."""
    name = operator_name(node)
    if name == "convolution_backward":
        return _convolution_backward_flops(node, sizes)
    if name in RECURRENT_OPERATORS:
        return _recurrent_flops(node, sizes, RECURRENT_OPERATORS[name])
    if (formula := flop_registry.get(_registered_as(node))) is not None:
        return _registered_flops(formula, node, sizes)
    if name in DATA_MOVEMENT:
        return sympy.Integer(0)
    if name in FLOPS_PER_INPUT:
        first = next(size for source in node.all_input_nodes for size in sizes[source])
        return FLOPS_PER_INPUT[name] * first.elements
    if name in FLOPS_PER_OUTPUT or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return FLOPS_PER_OUTPUT.get(name, 1) * sizes[node][0].elements
    return None


def _arithmetic(node: fx.Node) -> Arithmetic:
    name = operator_name(node)
    if "scaled_dot_product" in name:
        return Arithmetic.ATTENTION
    is_product = (
        name == "convolution_backward" or name in RECURRENT_OPERATORS or _registered_as(node) in flop_registry
    )
    return Arithmetic.PRODUCT if is_product else Arithmetic.OTHER


def bytes_moved(node: fx.Node, sizes: NodeSizes) -> sympy.Expr:
    """Memory that one node reads and writes: its inputs and outputs, or the part of them that it touches."""
    name, arguments = operator_name(node), _arguments(node)
    if name in SCATTER_SOURCES and _writes_to_argument(node):
        arguments.pop("self")
        updates = arguments.get(SCATTER_SOURCES[name], arguments.get("index"))
        return total([*_touched(arguments.values(), sizes), *_touched([updates], sizes) * 2])
    if name in SHAPE_ONLY:
        arguments.pop("self")
    written = [size.storage_bytes for size in sizes[node]]
    gathered = []
    if name in GATHER_SOURCES:
        arguments.pop(GATHER_SOURCES[name])
        gathered = written
    return total([*_touched(arguments.values(), sizes), *gathered, *written])


def _convolution_backward_flops(node: fx.Node, sizes: NodeSizes) -> sympy.Expr:
    """Each gradient takes as many operations as the forward.

    torch's formula counts grouped ones too often.
    """
    arguments = _arguments(node)
    scanned, weight = arguments["input" if arguments["transposed"] else "grad_output"], arguments["weight"]
    positions, filters = sizes[scanned][0].shape, sizes[weight][0].elements
    num_gradients = sum(arguments["output_mask"][:2])
    return sympy.Integer(2 * num_gradients) * positions[0] * product(positions[2:]) * filters


def _recurrent_flops(node: fx.Node, sizes: NodeSizes, recurrent: RecurrentOperator) -> sympy.Expr:
    """Each weight is multiplied with every row of every step."""
    arguments = _arguments(node)
    weights = pytree.tree_leaves([arguments[name] for name in recurrent.weights])
    elements = total(sizes[weight][0].elements for weight in weights if len(sizes[weight][0].shape) == 2)
    return (
        sympy.Integer(2 * recurrent.products)
        * product(sizes[arguments[recurrent.steps]][0].shape[:2])
        * elements
    )


def _launches(node: fx.Node, sizes: NodeSizes, substitutions: SymbolSubstitutions) -> int:
    """The number of kernels that the node starts, one after the other."""
    recurrent = RECURRENT_OPERATORS.get(operator_name(node))
    if recurrent is None or not recurrent.launches:
        return 1
    length = sizes[_arguments(node)[recurrent.steps]][0].shape[0]
    return recurrent.launches * evaluate_cost(substitute_symbols(length, substitutions), 1)


_aten = torch.ops.aten

_TWINS: Mapping[str, object] = {
    "_scaled_dot_product_flash_attention_for_cpu": _aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators that the registry lacks, and the one in it that computes the same of the same arguments."""


def _registered_as(node: fx.Node) -> object:
    return _TWINS.get(operator_name(node)) or getattr(node.target, "overloadpacket", node.target)


def _registered_flops(formula: Callable[..., Any], node: fx.Node, sizes: NodeSizes) -> sympy.Expr | None:
    """FLOPs by the formula of torch's registry; None if that fails on symbols, since anyone may register one.

    Most formulas take shapes, which are symbolic here; the others take fake tensors.
    """
    takes_shapes = hasattr(formula, "__wrapped__")

    def value(source: fx.Node) -> Any:
        fake = source.meta.get("val")
        if takes_shapes and isinstance(fake, torch.Tensor):
            return sizes[source][0].shape
        return tuple(size.shape for size in sizes[source]) if takes_shapes and sizes[source] else fake

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    try:
        return sympy.sympify(formula(*args, **kwargs, out_val=value(node)))
    except (AssertionError, AttributeError, TypeError, ValueError):
        return None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments that were given, by their names in the operator's schema, else by position."""
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in schema(node.target).arguments]
    else:
        names = [*map(str, range(len(node.args)))]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _writes_to_argument(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    results = schema(node.target).returns
    return any(result.alias_info is not None and result.alias_info.is_write for result in results)


def _touched(values: Iterable[Any], sizes: NodeSizes) -> list[sympy.Expr]:
    """Memory behind the distinct nodes among ``values``, at any depth."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(tuple(values), found.setdefault)
    return [size.storage_bytes for source in found for size in sizes[source]]


def _computed_in(node: fx.Node, sizes: NodeSizes) -> str:
    """The first floating-point dtype among inputs and then outputs; other dtypes have no peak rates."""
    tensors = [size for source in (*node.all_input_nodes, node) for size in sizes[source]]
    dtype = next((size.dtype for size in tensors if size.dtype.is_floating_point), torch.float32)
    return str(dtype).removeprefix("torch.")
