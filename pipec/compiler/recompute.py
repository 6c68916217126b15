"""Recompute by budget: what ranks that lack memory compute again, so that a schedule fits on its stages."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.compiler.staged import Trial
from pipec.ir import Phase, Placement, Program, StageMemory, stages_on
from pipec.ir.columns import PHASE_CODE, Instructions
from pipec.passes.mark_recompute import MarkRecompute
from pipec.planner.recompute import Choice, Moment, Segment, Value, fastest_within, segments, smallest
from pipec.programs.fold import excerpt
from pipec.programs.memory import held

_ATTEMPTS = 3
"""How often a choice is made anew until it fits. An attempt knows what the one before lacked."""

_SEGMENTS = (1, 2, 4, 8, 16)
"""Into how many segments a stage is divided, one after the other, until it fits."""


def within_memory(trial: Trial) -> Trial:
    """The same schedule on the same cut, where ranks that lack memory replay as little as lets them fit.

    At first a stage replays all at once, before its backward. A replay then runs while the stage waits. Where
    that does not fit, the backward replays one segment of the stage after the other.

    What a phase function holds besides follows from what is replayed, and is no sum over values. So it is
    taken to be what it is without recompute, and then to be larger by what the attempt before lacked. If no
    attempt fits, the trial is the one that needs least.
    """
    tried, groups = list[Trial](), [group for group in _groups(trial) if group.lacks(trial)]
    while all(group.choose() for group in groups):
        tried.append(_replaying(trial, groups))
        lacking = [group for group in groups if group.lacks(tried[-1])]
        if not lacking:
            return tried[-1]
        for group in lacking:
            group.reserve_more(tried[-1])
    for group in groups:
        group.choose_least()
    return min([*tried, _replaying(trial, groups)], key=lambda each: each.score)


def _replaying(trial: Trial, groups: Sequence["_Group"]) -> Trial:
    names = frozenset(name for group in groups for name in group.replayed)
    late = frozenset(stage for group in groups if group.is_late for stage in group.stages)
    return trial.staged.recomputing(MarkRecompute(names, late)).trial(trial.schedule, trial.plan.microbatch_size)


@dataclass
class _Group:
    """Ranks that have ``stages`` in common, and what these replay.

    ``needs`` is what the ranks hold at each moment. ``reserved`` bytes are set aside on each rank.
    """

    ranks: Sequence[int]
    stages: Sequence[int]
    values: Sequence[Mapping[str, Value]]
    needs: Sequence["_Need"]
    level: int = 0
    reserved: float = 0.0
    replayed: frozenset[str] = frozenset()
    _attempts: int = 0

    @property
    def is_late(self) -> bool:
        """Whether backwards replay segment by segment."""
        return _SEGMENTS[self.level] > 1

    def lacks(self, trial: Trial) -> bool:
        """Whether a rank of the group needs more memory than it has."""
        return any(trial.excess[rank] for rank in self.ranks)

    def reserve_more(self, trial: Trial) -> None:
        self.reserved += max(trial.excess[rank] for rank in self.ranks)
        self._attempts += 1

    def choose(self) -> bool:
        """Choose what takes least time on the lowest level on which that may fit; False if there is none."""
        while self.level < len(_SEGMENTS):
            problem = self._problem()
            choice = fastest_within(*problem.numbers) if self._attempts < _ATTEMPTS else None
            if choice:
                self.replayed = problem.names(choice)
                return True
            self.level, self.reserved, self._attempts = self.level + 1, 0.0, 0
        return False

    def choose_least(self) -> None:
        """Choose what takes least memory on any level."""
        best = float("inf")
        self.reserved = 0.0
        for level in range(len(_SEGMENTS)):
            self.level = level
            problem = self._problem()
            choice = smallest(*problem.numbers)
            if (excess := choice.excess(*problem.numbers)) < best:
                best, chosen = excess, (level, problem.names(choice))
        self.level, self.replayed = chosen
