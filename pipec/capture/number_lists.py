"""Lists of a number for each row, such as lengths, as tensors that microbatches split."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipec.torch_compat import pytree


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def lists_as_tensors(arguments: Arguments) -> Arguments | None:
    """The arguments with lists and tuples of as many numbers as the batch has rows as tensors.

    None if there are none.
    """
    leaves = pytree.tree_leaves(tuple(arguments))
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
    found = list[Tensor]()

    def converted(value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            if rows > 1 and len(value) == rows and all(type(each) in (int, float) for each in value):
                found.append(torch.tensor(value))
                return found[-1]
            return type(value)(converted(each) for each in value)
        if type(value) is dict:
            return {name: converted(each) for name, each in value.items()}
        return value

    args = tuple(converted(each) for each in arguments.args)
    other = Arguments(args, converted(dict(arguments.kwargs)), converted(arguments.target))
    return other if found else None
