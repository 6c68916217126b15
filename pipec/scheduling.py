"""Which schedule a compiled model runs: a named one, a user's own, or one searched for the model's costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pipec.cost.devices import LinkModel
from pipec.errors import InputError, PlanError
from pipec.functions import StageFunctions, stage_functions
from pipec.graph import TrainingGraph, memory_of
from pipec.ir import Phase, Schedule
from pipec.plan import node_bytes, stage_cost, value_of
from pipec.schedules import (
    SCHEDULES,
    SEARCHED,
    Workload,
    candidates,
    custom_schedule,
    forward_only,
    looped_placement,
    make_schedule,
    straight_placement,
    v_placement,
)
from pipec.text import value_bytes

ScheduleChoice = str | Path | Callable[[int, int], Schedule]
"""A name, a file of compute orders, or a function of the numbers of ranks and of microbatches."""

Placement = tuple[int, ...]

T = TypeVar("T", int, float)

Score = Callable[[Schedule], tuple[float, float]]
"""By how many bytes a schedule exceeds the memory limit, and then how long a step takes: less is better."""


@dataclass(frozen=True)
class Scheduler:
    """Makes the schedules of one model, all with its stages on the same ranks."""

    choice: ScheduleChoice
    num_ranks: int

    def placements(self, num_microbatches: int) -> list[Placement]:
        """Which rank has each stage; several if that is to be found out."""
        if self.choice == "auto":
            p = self.num_ranks
            return list(dict.fromkeys([straight_placement(p), v_placement(p), looped_placement(p, 2)]))
        if self.choice in SEARCHED:
            return [straight_placement(self.num_ranks)]
        return [self._fixed(num_microbatches).placement]

    def schedule(
        self, num_microbatches: int, placement: Placement, work: Callable[[], Workload], score: Score
    ) -> Schedule:
        """What a training step runs. ``work`` tells the costs of the ranks, if those matter.

        Raises:
            InputError, InfeasibleError: as ``make_schedule``.
            PlanError: the schedule of this many microbatches has its stages elsewhere.
        """
        if self.choice == "auto":
            found = candidates(self.num_ranks, num_microbatches, work())
            return replace(min((s for s in found if s.placement == placement), key=score), name="auto")
        if isinstance(self.choice, str) and self.choice in SEARCHED:
            return make_schedule(self.choice, self.num_ranks, num_microbatches, work())
        schedule = self._fixed(num_microbatches)
        if schedule.placement != placement:
            raise PlanError(
                f"schedule {schedule.name!r} puts stages on ranks {schedule.placement} for "
                f"{num_microbatches} microbatches, but the parameters are where {placement} put them; "
                "compile another pipeline for this number of microbatches"
            )
        return schedule

    def forwards(self, num_microbatches: int, placement: Placement) -> Schedule:
        """What an evaluation runs. What is searched for concerns backwards, so a simple order serves."""
        if not (isinstance(self.choice, str) and self.choice in SEARCHED):
            return forward_only(self._fixed(num_microbatches))
        simple = (
            SCHEDULES[name](self.num_ranks, num_microbatches) for name in ("gpipe", "zb-v", "looped-bfs")
        )
        return forward_only(next(schedule for schedule in simple if schedule.placement == placement))

    def _fixed(self, num_microbatches: int) -> Schedule:
        if isinstance(self.choice, str):
            return make_schedule(self.choice, self.num_ranks, num_microbatches)
        return custom_schedule(self.choice, self.num_ranks, num_microbatches)


def check_choice(choice: ScheduleChoice, num_ranks: int, num_microbatches: int | None) -> int | None:
    """The number of microbatches, which a file may set.

    Raises:
        InputError: nothing can come of the choice.
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


def workload_of(
    graph: TrainingGraph, placement: Placement, size: int, link: LinkModel, memory_limit: int | None
) -> Workload:
    """What the ranks of a cut graph do for a microbatch of ``size`` rows, in seconds and bytes.

    Of a memory limit too low for weights and gradients alone, nothing is left.
    """
    stages = [stage_functions(graph, stage, split_backward=True) for stage in range(graph.num_stages)]
    costs = [stage_cost(graph, stage, size) for stage in stages]

    def by_rank(each: Iterable[T]) -> tuple[T, ...]:
        sums: dict[int, T] = {}
        for rank, amount in zip(placement, each, strict=True):
            sums[rank] = sums[rank] + amount if rank in sums else amount
        return tuple(sums[rank] for rank in sorted(sums))

    def seconds(phase: Phase) -> tuple[float, ...]:
        return by_rank(cost.seconds.get(phase, 0.0) for cost in costs)

    static = max(by_rank(2 * cost.parameter_bytes + cost.transient_bytes for cost in costs))
    return Workload(
        forward=seconds(Phase.FORWARD),
        backward_input=seconds(Phase.BACKWARD_INPUT),
        backward_weight=seconds(Phase.BACKWARD_WEIGHT),
        recompute=seconds(Phase.RECOMPUTE),
        message=max(_message_seconds(graph, stage, size, link) for stage in stages),
        memory_backward=max(1, *by_rank(cost.saved_bytes for cost in costs)),
        memory_weight=max(by_rank(_kept_for_weights(stage, size) for stage in stages)),
        memory_limit=None if memory_limit is None else max(0, memory_limit - static),
    )


def _message_seconds(graph: TrainingGraph, stage: StageFunctions, size: int, link: LinkModel) -> float:
    """Time of what the stage's forward sends."""
    sent = [node for function in stage.functions if function.phase is Phase.FORWARD for node in function.sent]
    sizes = [value_bytes(value_of(graph, node, node.name), size) for node in sent]
    return link.seconds(sum(sizes)) if sizes else 0.0


def _kept_for_weights(stage: StageFunctions, size: int) -> int:
    """Bytes of what a microbatch still holds between its two backwards."""
    halves = [function for function in stage.functions if function.phase is Phase.BACKWARD_INPUT]
    kept = {memory_of(node) for function in halves for node in function.saved_out}
    return sum(node_bytes(node, size) for node in kept)
