"""Graph modules that generate Python code when they are first called, which capture never does."""

import contextlib
from collections.abc import Iterator

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


@contextlib.contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """Let torch make such modules."""
    with _use_lazy_graph_module(True):
        yield


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Such a module, with what the graph reads of ``root``."""
    return _LazyGraphModule(root, graph)
