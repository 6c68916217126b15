"""What a front end returns: a forward graph of torch-level calls, and how to differentiate it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.convert_frame import CaptureOutput
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TracedBackward:
    """The outputs of a graph that includes its backward: ``results``, then the gradients of ``trained``.

    The last argument of the graph is the gradient of its first result.
    """

    results: pytree.TreeSpec
    trained: tuple[str, ...]


@dataclass(frozen=True)
class CapturedGraph:
    """A forward graph, and the arguments to differentiate it with.

    ``changed_state`` names the Python objects that the forward would change, and tracing did not. Each is a
    path from the traced module, such as ``model.layers.0``; for an attribute, the path of its module.
    ``dynamo_output`` is Dynamo's record of everything that the code read, for ``Guards``; the fallback has
    none. ``traced_backward`` is set if the graph includes its backward.
    """

    module: torch.fx.GraphModule
    args: tuple[Any, ...]
    changed_state: tuple[str, ...] = ()
    dynamo_output: CaptureOutput | None = None
    traced_backward: TracedBackward | None = None


SymbolicDims = Sequence[tuple[torch.Tensor, int]]
"""Tensors among the arguments, each with a dimension that becomes a symbol."""
