"""Recompute by budget: what ranks that lack memory compute again, so that a schedule fits on its stages."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipec.compiler.staged import Trial
from pipec.ir import Phase, Placement, Program, StageMemory, stages_on
from pipec.ir.columns import PHASE_CODE, Instructions
from pipec.planner.recompute import Choice, Moment, Value, fastest_within, smallest
from pipec.programs.fold import excerpt
from pipec.programs.memory import held

_ATTEMPTS = 4
"""How often a choice is made anew until it fits. An attempt knows what the one before lacked."""


def within_memory(trial: Trial) -> Trial:
    """The same schedule on the same cut, where ranks that lack memory replay as little as lets them fit.

    What a phase function holds while it runs follows from what is replayed, and is no sum over values. So it
    is taken to be what it is without recompute, and then to be larger by what the attempt before lacked. If
    no attempt fits, the trial is the one that needs least.
    """
    tried, reserved = list[Trial](), [0.0] * len(trial.excess)
    for _ in range(_ATTEMPTS):
        tried.append(_replaying(trial, reserved, least=False))
        if not any(tried[-1].excess):
            return tried[-1]
        reserved = [have + more for have, more in zip(reserved, tried[-1].excess, strict=True)]
    tried.append(_replaying(trial, reserved, least=True))
    return min(tried, key=lambda each: each.score)


def _replaying(trial: Trial, reserved: Sequence[float], least: bool) -> Trial:
    """The trial with a choice for each group of ranks that share stages, if one of them lacks memory.

    ``reserved`` is set aside on each rank. With ``least``, or if nothing fits, the choice needs least memory.
    """
    staged, size = trial.staged, trial.plan.microbatch_size
    values, replayed = staged.forward_values(size), set[str]()
    programs = excerpt(trial.programs, len(trial.plan.stages))
    for ranks, stages in _sharing_stages(trial.plan.placement):
        if any(trial.excess[rank] for rank in ranks):
            moments = [
                each for rank in ranks for each in _moments(trial, programs[rank], stages, reserved[rank])
            ]
            choice = _choice([values[stage] for stage in stages], tuple(_highest(moments)), least)
            for stage, chosen in zip(stages, choice.replayed, strict=True):
                names = list(values[stage])
                replayed.update(names[position] for position in chosen)
    return staged.recomputing(frozenset(replayed)).trial(trial.schedule, size)


def _choice(stages: Sequence[Mapping[str, Value]], moments: tuple[Moment, ...], least: bool) -> Choice:
    numbers = tuple(tuple(stage.values()) for stage in stages)
    return (None if least else fastest_within(numbers, moments)) or smallest(numbers, moments)


def _sharing_stages(placement: Placement) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of ranks that have stages in common, each with the stages that they have."""
    ranks = {rank for of_stage in placement for rank in of_stage}
    while ranks:
        group, stages = {min(ranks)}, set[int]()
        while found := {stage for rank in group for stage in stages_on(placement, rank)} - stages:
            stages |= found
            group |= {rank for stage in found for rank in placement[stage]}
        ranks -= group
        yield sorted(group), sorted(stages)


def _moments(trial: Trial, program: Program, stages: Sequence[int], reserved: float) -> Iterator[Moment]:
    """What a rank holds of the forwards of ``stages`` while each of its computes runs.

    A replay runs directly before its backward, so that it holds what it made while the backward runs.
    """
    plan, rank = trial.plan, program.rank
    memory = [stage.cost.memory for stage in plan.stages]
    cells = Instructions.of(program.instructions, plan.links).cells
    others = held(cells, [StageMemory(kept=each.kept, transient=each.transient) for each in memory])
    static = sum(memory[stage].static for stage in stages_on(plan.placement, rank))
    rooms = trial.staged.options.topology.devices[rank].memory_bytes - static - reserved - others
    one = [[StageMemory(saved=float(other == stage)) for other in range(len(memory))] for stage in stages]
    saved = np.array([held(cells, each) for each in one], int)
    backward = np.isin(cells.phases, [PHASE_CODE[phase] for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)])
    replayed = np.array([backward & (cells.stages == stage) for stage in stages], int)
    for number, room in enumerate(rooms):
        yield Moment(tuple(saved[:, number].tolist()), tuple(replayed[:, number].tolist()), float(room))


def _highest(moments: Sequence[Moment]) -> list[Moment]:
    """Those that are not implied by another."""
    found: list[Moment] = []
    for moment in sorted(set(moments), key=lambda each: (each.room, -sum(each.saved + each.replayed))):
        if not any(_implies(other, moment) for other in found):
            found.append(moment)
    return found


def _implies(one: Moment, other: Moment) -> bool:
    """Whether whatever is within the room of ``one`` is within that of ``other``."""
    counts = zip(one.saved + one.replayed, other.saved + other.replayed, strict=True)
    return one.room <= other.room and all(mine >= its for mine, its in counts)
