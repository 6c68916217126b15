"""The graph of a phase function as inductor compiles it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The code for a graph of ``torch.compile``. It raises AssertionError for other sizes and strides.

    Code that is all C++ (``cpp_wrapper``) would not, and takes long to compile.
    """
    from torch._inductor.compile_fx import compile_fx  # importing it takes seconds

    add_biases_apart(graph)
    code = compile_fx(graph, inputs, config_patches={"size_asserts": True, "cpp_wrapper": False})
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
        if len(node.args) < 3 or not isinstance(made, torch.Tensor) or made.device.type != "cpu":
            continue
        *operands, bias = node.args
        if bias is not None and made.dtype in (torch.float32, torch.float64):
            with graph.graph.inserting_after(node):
                total = graph.graph.call_function(operator.add, (node, bias))
            total.meta = {**node.meta}
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)
            node.args = tuple(operands)
    graph.recompile()
