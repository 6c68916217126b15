"""Schedules by name: which rank computes what, in which order. Compute only; ``lower`` adds the rest."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from pipec.errors import InputError
from pipec.ir import Phase, Schedule
from pipec.schedules.gpipe import gpipe
from pipec.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule ``name`` for that many ranks and microbatches.

    Raises:
        InputError: the name is unknown, or a count is below 1.
    """
    if name not in SCHEDULES:
        close = get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"unknown schedule {name!r}; {hint}known schedules: {', '.join(SCHEDULES)}")
    for what, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise InputError(f"schedule {name!r} needs {what} of at least 1, got {count}")
    return SCHEDULES[name](num_ranks, num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards, for a loss or an output alone."""
    orders = (tuple(cell for cell in order if cell.phase is Phase.FORWARD) for order in schedule.orders)
    return replace(schedule, orders=tuple(orders))


__all__ = ["SCHEDULES", "forward_only", "gpipe", "make_schedule", "one_f_one_b"]
