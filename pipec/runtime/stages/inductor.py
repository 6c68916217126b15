"""The graph of a phase function as inductor compiles it."""

import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipec.ir import MMAP_THRESHOLD_BYTES
from pipec.runtime.memory.block_cache import empty_cached

_CPU = torch.device("cpu")


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The code for a graph of ``torch.compile``. It raises AssertionError for other sizes and strides.

    Code that is all C++ (``cpp_wrapper``) would not, and takes long to compile.
    """
    from torch._inductor.codecache import PyCodeCache  # importing these takes seconds
    from torch._inductor.compile_fx import compile_fx

    add_biases_apart(graph)
    num_loaded = len(PyCodeCache.modules)
    code = compile_fx(graph, inputs, config_patches={"size_asserts": True, "cpp_wrapper": False})
    for module in PyCodeCache.modules[num_loaded:]:
        let_reuse(module)
    return cast(Callable[..., Any], code)


def add_biases_apart(graph: fx.GraphModule) -> None:
    """Let biases be added by what reads a product, which inductor makes one loop of.

    On CPUs ``addmm`` first copies the bias to each row, and then adds the product to that::

        y = linear(x, w, bias)    ->    product = linear(x, w)
        z = gelu(y)                     y = product + bias
                                        z = gelu(y)

    So a GPT of width 64 took 0.89 of the time for its forward. A product of 16 bits would be rounded before
    the sum, and GPUs add biases in the product.
    """
    for node in graph.graph.find_nodes(op="call_function", target=F.linear):
        made = node.meta.get("example_value")
        if len(node.args) < 3 or not isinstance(made, Tensor) or made.device.type != "cpu":
            continue
        *operands, bias = node.args
        if bias is not None and made.dtype in (torch.float32, torch.float64):
            with graph.graph.inserting_after(node):
                total = graph.graph.call_function(operator.add, (node, bias))
            total.meta = {**node.meta}
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)
            node.args = tuple(operands)
    graph.recompile()


def let_reuse(module: types.ModuleType) -> None:
    """Let code that inductor has written make large values in memory that former ones have left.

    Its functions ask for uninitialised memory by one name of their module::

        buf0 = empty_strided_cpu((256, 32768), (32768, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    """
    empty = getattr(module, "empty_strided_cpu", None)
    if isinstance(empty, types.BuiltinFunctionType):
        vars(module)["empty_strided_cpu"] = functools.partial(_empty, empty)


def _empty(
    empty: Callable[..., Tensor], sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``empty`` of these, or one in memory that is there."""
    if math.prod(sizes) * dtype.itemsize < MMAP_THRESHOLD_BYTES:
        return empty(sizes, strides, dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return empty_cached([extent], dtype, _CPU).as_strided(sizes, strides)
