"""What is known of rows that a microbatch selects by their values, as ``x[mask]`` does, for ``add_up``.

Microbatches select as many rows together as the batch would, so that sums over them are sums. Their means are
not: how many rows there are differs from one to the next.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from pipec.capture.parts import Part, operator_name, part_of_rows
from pipec.torch_compat import value_symbols

_POSITIONS = {"argwhere", "nonzero", "where"}
"""Operators that return where the elements of a tensor are that count."""

_SELECTING = {"getitem", "index", "masked_select", "repeat_interleave"}
"""Operators that take some rows of their first argument, as a mask or numbers say."""

_LOOKUPS = {"getitem", "index", "index_select"}

_SCATTERING = {"index_add", "index_copy", "index_put", "setitem"}
"""Operators that put rows where they belong, each to the one that it was made of."""

_ALIGNING = "ctc_loss"
"""A loss of each row, whose targets may stand one after the other, without padding."""

_RESHAPING = {"flatten", "getitem", "reshape", "select", "squeeze", "t", "transpose", "unbind", "view"}

SHAPING = {"empty", "expand", "new_empty", "new_zeros", "reshape", "unflatten", "view", "zeros"}
"""Operators that read a number as a size."""

SELECTED = {Part.PICKED, Part.PLACES}


def num_told(value: Any) -> int:
    """How many dimensions of a tensor, or of those in a tuple, values tell."""
    if isinstance(value, tuple | list):
        return max(map(num_told, value), default=0)
    return sum(map(bool, map(value_symbols, value.shape))) if isinstance(value, Tensor) else 0


def part_of_selection(
    node: fx.Node, value: Any, parts: Sequence[Part], arguments: dict[str, Any], num_batches: int, mixes: bool
) -> Part:
    """What a call makes of a selection, or by selecting, where ``parts`` are those of what it reads.

    Args:
        num_batches: How many dimensions of the result are rows of the microbatch.
        mixes: The call computes along the rows, so that they depend on one another.
    """
    name, kinds, told = operator_name(node), {*parts} - {Part.SAME}, num_told(value)
    if name == _ALIGNING and kinds <= {Part.ROWS, Part.PICKED}:
        return part_of_rows(node, arguments, False)
    if kinds == {Part.ROWS}:
        return _made_of_rows(name, value, parts, told, num_batches)
    if name in _SCATTERING and kinds <= {Part.ROWS, *SELECTED}:
        return Part.ROWS if parts[0] is Part.ROWS and (told, num_batches) == (0, 1) else Part.OTHER
    if kinds == {Part.PLACES}:
        return Part.PLACES if name in _RESHAPING else Part.OTHER
    if kinds == {Part.ROWS, Part.PLACES}:
        looks_up = name in _LOOKUPS and parts[0] is Part.ROWS
        return Part.PICKED if looks_up and (told, num_batches) == (1, 0) else Part.OTHER
    if kinds != {Part.PICKED} or num_batches or told > 1 or mixes:
        return Part.OTHER
    if told:
        return Part.PICKED
    return Part.SUM if part_of_rows(node, arguments, False) is Part.SUM else Part.OTHER


def _made_of_rows(name: str, value: Any, parts: Sequence[Part], told: int, num_batches: int) -> Part:
    if name in _POSITIONS or (name == "repeat_interleave" and len(parts) == 1):
        return Part.PLACES
    selects = name in _SELECTING and parts[0] is Part.ROWS and isinstance(value, Tensor)
    return Part.PICKED if selects and (told, num_batches) == (1, 0) else Part.OTHER
