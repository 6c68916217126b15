"""Operators of torch: their class, their arguments, and a mode that sees each of them."""

from torch import FunctionSchema
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OpOverload", "TorchDispatchMode", "is_higher_order", "schema"]


def schema(operator: OpOverload) -> FunctionSchema:
    """The arguments and results of an operator, with their types, names and aliases."""
    return operator._schema


def is_higher_order(target: object) -> bool:
    """Whether what a node calls is an operator with graphs of its own."""
    return getattr(target, "namespace", "") == "higher_order"
