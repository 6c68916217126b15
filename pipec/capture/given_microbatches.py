"""The call of a step whose microbatches are given: each is a batch of its own, and nothing is split."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipec.capture.model_call import ModelCall
from pipec.errors import InputError
from pipec.ir.argument_checks import short_repr
from pipec.torch_compat import pytree


def whole_microbatch(call: ModelCall) -> ModelCall:
    """A microbatch, every tensor of which is whole and contiguous: the layout may differ from others'."""
    whole = replace(call, split=(None,) * len(call.leaves))
    return whole.map(lambda leaf: leaf.contiguous() if _is_strided(leaf) else leaf)


def call_of_microbatches(microbatches: Sequence[ModelCall], weights: tuple[float, ...]) -> ModelCall:
    """The call of a step in given microbatches: that of the largest, with all of them.

    Raises:
        InputError: microbatches differ in more than sizes and numbers.
    """
    for number, microbatch in enumerate(microbatches):
        if found := _difference(microbatch, microbatches[0]):
            raise InputError(
                f"microbatches[{number}] is not like microbatches[0]: {found}. Microbatches of a step differ "
                "in sizes, values and numbers alone; pass others in a step of their own"
            )
    largest = max(microbatches, key=lambda each: each.num_elements)
    return replace(largest, given=tuple(microbatches), weights=weights)


def _difference(call: ModelCall, first: ModelCall) -> str:
    """How a microbatch differs from the first in what all have in common; empty if it does not."""
    if pytree.tree_structure(call.tree) != pytree.tree_structure(first.tree):
        other = sorted({*call.paths} ^ {*first.paths})
        return f"{other[0]} is in one of them alone" if other else "its arguments are nested otherwise"
    for place, (leaf, other) in enumerate(zip(call.leaves, first.leaves, strict=True)):
        if _fixed_part(leaf) != _fixed_part(other):
            return f"{call.paths[place]} is {_described(leaf)}, and {_described(other)} there"
    if call.keyword_order != first.keyword_order:
        return "keyword arguments have another order, for which forward() may ask"
    if call.repeated != first.repeated:
        return "other arguments of it are one tensor"
    return ""


def _fixed_part(leaf: object) -> object:
    """What all microbatches of a step have in common in an argument: all but sizes and numbers."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.ndim, leaf.device
    may_vary = type(leaf) is int or (type(leaf) is float and math.isfinite(leaf))
    return type(leaf) if may_vary else (type(leaf), repr(leaf))


def _described(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        dims = f"{leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"
        return f"{str(leaf.dtype).removeprefix('torch.')} of {dims} on {leaf.device}"
    return f"the {type(leaf).__name__} {short_repr(leaf)}"


def _is_strided(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_contiguous()
