"""Measures how far the values of two runs of a step are apart."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.compiler.check.unsplit_run import StepValues

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-6,
    torch.float32: 5e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.2,
}
"""The largest relative difference that is taken for rounding, by the coarsest dtype of a step.

docs/batch.md has the differences of some 200 models, from which these come.
"""

_GRADIENT = "the gradient of "

_NOISE = 30.0
"""How many times as much as rounding the weights once more may be rounding, too."""

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


Differences = Mapping[str, float]
"""The relative difference of each value, by its name."""


def differences(found: StepValues, wanted: StepValues, names: Sequence[str]) -> Differences:
    """How far each value of ``found`` is from ``wanted``. ``names`` are those of the results, in order."""
    results = {
        _name(names, k): _difference(x, wanted.results[k])
        for k, x in found.results.items()
        if k in wanted.results
    }
    scale = _mean_square([*wanted.gradients.values()])
    gradients = {
        _GRADIENT + fqn: _gradient_difference(found.gradients.get(fqn), wanted.gradients.get(fqn), scale)
        for fqn in found.gradients.keys() | wanted.gradients.keys()
    }
    return {**results, **gradients}


def agreement(off: Differences, tolerance: float, noise: Differences | None = None) -> Agreement:
    """Whether differences are rounding alone.

    ``noise`` is how far rounding the weights once more moves each value: batch norms of few values, for
    example, make much of little.
    """
    allowed = {name: max(tolerance, _NOISE * (noise or {}).get(name, 0.0)) for name in off}
    beyond = {name: x for name, x in off.items() if not x <= allowed[name]}
    candidates = beyond or off
    gradients = [x for name, x in off.items() if name.startswith(_GRADIENT)]
    results = [x for name, x in off.items() if not name.startswith(_GRADIENT)]
    return Agreement(
        max(results, default=0.0),
        max(gradients, default=0.0),
        max(candidates, key=candidates.__getitem__, default=""),
        not beyond,
    )


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """The tolerance for a step that computes in these dtypes."""
    return max((TOLERANCES[x] for x in dtypes if x in TOLERANCES), default=TOLERANCES[torch.float32])


def is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal but for rounding."""
    return found.shape == wanted.shape and _difference(found, wanted) <= tolerance


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if position < len(names) else f"result {position}"


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to that of the larger tensor; infinite for another shape.

    Values that are not finite must be so in both.
    """
    if found.shape != wanted.shape:
        return math.inf
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(found, wanted.to(found.dtype)) else math.inf
    one, other = _wide(found), _wide(wanted)
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return math.inf
    one, other = one[finite], other[finite]
    size = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / size if size else 0.0


def _gradient_difference(found: Tensor | None, wanted: Tensor | None, scale: float) -> float:
    """The norm of the difference, relative to that of the gradient and to ``scale`` for each element.

    A missing gradient is zero.
    """
    if found is None and wanted is None:
        return 0.0
    one = _wide(found) if found is not None else torch.zeros_like(_wide(wanted))  # type: ignore[arg-type]
    other = _wide(wanted) if wanted is not None else torch.zeros_like(one)
    if one.shape != other.shape:
        return math.inf
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return math.inf
    one, other = one[finite], other[finite]
    size = max(float(one.norm()), float(other.norm()), _SMALL * scale * math.sqrt(one.numel()))
    return float((one - other).norm()) / size if size else 0.0


def _mean_square(gradients: Sequence[Tensor]) -> float:
    """The root of the mean square of all elements that are finite."""
    total, count = 0.0, 0
    for gradient in gradients:
        wide = _wide(gradient).nan_to_num(0.0, 0.0, 0.0)
        total, count = total + float(wide.norm()) ** 2, count + wide.numel()
    return math.sqrt(total / count) if count else 0.0


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
