"""One node as a Python expression: the ordinary torch call if it is the same operator, else the ATen call.

Calling ``torch.ops.aten.mm.default`` costs microseconds more than ``torch.mm`` and reads worse.
``tests/codegen/test_expressions.py`` proves for every name below that the ordinary call dispatches to this
ATen operator.
"""

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from pipec import primitives
from pipec.graph import (
    is_branch_check,
    is_data_dependent_number,
    is_random,
    is_row_sparse,
    reuses_memory,
    size_expression,
)
from pipec.graph.in_place import in_place_variant, out_variant
from pipec.graph.size_text import SymbolNames, format_size
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import OpOverload, schema

aten = torch.ops.aten


def _operator(name: str) -> OpOverload:
    """``aten.sum.dim_IntList`` for ``sum.dim_IntList``, and ``aten.mm.default`` for ``mm``."""
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "bitwise_and": "&", "bitwise_or": "|"}

INFIX = {
    **{_operator(f"{name}.Tensor"): sign for name, sign in {**_ARITHMETIC, **_COMPARISONS}.items()},
    **{_operator(f"{name}.Scalar"): sign for name, sign in _COMPARISONS.items()},
}

_METHODS = (
    *("expand", "permute", "transpose.int", "t", "unsqueeze", "squeeze.dim", "squeeze.dims"),
    *("masked_fill.Scalar", "split.Tensor", "new_zeros", "new_ones", "new_full", "new_empty"),
)

METHODS = {
    **{_operator(name): name.partition(".")[0] for name in _METHODS},
    _operator("view"): "reshape",
    _operator("split_with_sizes"): "split",
}

_FUNCTIONS = (
    *("mm", "bmm", "addmm", "baddbmm", "convolution", "native_layer_norm", "native_group_norm"),
    *("sum.dim_IntList", "sum", "mean.dim", "mean", "pow.Tensor_Scalar", "rsqrt", "sqrt", "exp"),
    *("log", "neg", "abs", "sin", "cos", "tanh", "sigmoid", "relu", "cat", "stack", "where.self"),
    *("arange", "arange.start", "arange.start_step", "full", "ones", "zeros"),
    *("empty.memory_format", "full_like", "ones_like", "zeros_like", "empty_like", "clone"),
    *("select.int", "index_select", "gather", "embedding", "logical_not", "logical_and", "minimum"),
    *("maximum", "clamp", "clamp_min", "amax", "argmax", "cumsum", "tril", "triu", "rsub.Scalar"),
    *("scalar_tensor", "constant_pad_nd", "reciprocal", "erf"),
)

FUNCTIONS = {_operator(name): name.partition(".")[0] for name in _FUNCTIONS}

PRIMITIVES = {
    primitives.cross_entropy_gradient: "cross_entropy_gradient",
    primitives.require: "require",
    primitives.CTC_LOSS: "CTC_LOSS",
    primitives.CTC_LOSS_BACKWARD: "CTC_LOSS_BACKWARD",
    primitives.INTERPOLATE: "INTERPOLATE",
    primitives.INTERPOLATE_BACKWARD: "INTERPOLATE_BACKWARD",
    primitives.RECURRENT_LAYER: "RECURRENT_LAYER",
    primitives.RECURRENT_LAYER_BACKWARD: "RECURRENT_LAYER_BACKWARD",
}
"""Operators of pipec's own."""

DEFAULTS = {
    "pin_memory": (False, None),
    "layout": (torch.strided, None),
    "memory_format": (None,),
    "device": (None,),
}

Namer = Callable[[fx.Node], str]


def expression(node: fx.Node, name: Namer, symbols: SymbolNames, written: fx.Node | None = None) -> str:
    """Python source that computes ``node``, into the operand ``written`` if there is one.

    ``name`` gives the source of a node it reads.
    """

    def show(argument: Any) -> str:
        return literal(argument, name, symbols)

    target = node.target
    if is_data_dependent_number(node):
        return _number(node, name, symbols)
    if target is operator.getitem:
        return f"{show(node.args[0])}[{show(node.args[1])}]"
    args = [show(argument) for argument in node.args]
    if target is aten.alias.default:
        return args[0]
    kwargs = [
        f"{key}={show(value)}"
        for key, value in node.kwargs.items()
        if not (key in DEFAULTS and value in DEFAULTS[key])
    ]
    if reuses_memory(node):
        kwargs.append(f"out={_reused(node, symbols)}")
    if written is not None and (place := output_argument(node)):
        call = f"primitives.{PRIMITIVES[target]}" if target in PRIMITIVES else _qualified(out_variant(target))
        return f"{call}({', '.join([*args, *kwargs, f'{place}={show(written)}'])})"
    if written is not None:
        return _in_place(node, [show(each) for each in in_place_arguments(node, written)], kwargs)
    if target is aten.slice.Tensor and args[1:2] >= ["0"]:
        return _slice(*args)
    if is_branch_check(node):
        return f"check_branch({', '.join(args)})"
    if is_row_sparse(node):
        return f"embedding_row_gradient({', '.join(args)})"
    if is_random(node):
        return _random(node, args, kwargs)
    if target is aten.index.Tensor:
        indices = (":" if each is None else show(each) for each in node.args[1])  # type: ignore[union-attr]
        return f"{args[0]}[{', '.join(indices)}]"
    if target is aten._to_copy.default and _converts(node):
        return f"{args[0]}.to({', '.join(kwargs)})"
    if target in INFIX and not kwargs and isinstance(node.args[0], fx.Node):
        return f"{args[0]} {INFIX[target]} {_operand(node.args[1], args[1])}"
    if target in METHODS and isinstance(node.args[0], fx.Node):
        return f"{args[0]}.{METHODS[target]}({', '.join(args[1:] + kwargs)})"
    if target in PRIMITIVES:
        return f"primitives.{PRIMITIVES[target]}({', '.join(args + kwargs)})"
    call = f"torch.{FUNCTIONS[target]}" if target in FUNCTIONS else _qualified(target)
    return f"{call}({', '.join(args + kwargs)})"


def _reused(node: fx.Node, symbols: SymbolNames) -> str:
    """``empty_cached([128*b, 32768], torch.float32, device)``"""
    value = node.meta["val"]
    sizes = ", ".join(format_size(size, symbols) for size in value.shape)
    return f"empty_cached([{sizes}], {value.dtype}, device)"


def output_argument(node: fx.Node) -> str | None:
    """The name of the argument for the output, if the call has one."""
    if node.target is primitives.cross_entropy_gradient:
        return "out"
    variant = out_variant(node.target)
    return schema(variant).arguments[-1].name if variant else None


def in_place_arguments(node: fx.Node, written: fx.Node) -> list[Any]:
    """The positional arguments of a call that writes into the first."""
    first, *others = node.args
    return [first, *others] if first is written else [written, first]


def _in_place(node: fx.Node, args: list[str], kwargs: list[str]) -> str:
    """``x.add_(y)``"""
    variant = in_place_variant(node.target)
    assert variant is not None
    method = variant.overloadpacket.__name__
    if node.target in (*INFIX, *METHODS, *FUNCTIONS) and hasattr(torch.Tensor, method):
        return f"{args[0]}.{method}({', '.join(args[1:] + kwargs)})"
    return f"{_qualified(variant)}({', '.join(args + kwargs)})"


def free_names(node: fx.Node, symbols: SymbolNames) -> set[str]:
    """The names in ``expression(node, ...)`` without nodes and ``torch``: ``{"b", "t", "device"}``."""
    names = (
        {"primitives"} if node.target in PRIMITIVES else {"check_branch"} if is_branch_check(node) else set()
    )
    names |= {"embedding_row_gradient"} if is_row_sparse(node) else set()
    names |= {"empty_cached", "device"} if reuses_memory(node) else set()
    if is_random(node):
        names |= {"rng", "dropout" if node.target is aten.native_dropout.default else "call_with_generator"}
    sizes = [*node.meta["val"].shape] if reuses_memory(node) else []
    formulas = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    for argument in (*pytree.tree_leaves((node.args, node.kwargs)), *formulas):
        if isinstance(argument, torch.device):
            names.add("device")
        elif isinstance(argument, sympy.Basic):
            names |= {name for symbol, name in symbols.items() if symbol in argument.free_symbols}
            names |= {"math"} if "math." in format_size(argument, symbols) else set()
    return names


def _number(node: fx.Node, name: Namer, symbols: SymbolNames) -> str:
    """``selected.shape[0]``, or a formula of such numbers: ``2*size``"""
    first, *others = node.args
    if node.target is not size_expression:
        return f"{literal(first, name, symbols)}.shape[{others[0]}]"
    assert isinstance(first, sympy.Basic)
    unknown = sorted((symbol for symbol in first.free_symbols if symbol not in symbols), key=str)
    named = {symbol: name(size) for symbol, size in zip(unknown, others, strict=True)}  # type: ignore[arg-type]
    return format_size(first, {**symbols, **named})


def _operand(argument: Any, source: str) -> str:
    """The source of an operand. A formula is put in brackets: ``x / (12*b)``."""
    return f"({source})" if isinstance(argument, sympy.Basic) and not argument.is_Atom else source


def _converts(node: fx.Node) -> bool:
    """Whether the copy has another type than its source: only then does ``to`` copy."""
    source, dtype = node.args[0], node.kwargs.get("dtype")
    known = source.meta.get("val") if isinstance(source, fx.Node) else None
    return known is not None and dtype is not None and known.dtype != dtype


def _slice(tensor: str, dim: str = "0", start: str = "", end: str = "", step: str = "1") -> str:
    """``x[:, 1:16]``. ``expression`` writes a slice of a dimension counted from the end as an ATen call."""
    bounds = f"{start}:{'' if end == str(sys.maxsize) else end}{'' if step == '1' else f':{step}'}"
    return f"{tensor}[{':, ' * int(dim)}{bounds}]"


def _random(node: fx.Node, args: list[str], kwargs: list[str]) -> str:
    """The call of a random operator, with a generator seeded by step, microbatch and operator."""
    generator = f"rng({node.meta['random_seed']})"
    if node.target is aten.native_dropout.default:
        return f"dropout({args[0]}, {args[1]}, {generator})"
    return f"call_with_generator({', '.join([generator, _qualified(node.target), *args, *kwargs])})"


def _qualified(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    raise NotImplementedError(f"code generation does not know how to call {target!r}")


def literal(argument: Any, name: Namer, symbols: SymbolNames) -> str:
    """Python source of any argument a node may have."""
    match argument:
        case fx.Node():
            return name(argument)
        case sympy.Basic():
            return format_size(argument, symbols)
        case torch.device():
            return "device"
        case float() if not math.isfinite(argument):
            return f'float("{argument}")'
        case list() | fx.immutable_collections.immutable_list():
            return "[" + ", ".join(literal(item, name, symbols) for item in argument) + "]"
        case tuple():
            inner = ", ".join(literal(item, name, symbols) for item in argument)
            return f"({inner},)" if len(argument) == 1 else f"({inner})"
        case (
            None
            | bool()
            | int()
            | float()
            | complex()
            | str()
            | torch.dtype()
            | torch.layout()
            | torch.memory_format()
        ):
            return repr(argument)
    raise NotImplementedError(f"code generation cannot write an argument of type {type(argument).__name__}")
