"""The fastest way to run a step: how many microbatches under which schedule, as the simulator scores them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipec.compiler.policy import Placement, Scheduler
from pipec.compiler.staged import Estimate, Staged
from pipec.errors import InputError, PlanError
from pipec.hardware.devices import LinkModel
from pipec.ir import Alternative, Schedule
from pipec.ir.batch import split_sizes
from pipec.ir.text import format_bytes
from pipec.passes import Pass

Cuts = Callable[[Scheduler, Placement, Mapping[int, int]], Iterable[Staged]]
"""Cuts a captured graph for stages on these ranks: the fastest way first, then those that need less memory.

The last argument has the numbers of microbatches that are tried, and their sizes. Raises PlanError if there
are too few operators, InfeasibleError if there is no way within the memory.
"""


_ABOUT = 0.02
"""Share of a step: less than predictions are off by."""


@dataclass(frozen=True)
class Trial:
    """A way to run a step and what it is predicted to take, ``excess`` bytes more than a rank may."""

    staged: Staged
    schedule: Schedule
    microbatch_size: int
    estimate: Estimate
    excess: float

    @property
    def score(self) -> tuple[float, float]:
        """Less is better."""
        return self.excess, self.estimate.seconds


@dataclass(frozen=True)
class Choice:
    """On which ranks stages are, how to cut for them, into how many microbatches, and all that was tried."""

    placement: Placement
    num_microbatches: int
    cut: Pass | None = None
    tried: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Search:
    """Tries schedules on the stages of a cut graph.

    If ``may_recompute``, stages of ranks that would need more memory than there is compute again what they
    did not keep.
    """

    scheduler: Scheduler
    may_recompute: bool

    def choose(
        self, cuts: Cuts, placements: Sequence[Placement], batch: int, counts: Sequence[int]
    ) -> Choice:
        """The best of all schedules on offer on these placements, for steps of ``batch`` rows.

        The first of each where nothing can be tried: compiling that says why.
        """
        trials = [each for placement in placements for each in self._on(cuts, placement, batch, counts)]
        if not trials:
            return Choice(placements[0], counts[0])
        best = _best(trials)
        schedule, tried = best.schedule, tuple(map(alternative, trials))
        return Choice(schedule.placement, schedule.num_microbatches, best.staged.cut, tried)

    def with_replicas(self, choice: Choice, cuts: Cuts, batch: int, link: LinkModel) -> Choice:
        """The choice beside the best of several pipelines, each with a part of the ranks and of the batch."""
        num_ranks = self.scheduler.num_ranks
        splits = [n for n in range(2, num_ranks + 1) if num_ranks % n == batch % n == 0]
        found = [self._replicated(cuts, batch, n, link) for n in splits if self.scheduler.is_named]
        return replace(choice, tried=(*choice.tried, *filter(None, found)))

    def _replicated(self, cuts: Cuts, batch: int, replicas: int, link: LinkModel) -> Alternative | None:
        scheduler = replace(self.scheduler, num_ranks=self.scheduler.num_ranks // replicas)
        part, rows = replace(self, scheduler=scheduler), batch // replicas
        try:
            counts = scheduler.counts(rows)
            placements = scheduler.placements(counts)
        except InputError:  # the schedule cannot do with fewer ranks
            return None
        trials = [each for placement in placements for each in part._on(cuts, placement, rows, counts)]
        found = [replicated(trial, replicas, link) for trial in trials]
        return min(found, key=lambda each: each.seconds, default=None)

    def _on(self, cuts: Cuts, placement: Placement, batch: int, counts: Sequence[int]) -> Iterator[Trial]:
        """Trials on the fastest cut and, unless the best of them fits as it is, on others."""
        sizes = {count: split_sizes(batch, count)[0] for count in counts}
        with suppress(PlanError):
            for staged in cuts(self.scheduler, placement, sizes):
                trials = list(self._trials(staged, placement, batch, counts))
                yield from trials
                best = min(trials, key=lambda trial: trial.score, default=None)
                if best and best.staged is staged and not best.excess:
                    break

    def _trials(
        self, staged: Staged, placement: Placement, batch: int, counts: Iterable[int]
    ) -> Iterator[Trial]:
        """Every schedule on offer, with each number of microbatches that the graph serves."""
        for count in counts:
            sizes = split_sizes(batch, count)
            if all(map(staged.graph.serves, {sizes[0], sizes[-1]})):
                work = functools.partial(staged.workload, placement, sizes[0])
                for schedule in self.scheduler.options(count, placement, work):
                    yield self.trial(staged, schedule, sizes[0])

    def best(self, staged: Staged, placement: Placement, num_microbatches: int, size: int) -> Trial:
        """The schedule to run, for which candidates may be searched one by one."""
        work = functools.partial(staged.workload, placement, size)
        schedules = self.scheduler.candidates(num_microbatches, placement, work)
        return min((self.trial(staged, each, size) for each in schedules), key=lambda trial: trial.score)

    def trial(self, staged: Staged, schedule: Schedule, size: int) -> Trial:
        """What a step takes, with the stages that would not fit recomputing."""
        estimate = staged.estimate(schedule, size)
        excess = estimate.excess(staged.topology)
        if self.may_recompute and any(excess):
            owners = enumerate(staged.ranks_of(schedule.placement))
            staged = staged.recomputing(frozenset(stage for stage, rank in owners if excess[rank]))
            estimate = staged.estimate(schedule, size)
        return Trial(staged, schedule, size, estimate, max(estimate.excess(staged.topology)))


def _best(trials: Sequence[Trial]) -> Trial:
    """The fastest that fits; of those about as fast, the one with the fewest and largest microbatches."""
    fastest = min(trials, key=lambda trial: trial.score)
    near = fastest.estimate.seconds * (1 + _ABOUT)
    as_fast = [each for each in trials if each.excess == fastest.excess and each.estimate.seconds <= near]
    return min(as_fast, key=lambda trial: (trial.schedule.num_microbatches, trial.estimate.seconds))


def alternative(trial: Trial) -> Alternative:
    """A trial as data, refused so far only if it does not fit."""
    return Alternative(
        schedule=trial.schedule.name,
        num_stages=trial.schedule.num_stages,
        replicas=1,
        num_microbatches=trial.schedule.num_microbatches,
        seconds=trial.estimate.seconds,
        peak_bytes=trial.estimate.peak_bytes,
        refused=f"needs {format_bytes(trial.excess)} more than a device has" if trial.excess else "",
    )


def replicated(trial: Trial, replicas: int, link: LinkModel) -> Alternative:
    """A trial as one of several pipelines whose ranks then sum their gradients in a ring."""
    gradient_bytes = max(need.static for need in trial.estimate.needs) / 2
    ring = 2 * (replicas - 1) * link.seconds(gradient_bytes / replicas)
    one = alternative(trial)
    why = one.refused or "a stage cannot have replicas yet"
    return replace(one, replicas=replicas, seconds=one.seconds + ring, refused=why)


def refused(tried: Sequence[Alternative], chosen: Trial) -> tuple[Alternative, ...]:
    """What was tried and not taken, fastest first: the best of each schedule and number of microbatches."""
    best: dict[object, Alternative] = {}
    for each in sorted(tried, key=lambda each: (bool(each.refused), each.seconds)):
        best.setdefault((each.replicas, each.schedule), each)
        best.setdefault((each.replicas, each.num_microbatches), each)
    taken = chosen.schedule.name, chosen.schedule.num_microbatches, 1
    others = [each for each in dict.fromkeys(best.values()) if _way(each) != taken]
    slower = [each.seconds / chosen.estimate.seconds - 1 for each in others]
    explained = [
        replace(each, refused=each.refused or _slower(share))
        for each, share in zip(others, slower, strict=True)
    ]
    return tuple(sorted(explained, key=lambda each: each.seconds))


def _way(each: Alternative) -> tuple[str, int, int]:
    return each.schedule, each.num_microbatches, each.replicas


def _slower(share: float) -> str:
    return f"{share:.1%} slower" if share >= 0.0005 else "about as fast, with more and smaller microbatches"
