"""Nodes of a graph as the values of a plan."""

import torch
from torch import fx

from pipec.graph import TrainingGraph
from pipec.graph.size_text import format_size
from pipec.ir import Dim, Value


def plan_value(graph: TrainingGraph, node: fx.Node, name: str) -> Value:
    tensor = node.meta["val"]
    assert isinstance(tensor, torch.Tensor)
    shape = tuple(_dim(graph, dim) for dim in tensor.shape)
    return Value(name, str(tensor.dtype).removeprefix("torch."), shape)


def _dim(graph: TrainingGraph, size: int | torch.SymInt) -> Dim:
    return size if isinstance(size, int) else format_size(size, graph.symbols)
