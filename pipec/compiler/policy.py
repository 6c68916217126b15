"""Which schedules a compiled model may run, and with how many microbatches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipec.errors import InputError, PlanError
from pipec.ir import Placement, Schedule
from pipec.schedules import (
    SCHEDULES,
    SEARCHED,
    Workload,
    candidates,
    custom_schedule,
    forward_only,
    looped_placement,
    make_schedule,
    most_in_flight,
    named,
    one_f_one_b,
    straight_placement,
    v_placement,
)

ScheduleChoice = str | Path | Callable[[int, int], Schedule]
"""A name, a file of compute orders, or a function of the numbers of ranks and of microbatches."""

_MOST_PER_RANK = 8
"""Microbatches: filling and draining then take a ninth of the step. More gain little and launch more."""


@dataclass(frozen=True)
class SchedulePolicy:
    """The schedules on ``num_ranks`` ranks that ``choice`` allows: a named one, the user's own, or any."""

    choice: ScheduleChoice
    num_ranks: int

    @property
    def is_named(self) -> bool:
        """Whether the choice is a name, and so a schedule for any number of ranks."""
        return isinstance(self.choice, str)

    def in_flight(self, num_microbatches: int) -> tuple[int, ...]:
        """The most microbatches that each rank has in flight. Searched schedules count as 1F1B."""
        searched = self.choice == "auto" or self.choice in SEARCHED
        schedule = (
            one_f_one_b(self.num_ranks, num_microbatches) if searched else self._fixed(num_microbatches)
        )
        return tuple(map(most_in_flight, schedule.orders))

    def counts(self, batch: int) -> list[int]:
        """The numbers of microbatches that are worth trying for ``batch`` rows, the usual one first.

        Raises:
            InputError: the schedule can do with none of them.
        """
        worthwhile = [usual_microbatches(batch, self.num_ranks), *counts_to_try(batch, self.num_ranks)]
        possible = [count for count in dict.fromkeys(worthwhile) if self._can(count)]
        return possible or [self._fixed(worthwhile[0]).num_microbatches]

    def placements(self, counts: Iterable[int]) -> list[Placement]:
        """The placements that the allowed schedules have. Raises InputError as making a schedule does."""
        if self.choice == "auto":
            p = self.num_ranks
            return list(dict.fromkeys([straight_placement(p), v_placement(p), looped_placement(p, 2)]))
        if self.choice in SEARCHED:
            return [straight_placement(self.num_ranks)]
        return list(dict.fromkeys(self._fixed(count).placement for count in counts))

    def options(
        self, num_microbatches: int, placement: Placement, work: Callable[[], Workload]
    ) -> list[Schedule]:
        """The schedules to try with so many microbatches. ``work`` tells what the ranks have to do.

        Raises:
            InputError: the schedule cannot do with this number of microbatches.
            InfeasibleError: a searched schedule finds no order within the memory limit.
            PlanError: the schedule of this many microbatches has its stages elsewhere.
        """
        if self.choice == "auto":
            known = named(self.num_ranks, num_microbatches)
            return [schedule for schedule in known if schedule.placement == placement]
        if isinstance(self.choice, str) and self.choice in SEARCHED:
            return [make_schedule(self.choice, self.num_ranks, num_microbatches, work())]
        schedule = self._fixed(num_microbatches)
        if schedule.placement != placement:
            raise PlanError(
                f"schedule {schedule.name!r} puts stages on ranks {schedule.placement} for "
                f"{num_microbatches} microbatches, but the parameters are where {placement} put them; "
                "compile another pipeline for this number of microbatches"
            )
        return [schedule]

    def searched(
        self, num_microbatches: int, placement: Placement, work: Callable[[], Workload]
    ) -> list[Schedule]:
        """Orders that ``auto`` finds beyond its ``options``, once the number of microbatches is chosen."""
        if self.choice != "auto":
            return []
        return candidates(self.num_ranks, num_microbatches, work(), placement)

    def forwards(self, num_microbatches: int, placement: Placement) -> Schedule:
        """What an evaluation runs. A search concerns backwards, so a simple order serves in its place."""
        if not (isinstance(self.choice, str) and self.choice in SEARCHED):
            return forward_only(self._fixed(num_microbatches))
        simple = (
            SCHEDULES[name](self.num_ranks, num_microbatches) for name in ("gpipe", "zb-v", "looped-bfs")
        )
        return forward_only(next(schedule for schedule in simple if schedule.placement == placement))

    def _can(self, num_microbatches: int) -> bool:
        try:
            return self.choice in SEARCHED or bool(self._fixed(num_microbatches))
        except InputError:
            return False

    def _fixed(self, num_microbatches: int) -> Schedule:
        if isinstance(self.choice, str):
            return make_schedule(self.choice, self.num_ranks, num_microbatches)
        return custom_schedule(self.choice, self.num_ranks, num_microbatches)


def usual_microbatches(batch: int, num_ranks: int) -> int:
    """About four microbatches a rank, with which the bubble is below a fifth of the step.

    It is the largest number from ``num_ranks`` to four a rank that splits the batch evenly. If none does, it
    is four a rank. A batch of fewer rows has a microbatch for each.
    """
    most = max(1, min(batch, 4 * num_ranks))
    even = [count for count in range(min(num_ranks, most), most + 1) if batch % count == 0]
    return even[-1] if even else most


def counts_to_try(batch: int, num_ranks: int) -> list[int]:
    """The numbers of microbatches to try, up to eight a rank, ascending.

    From each power of two up to the next, it is the largest number that splits ``batch`` evenly, or else the
    power of two. The number of ranks is there too, and its doubles, because every schedule can do with these.
    So each number is less than four times the one before.
    """
    most = min(batch, _MOST_PER_RANK * num_ranks)
    even = (
        max((n for n in range(1 << k, min(2 << k, most + 1)) if batch % n == 0), default=1 << k)
        for k in range(most.bit_length())
    )
    multiples = (num_ranks << k for k in range(_MOST_PER_RANK.bit_length()))
    return sorted({*even, *(count for count in multiples if count <= most)})


def check_choice(choice: ScheduleChoice, num_ranks: int, num_microbatches: int | None) -> int | None:
    """The number of microbatches that was asked for, or that a file of orders sets.

    Raises:
        InputError: the choice is no schedule, or not one for these numbers.
    """
    if not isinstance(choice, str | Path) and not callable(choice):
        raise InputError(
            f"schedule is {choice!r}; expected a name, a Path to a file of compute orders, or a function of "
            "the numbers of ranks and of microbatches that returns a Schedule"
        )
    if isinstance(choice, Path) and num_microbatches is None:
        return custom_schedule(choice, num_ranks, None).num_microbatches
    if not isinstance(choice, str):
        return num_microbatches
    if choice not in SEARCHED:
        make_schedule(choice, num_ranks, num_microbatches or 2 * num_ranks)
    return num_microbatches
