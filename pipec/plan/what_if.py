"""What the step would take if something were different: a grid of other ways to run it, each simulated.

A grid has an axis for each thing that may change. Cells are simulated in the order of how many axes they
change, until the budget is spent: a page shows what was simulated, and no guess in between.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np

from pipec.errors import InputError, PipecError
from pipec.ir import Phase, Plan, Program, Schedule
from pipec.plan.predictions import simulate_plan
from pipec.programs.lower import lower
from pipec.programs.tail_order import ordered_for_tail
from pipec.programs.verify import verify_step
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.schedules.named import SCHEDULES
from pipec.schedules.workload import Workload
from pipec.timeline.events import Timeline
from pipec.timeline.grid import Axis, Grid

BUDGET = 60_000
"""How many events are simulated, with ``_CELL_EVENTS`` more for each cell: about a second on one core."""

_CELL_EVENTS = 250
_MOST_SLOWED = 8
"""The stages whose speed may change: the slowest ones."""

_FACTORS = (0.5, 0.8, 1.25, 2.0)


def what_if_of_plan(plan: Plan, programs: Sequence[Program], timeline: Timeline) -> Grid | None:
    """The grid of a plan: other microbatches and orders, other links and slower stages.

    None for asynchronous schedules and for stages with replicas, whose steps depend on more.
    """
    if plan.sync_spec.stream or any(len(ranks) > 1 for ranks in plan.placement):
        return None
    rows = plan.num_microbatches * plan.microbatch_size
    counts = [m for m in _around(plan.num_microbatches) if rows % m == 0]
    seconds = [sum(stage.cost.seconds.values()) for stage in plan.stages]
    axes = [
        Axis("microbatches", [str(m) for m in counts], counts),
        Axis("schedule", names := _orders(plan), names),
        Axis.of_factors("seconds of messages", (0.25, 0.5, 2.0, 4.0)),
        *_slowed(seconds),
    ]
    if plan.recomputing_stages:
        axes.append(Axis("recompute", ["as planned", "none"], [True, False]))

    def play(chosen: Mapping[str, object]) -> Timeline:
        changed = _with_costs(plan, chosen)
        if changed.num_microbatches == plan.num_microbatches and chosen["schedule"] == plan.schedule:
            return simulate_plan(changed, programs)
        schedule = _fixed_order(str(chosen["schedule"]), plan.num_ranks, changed.num_microbatches)
        if schedule.placement != changed.placement:
            raise PipecError(f"{schedule.name} needs other stages")
        changed = replace(changed, schedule=schedule.name)
        return simulate_plan(changed, _verified(changed, ordered_for_tail(schedule, changed)))

    notes = (
        f"The plan's costs ({plan.cost_source or 'given'}), played by the simulator that made the plan.",
        "With other microbatches, computes and messages take time in proportion to their rows.",
        "Whether a choice fits in memory was not checked.",
    )
    return _filled(axes, play, timeline, notes)


def what_if_of_equal_stages(
    name: str, num_ranks: int, num_microbatches: int, work: Workload, timeline: Timeline
) -> Grid:
    """The grid of a schedule on equal stages: other schedules, microbatches, ranks, messages, slower ranks.

    With other numbers of microbatches or ranks, the work of the step stays the same in all.
    """
    counts, ranks = _around(num_microbatches), _around(num_ranks, 2)
    names = [name, *(each for each in (*SCHEDULES,) if each != name)]
    axes = [
        Axis("microbatches", [str(m) for m in counts], counts),
        Axis("schedule", names, names),
        Axis("ranks", [str(n) for n in ranks], ranks),
        Axis.of_factors("time of messages", (0.0, 0.5, 2.0, 4.0)),
        Axis.of_factors("time of the middle rank", (0.8, 1.25, 1.5)),
    ]

    def play(chosen: Mapping[str, object]) -> Timeline:
        count, number = int(str(chosen["microbatches"])), int(str(chosen["ranks"]))
        own = Workload.uniform(
            number,
            forward=work.forward[0],
            backward_input=work.backward_input[0],
            backward_weight=work.backward_weight[0],
            message=(work.messages[0] if work.messages else 0.0) * float(str(chosen["time of messages"])),
        )
        own = own.scaled([num_microbatches / count * num_ranks / number] * number)
        schedule = _fixed_order(str(chosen["schedule"]), number, count)
        slowed = [1.0] * number
        slowed[number // 2] = float(str(chosen["time of the middle rank"]))
        return simulate_schedule(schedule, own.scaled(slowed))[0]

    notes = ("With other microbatches or ranks, the work of the whole step stays the same; messages do not.",)
    return _filled(axes, play, timeline, notes)


def _fixed_order(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of this name. Raises InputError for one that is searched: each cell would take seconds."""
    if name not in SCHEDULES:
        raise InputError(f"the orders of {name} are searched, not simulated beforehand")
    return SCHEDULES[name](num_ranks, num_microbatches)


def _around(number: int, octaves: int = 4) -> list[int]:
    """``number`` first, then its halves and doubles."""
    others = [number // 2**k for k in (2, 1) if number % 2**k == 0 and k <= octaves] + [
        number * 2,
        number * 4,
    ]
    return [number, *(each for each in others[-octaves - 1 :] if each != number)]


def _orders(plan: Plan) -> list[str]:
    """The schedules that the phases of the plan's stages can run, the plan's own first."""
    splits = any(Phase.BACKWARD_WEIGHT in stage.cost.seconds for stage in plan.stages)
    others = ("zb-h1", "zb-h2") if splits else ("gpipe", "1f1b")
    return [plan.schedule, *(name for name in others if name != plan.schedule)]


def _slowed(seconds: Sequence[float]) -> list[Axis]:
    slowest = np.argsort(seconds)[::-1][:_MOST_SLOWED].tolist() if len(seconds) > 1 else []
    return [Axis.of_factors(f"seconds of stage {stage}", _FACTORS) for stage in sorted(slowest)]


def _with_costs(plan: Plan, chosen: Mapping[str, object]) -> Plan:
    """The plan with other costs: rows of a microbatch, links, stages, and with or without recomputing."""
    count = int(str(chosen["microbatches"]))
    rows = plan.num_microbatches / count
    stages = []
    for stage in plan.stages:
        factor = rows * float(str(chosen.get(f"seconds of stage {stage.index}", 1.0)))
        seconds = {
            phase: 0.0 if phase is Phase.RECOMPUTE and not chosen.get("recompute", True) else time * factor
            for phase, time in stage.cost.seconds.items()
        }
        stages.append(replace(stage, cost=replace(stage.cost, seconds=seconds)))
    factor = rows * float(str(chosen["seconds of messages"]))
    return replace(
        plan,
        num_microbatches=count,
        microbatch_size=plan.microbatch_size * plan.num_microbatches // count,
        stages=tuple(stages),
        link_seconds=tuple(seconds * factor for seconds in plan.link_seconds),
    )


def _verified(plan: Plan, schedule: Schedule) -> Sequence[Program]:
    programs = lower(schedule, plan)
    verify_step(plan, programs)
    return programs


def _filled(
    axes: Sequence[Axis],
    play: Callable[[Mapping[str, object]], Timeline],
    timeline: Timeline,
    notes: Sequence[str],
) -> Grid:
    """Play as many cells as the budget allows.

    A cell that no schedule can run is left out, and so is an axis of which nothing was played.
    """
    unchanged = {axis.name: axis.values[0] for axis in axes}
    axes = [axis for axis in axes if len(axis.choices) > 1]
    most_cells = BUDGET // (_CELL_EVENTS + len(timeline.events))
    cells = [((0,) * len(axes), *_figures(timeline))]
    for positions in _by_changes([len(axis.choices) for axis in axes]):
        if len(cells) > most_cells:
            break
        changed = {axis.name: axis.values[at] for axis, at in zip(axes, positions, strict=True)}
        try:
            cells.append((positions, *_figures(play(unchanged | changed))))
        except PipecError:
            continue
    played = [k for k in range(len(axes)) if any(positions[k] for positions, *_ in cells)]
    kept = [
        (tuple(at[k] for k in played), makespan, idle, in_flight) for at, makespan, idle, in_flight in cells
    ]
    return Grid([axes[k] for k in played], kept, notes)


def _by_changes(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All positions but the first of every axis, those that change fewest axes first."""
    for changes in range(1, len(sizes) + 1):
        for chosen in combinations(range(len(sizes)), changes):
            for positions in product(*(range(1, sizes[axis]) for axis in chosen)):
                at = dict(zip(chosen, positions, strict=True))
                yield tuple(at.get(axis, 0) for axis in range(len(sizes)))


def _figures(timeline: Timeline) -> tuple[float, float, int]:
    work = timeline.blocking
    busy = float((work.ends - work.starts).sum())
    idle = 1 - busy / (timeline.num_ranks * timeline.makespan) if timeline.makespan else 0.0
    return timeline.makespan, idle, max(timeline.peak_in_flight, default=0)
