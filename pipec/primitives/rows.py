"""What checks, when a step runs, that an operator computes each row by itself."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from pipec.errors import MixedRowsError

_checked: set[tuple[object, ...]] = set()


@fx.node.has_side_effect
def check_rows(
    op: str, arguments: Sequence[Any], result: Tensor, dims: Sequence[int | None], dim: int, place: str
) -> None:
    """Stop the stage if a row of ``result`` depends on another row of the arguments of ``op``.

    The operator runs twice more, with its first row replaced by the last one and the last by the first, and
    the other rows must keep their bits. That is done once for arguments of these shapes.

    Args:
        op: The name of the operator, such as ``mylib.scale.default``.
        dims: The dimension of the rows of each argument; None where it has none.
        dim: That of the result.
        place: The call in the model, with its line.
    """
    shapes = (None if not isinstance(x, Tensor) else (x.shape, x.dtype) for x in arguments)
    key = op, place, *shapes
    rows = result.shape[dim]
    if key in _checked or rows < 2:
        return
    _checked.add(key)
    function: Any = reduce(getattr, op.split("."), torch.ops)
    with torch.no_grad():
        for row, other in ((0, rows - 1), (rows - 1, 0)):
            replaced = [
                x if along is None else _with_row(x, along, row, other)
                for x, along in zip(arguments, dims, strict=True)
            ]
            again = function(*replaced)
            kept = [each for each in range(rows) if each != row]
            index = torch.tensor(kept, device=result.device)
            if not _same(result.index_select(dim, index), again.index_select(dim, index)):
                raise MixedRowsError(
                    f"{place}: another row of the batch changes what {op} computes of a row, so that "
                    "microbatches do not make what the whole batch would. Compile with microbatches=1"
                )


def _with_row(x: Tensor, dim: int, row: int, other: int) -> Tensor:
    """A copy in which a row is another one."""
    copied = x.clone()
    copied.select(dim, row).copy_(x.select(dim, other))
    return copied


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN too."""
    return bool((one.eq(other) | (one.isnan() & other.isnan())).all())
