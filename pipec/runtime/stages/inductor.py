"""Compiles the graph of a phase function with inductor."""

import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipec.ir import MMAP_THRESHOLD_BYTES
from pipec.runtime.memory.block_cache import empty_cached
from pipec.torch_compat.run_time import inductor_code

_CPU = torch.device("cpu")


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The code for a graph of ``torch.compile``. It raises AssertionError for other sizes and strides.

    Pure C++ code (``cpp_wrapper``) would not check them, and takes long to compile.
    """
    split_bias_additions(graph)
    code, modules = inductor_code(graph, inputs)
    for module in modules:
        reuse_memory(module)
    return code


def split_bias_additions(graph: fx.GraphModule) -> None:
    """Separate additions of biases from matrix products, so that inductor fuses them with their readers.

    On CPUs ``addmm`` first copies the bias to each row, and then adds the product::

        y = linear(x, w, bias)    ->    product = linear(x, w)
        z = gelu(y)                     y = product + bias
                                        z = gelu(y)

    This took 0.89 of the time of a GPT's forward at width 64. It is not done for 16-bit types, where the
    product would be rounded before the sum, nor on GPUs, whose products add biases.
    """
    for node in graph.graph.find_nodes(op="call_function", target=F.linear):
        value = node.meta.get("example_value")
        if len(node.args) < 3 or not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        *operands, bias = node.args
        if bias is not None and value.dtype in (torch.float32, torch.float64):
            with graph.graph.inserting_after(node):
                total = graph.graph.call_function(operator.add, (node, bias))
            total.meta = {**node.meta}
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)
            node.args = tuple(operands)
    graph.recompile()


def reuse_memory(module: types.ModuleType) -> None:
    """Make generated code allocate large values from freed memory of earlier ones.

    Its functions allocate uninitialised memory by one name of their module::

        buf0 = empty_strided_cpu((256, 32768), (32768, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    """
    empty = getattr(module, "empty_strided_cpu", None)
    if isinstance(empty, types.BuiltinFunctionType):
        vars(module)["empty_strided_cpu"] = functools.partial(_empty, empty)


def _empty(
    empty: Callable[..., Tensor], sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``empty`` for small tensors; large ones come from the block cache."""
    if math.prod(sizes) * dtype.itemsize < MMAP_THRESHOLD_BYTES:
        return empty(sizes, strides, dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return empty_cached([extent], dtype, _CPU).as_strided(sizes, strides)
