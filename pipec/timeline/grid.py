"""A grid of other ways to run a step, each simulated. ``pipec.plan.what_if`` fills it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Something that may change. ``choices`` are texts, the first of which is as it is now."""

    name: str
    choices: Sequence[str]
    values: Sequence[object]

    @classmethod
    def of_factors(cls, name: str, factors: Sequence[float]) -> "Axis":
        return cls(name, ["as it is", *(f"{factor:g} times" for factor in factors)], [1.0, *factors])


@dataclass(frozen=True)
class Grid:
    """The axes, and for some of their combinations the timeline's figures.

    A cell is the position on each axis, the makespan, the idle share of it, and the most microbatches in
    flight. ``notes`` say what the simulation assumes.
    """

    axes: Sequence[Axis]
    cells: Sequence[tuple[tuple[int, ...], float, float, int]] = ()
    notes: Sequence[str] = ()
