"""A check, while a step runs, that an operator computes each row independently."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from pipec.errors import MixedRowsError

_checked: set[tuple[object, ...]] = set()


@fx.node.has_side_effect
def check_row_independence(
    op: str, arguments: Sequence[Any], result: Tensor, dims: Sequence[int | None], dim: int, place: str
) -> None:
    """Stop the stage if a row of ``result`` depends on another row of the arguments of ``op``.

    The operator runs again, with its first row replaced by the last one and the last by the first, and the
    other rows must keep their bits; so must their gradients if rows of the result's gradient are replaced.
    Gradients of arguments without rows must be the sum of the gradients over parts of the rows. The check
    runs once for arguments of these shapes.

    Args:
        op: The name of the operator, such as ``mylib.scale.default``.
        dims: The dimension of the rows of each argument; None where it has none.
        dim: The dimension of the rows of the result.
        place: The call in the model, with its line.
    """
    shapes = (None if not isinstance(x, Tensor) else (x.shape, x.dtype) for x in arguments)
    key = op, place, *shapes
    rows = result.shape[dim]
    if key in _checked or rows < 2:
        return
    _checked.add(key)
    call = _RepeatedCall(reduce(getattr, op.split("."), torch.ops), arguments, dims, dim)
    with torch.no_grad():
        if not all(call.keeps_rows(result, *pair) for pair in ((0, rows - 1), (rows - 1, 0))):
            raise _mixed(f"another row of the batch changes what {op} computes of a row", place)
    with torch.enable_grad():
        if not call.keeps_gradients(rows):
            raise _mixed(f"another row of the batch changes the gradients that {op} computes", place)


def _mixed(what: str, place: str) -> MixedRowsError:
    remedy = "so that microbatches do not give what the whole batch would. Compile with microbatches=1"
    return MixedRowsError(f"{place}: {what}, {remedy}")


@dataclass(frozen=True)
class _RepeatedCall:
    """``dims`` are the dimensions of rows in the arguments of ``function``, ``dim`` in its result."""

    function: Any
    arguments: Sequence[Any]
    dims: Sequence[int | None]
    dim: int

    def keeps_rows(self, result: Tensor, row: int, other: int) -> bool:
        """Whether the other rows of the result keep their bits if the arguments' ``row`` is replaced."""
        replaced = [
            x if along is None else _with_row(x, along, row, other)
            for x, along in zip(self.arguments, self.dims, strict=True)
        ]
        return _same(*(_without_row(x, self.dim, row) for x in (result, self.function(*replaced))))

    def keeps_gradients(self, rows: int) -> bool:
        """Whether gradients of rows depend on their own rows alone, and others are sums over rows."""
        gradients = self._gradients(torch.sin, 0, rows)
        if not gradients:
            return True
        again = self._gradients(lambda result: _with_row(result.sin(), self.dim, 0, rows - 1), 0, rows)
        parts = [self._gradients(torch.sin, *part) for part in ((0, 1), (1, rows - 1))]
        for place, gradient in gradients.items():
            along = self.dims[place]
            if along is None:
                total = parts[0][place] + parts[1][place]
                scale = float(gradient.abs().max()) if gradient.numel() else 0.0
                if not torch.allclose(gradient, total, rtol=0, atol=1e-2 * scale, equal_nan=True):
                    return False
            elif not _same(*(_without_row(x, along, 0) for x in (gradient, again[place]))):
                return False
        return True

    def _gradients(self, gradient_of: Callable[[Tensor], Tensor], first: int, rows: int) -> dict[int, Tensor]:
        """The gradients of the arguments for some of the rows, by position."""
        arguments = [
            x if along is None else x.narrow(along, first, rows)
            for x, along in zip(self.arguments, self.dims, strict=True)
        ]
        trained = {
            place: x.detach().clone().requires_grad_()
            for place, x in enumerate(arguments)
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        result = self.function(*(trained.get(place, x) for place, x in enumerate(arguments)))
        if not result.requires_grad:
            return {}
        found = torch.autograd.grad(
            result, list(trained.values()), gradient_of(result.detach()), allow_unused=True
        )
        pairs = zip(trained, found, strict=True)
        return {place: gradient for place, gradient in pairs if gradient is not None}


def _with_row(x: Tensor, dim: int, row: int, other: int) -> Tensor:
    """A copy in which row ``row`` is replaced by row ``other``."""
    copied = x.clone()
    copied.select(dim, row).copy_(x.select(dim, other))
    return copied


def _without_row(x: Tensor, dim: int, row: int) -> Tensor:
    kept = [each for each in range(x.shape[dim]) if each != row]
    return x.index_select(dim, torch.tensor(kept, device=x.device))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return bool((one.eq(other) | (one.isnan() & other.isnan())).all())
