"""The weight of each microbatch's loss in the loss of the batch, where the user gives it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pipec.errors import InputError
from pipec.ir.argument_checks import short_repr
from pipec.ir.batch_axis import BatchAxis

MicrobatchWeight = Callable[..., Any] | str
"""``"rows"``, ``"sum"``, or a function of what ``step`` takes that returns a number."""

CUSTOM_WEIGHT = "function"
"""What a plan has for a function, which an artifact cannot hold."""


def weight_name(weight: MicrobatchWeight | None) -> str:
    """The plan's text for ``weight``. None is "": the graph shows how losses add up."""
    return CUSTOM_WEIGHT if callable(weight) else weight or ""


def loss_weights(
    weight: MicrobatchWeight | None,
    leaves: Sequence[Any],
    unflatten_call: Callable[[list[Any]], tuple[Any, dict[str, Any], Any]],
    axes: Sequence[BatchAxis | None],
    sizes: Sequence[int],
) -> list[float] | None:
    """The weight of each microbatch's loss; None: its fraction of the rows.

    ``unflatten_call`` makes arguments, keyword arguments and the target of leaves such as those of the batch.
    Those that are split have their rows in front; ``axes`` say where the function is to get them.

    Raises:
        InputError: the function returned no number that can be a weight.
    """
    if weight == "sum":
        return [1.0] * len(sizes)
    if not callable(weight):
        return None
    weights, start = list[float](), 0
    for number, size in enumerate(sizes):
        if not size:
            weights.append(0.0)
            continue
        rows = [
            axis.restore(leaf[start : start + size]) if axis else leaf
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        args, kwargs, target = unflatten_call(rows)
        named = {**kwargs, **({} if target is None else {"target": target})}
        weights.append(_checked(weight(*args, **named), number))
        start += size
    if not sum(weights):
        raise InputError("microbatch_weight returned 0 for every microbatch; at least one must count")
    return [each / sum(weights) for each in weights]


def _checked(weight: Any, microbatch: int) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InputError(
            f"microbatch_weight returned {short_repr(weight)} for microbatch {microbatch}; expected a finite "
            "number that is at least 0"
        )
    return number
