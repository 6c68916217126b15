"""Measures how far the values of two runs of a step are apart."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pipec.compiler.check.unsplit_run import StepValues


class Tolerance(NamedTuple):
    """What is taken for rounding: a relative difference, or so many times what is seen as ``noise``.

    The noise is what becomes of a value if the weights are rounded once more.
    """

    difference: float
    noise: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-7, 300),
    torch.float32: Tolerance(1e-3, 300),
    torch.float16: Tolerance(0.05, 30),
    torch.bfloat16: Tolerance(0.1, 30),
}
"""By the coarsest dtype of a step.

docs/batch.md has the differences of some 200 models, from which these come. In front of a batch norm of few
rows the gradients of biases are rounding alone, which has long tails: 33 times the noise was seen.
"""

_GRADIENT = "the gradient of "

_SMALL = 1e-2
"""Gradients smaller than the mean one by this factor are compared with that: they may be rounding alone."""


@dataclass(frozen=True)
class Agreement:
    """The largest relative difference of each kind: of the results, the loss among them, and of gradients.

    ``worst`` names the value that is off most, of those that are off by more than was allowed if there are
    any.
    """

    results: float
    gradients: float
    worst: str
    is_equal: bool


@dataclass(frozen=True)
class Comparison:
    """Compares two runs of a step. ``names`` are those of its results, in order.

    ``noise`` is by how much rounding may put each value off, by its name, where that was measured.
    """

    names: Sequence[str]
    tolerance: Tolerance
    noise: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, found: StepValues, wanted: StepValues) -> Agreement:
        """Whether the differences are rounding alone."""
        off, tolerance = self.differences(found, wanted), self.tolerance
        beyond = {
            name: x
            for name, x in off.items()
            if not x <= max(tolerance.difference, tolerance.noise * self.noise.get(name, 0.0))
        }
        candidates = beyond or off
        gradients = [x for name, x in off.items() if name.startswith(_GRADIENT)]
        results = [x for name, x in off.items() if not name.startswith(_GRADIENT)]
        worst = max(candidates, key=candidates.__getitem__, default="")
        return Agreement(max(results, default=0.0), max(gradients, default=0.0), worst, not beyond)

    def differences(self, found: StepValues, wanted: StepValues) -> dict[str, float]:
        """The relative difference of each value, by its name."""
        off = {
            self.names[k] if k < len(self.names) else f"result {k}": _difference(x, wanted.results[k])
            for k, x in found.results.items()
            if k in wanted.results
        }
        scale = _mean_square([*wanted.gradients.values()])
        for fqn in found.gradients.keys() | wanted.gradients.keys():
            one, other = found.gradients.get(fqn), wanted.gradients.get(fqn)
            off[_GRADIENT + fqn] = _gradient_difference(one, other, scale)
        return off


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """The tolerance for a step that computes in these dtypes."""
    return max((TOLERANCES[x] for x in dtypes if x in TOLERANCES), default=TOLERANCES[torch.float32])


def is_close(found: Tensor, wanted: Tensor, tolerance: Tolerance) -> bool:
    """Whether two tensors are equal but for rounding."""
    return found.shape == wanted.shape and _difference(found, wanted) <= tolerance.difference


def _difference(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The norm of the difference, relative to that of the larger tensor, and to ``least``.

    It is infinite for another shape, and where values that are not finite are so in one tensor alone.
    """
    if found.shape != wanted.shape:
        return math.inf
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(found, wanted.to(found.dtype)) else math.inf
    one, other = _comparable(found), _comparable(wanted)
    off, sizes = float((one - other).norm()), (float(one.norm()), float(other.norm()))
    if not math.isfinite(off):
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            return math.inf
        one, other = one[finite], other[finite]
        off, sizes = float((one - other).norm()), (float(one.norm()), float(other.norm()))
    size = max(*sizes, least)
    return off / size if size else 0.0


def _gradient_difference(found: Tensor | None, wanted: Tensor | None, scale: float) -> float:
    """The same of gradients, relative also to ``scale`` for each element. A missing gradient is zero."""
    one = torch.zeros_like(wanted) if found is None else found  # type: ignore[arg-type]
    other = torch.zeros_like(one) if wanted is None else wanted
    return _difference(one, other, _SMALL * scale * math.sqrt(one.numel()))


def _mean_square(gradients: Sequence[Tensor]) -> float:
    """The root of the mean square of the elements of all gradients that are finite."""
    norms = [float(_comparable(gradient).norm()) for gradient in gradients]
    finite = [(x, each.numel()) for x, each in zip(norms, gradients, strict=True) if math.isfinite(x)]
    count = sum(n for _, n in finite)
    return math.sqrt(sum(x**2 for x, _ in finite) / count) if count else 0.0


def _comparable(x: Tensor) -> Tensor:
    """A tensor in a dtype that norms do not overflow in."""
    return x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
