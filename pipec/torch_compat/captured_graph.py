"""What a front end returns: a forward graph of torch-level calls, and how to differentiate it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipec.torch_compat.pytree import TreeSpec


@dataclass(frozen=True)
class CapturedGraph:
    """A forward graph, and the arguments to differentiate it with.

    ``changed_state`` names the Python objects that the forward would change, and tracing did not. Each is a
    path from the traced module, such as ``model.layers.0``; for an attribute, the path of its module.

    Of a graph of Dynamo's, ``dynamo_output`` is the record of everything that the code read, for ``Guards``.
    Of the fallback's, ``results`` is the tree of its results. If that graph includes its backward,
    ``trained`` names the parameters whose gradients follow the results, and the last argument is the gradient
    of the first result.
    """

    module: torch.fx.GraphModule
    args: tuple[Any, ...]
    changed_state: tuple[str, ...] = ()
    dynamo_output: Any = None
    results: TreeSpec | None = None
    trained: tuple[str, ...] | None = None

    @property
    def has_backward(self) -> bool:
        """Whether the graph includes its backward."""
        return self.trained is not None


SymbolicDims = Sequence[tuple[torch.Tensor, int]]
"""Tensors among the arguments, each with a dimension that becomes a symbol."""
