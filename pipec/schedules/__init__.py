"""Schedules by name: the computes of each rank, in order. ``lower`` adds the other instructions."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import cast

from pipec.errors import InputError
from pipec.ir import Phase, Schedule
from pipec.ir.columns import PHASE_CODE, ComputeColumns
from pipec.programs.rank_memory import max_in_flight_of_order
from pipec.schedules.asynchronous import ASYNCHRONOUS_SCHEDULES, AsynchronousSchedule
from pipec.schedules.custom import custom_schedule, format_orders, parse_orders
from pipec.schedules.named import (
    LOOPED_SCHEDULES,
    SCHEDULES,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipec.schedules.order_builder import linear_placement, loop_placement, remap_ranks, v_placement
from pipec.schedules.search import auto, zb_1p, zb_2p
from pipec.schedules.workload import Workload

ENTRY_POINTS = "pipec.schedules"
"""The entry-point group in which a package registers functions under the names of its schedules."""

SEARCHED_SCHEDULES: Mapping[str, Callable[[int, int, Workload], Schedule]] = {
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "auto": auto,
}
"""Schedules that depend on times and memory."""

_SUFFIXED = re.compile(r"(.+)-v([0-9]{1,9})")


def make_schedule(name: str, num_ranks: int, num_microbatches: int, work: Workload | None = None) -> Schedule:
    """The schedule ``name`` for these numbers of ranks and microbatches.

    ``interleaved-1f1b`` and ``looped-bfs`` have 2 stages per rank, or N with a suffix ``-vN``:
    ``interleaved-1f1b-v4``. ``work`` has the costs for a searched schedule, by default phases
    that all cost the same.

    Raises:
        InputError: the name is unknown or takes no suffix, a count is below 1, or the schedule cannot do with
            these counts.
        InfeasibleError: a searched schedule finds no order within the memory limit of ``work``.
    """
    make = SEARCHED_SCHEDULES.get(name) or SCHEDULES.get(name) or ASYNCHRONOUS_SCHEDULES.get(name)
    make = make or _looped(name) or _installed(name)
    for what, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise InputError(f"schedule {name!r} needs {what} of at least 1, got {count}")
    if name in SEARCHED_SCHEDULES:
        return SEARCHED_SCHEDULES[name](num_ranks, num_microbatches, work or Workload.uniform(num_ranks))
    return cast("Callable[[int, int], Schedule]", make)(num_ranks, num_microbatches)


def _looped(name: str) -> Callable[[int, int], Schedule] | None:
    """The looped schedule with the number of stages per rank that ``name`` ends with, if it does."""
    match = _SUFFIXED.fullmatch(name)
    if not match or match[1] not in LOOPED_SCHEDULES:
        return None
    make, num_chunks = LOOPED_SCHEDULES[match[1]], int(match[2])
    return lambda num_ranks, num_microbatches: make(num_ranks, num_microbatches, num_chunks)


def _installed(name: str) -> Callable[[int, int], Schedule]:
    """The function that a package registered under ``name``."""
    found = entry_points(group=ENTRY_POINTS)
    if name in found.names:
        return functools.partial(custom_schedule, found[name].load())
    known = [*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES, *sorted(found.names)]
    match = _SUFFIXED.fullmatch(name)
    if match and match[1] in known:
        raise InputError(
            f"schedule {match[1]!r} takes no suffix, but {name!r} has one for the number of stages per rank; "
            f"leave it out or take {' or '.join(f'{looped}-v{match[2]}' for looped in LOOPED_SCHEDULES)}"
        )
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(f"unknown schedule {name!r}; {hint}known schedules: {', '.join(known)}")


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards, for a loss or an output alone."""
    orders = map(ComputeColumns.of, schedule.orders)
    forwards = (order.where(order.phases == PHASE_CODE[Phase.FORWARD]) for order in orders)
    return replace(schedule, orders=tuple(forwards), stream=None)
