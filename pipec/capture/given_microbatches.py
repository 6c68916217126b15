"""The call of a step whose microbatches are given: each is a batch of its own, and nothing is split."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipec.capture.model_call import ModelCall
from pipec.errors import InputError
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
    if call.paths != first.paths:
        other = sorted({*call.paths} ^ {*first.paths})
        return f"{other[0]} is in one of them alone" if other else "arguments have another order"
    for path, leaf, expected in zip(call.paths, call.leaves, first.leaves, strict=True):
        if (found := _fixed_part(leaf)) != (wanted := _fixed_part(expected)):
            return f"{path} is {found}, and {wanted} there"
    if pytree.tree_structure(call.tree) != pytree.tree_structure(first.tree):
        return "its arguments are nested otherwise"
    if call.keyword_order != first.keyword_order:
        return "keyword arguments have another order, for which forward() may ask"
    if call.repeated != first.repeated:
        return "other arguments of it are one tensor"
    return ""


def _fixed_part(leaf: object) -> str:
    """What all microbatches of a step have in common in an argument."""
    if isinstance(leaf, Tensor):
        dims = f"{leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"
        return f"{str(leaf.dtype).removeprefix('torch.')} of {dims} on {leaf.device}"
    may_vary = type(leaf) is int or (type(leaf) is float and math.isfinite(leaf))
    return f"a number of type {type(leaf).__name__}" if may_vary else repr(leaf)


def _is_strided(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_contiguous()
