"""Searches the fastest way to run a step, as the simulator predicts it.

The score of an asynchronous schedule is the time from one mini-batch to the next.

1. All schedules that are allowed, on every layout that is left open (which ranks have a stage, and which
   stages a rank has), with the usual number of microbatches. Each layout has a cut of its own.
2. If plans lack memory, what to recompute or offload, for a few of them.
3. More and fewer microbatches on the best layout.
4. If nothing fits, or what fits is slow, cuts for the best layout that need less memory.

So a search takes a few cuts and plans, whatever the model. Every plan is lowered, verified and simulated.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

from pipec.compiler.candidate import Candidate
from pipec.compiler.captured_step import CapturedStep
from pipec.compiler.memory_budget import fit_into_memory, may_free_memory
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE, EvaluatedPlan, StagedGraph
from pipec.compiler.tried_plans import as_alternative
from pipec.errors import InputError, PlanError
from pipec.ir import Alternative, Placement, Schedule, ShardingLevel
from pipec.ir.batch_split import split_sizes
from pipec.passes import Pass
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.rank_memory import max_in_flight_of_order

_CHOICES = 2
"""For how many plans it is chosen what to recompute: for the fastest, and for those that lack least."""

_MEMORY_LAYOUTS, _MEMORY_ATTEMPTS = 2, 3
"""On how many layouts cuts are tried that need less memory, and how many cuts on each until one fits."""


_MOST_GATHERED, _MOST_LOADED = 8, 64
"""The most stages of a rank that replicas gather, or that are loaded from the host."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan of a step, and the candidate it belongs to. The best plan has all that were tried beside it.

    ``base`` is the cut graph before recompute is marked.
    """

    candidate: Candidate
    best: EvaluatedPlan
    base: StagedGraph
    alternatives: tuple[Alternative, ...] = ()

    @property
    def key(self) -> tuple[StagedGraph, int, int]:
        """The cut graph, the number of microbatches, and the rows of the first."""
        return self.base, self.best.plan.num_microbatches, self.best.plan.microbatch_size


def search(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best plan of all that ``candidate`` leaves to the search.

    Raises:
        InputError, InfeasibleError, PlanError: nothing could be tried, and why.
    """
    found = []
    levels = [candidate]
    if candidate.tunes_shard:
        fixed = replace(candidate, tunes_shard=False)
        levels = [fixed.with_sync(shard=shard) for shard in (None, *ShardingLevel)]
    for each in levels:
        with suppress(InputError) if candidate.tunes_shard else nullcontext():  # a level it cannot have
            if each.cut is None:
                found.append(_by_layers(step, each))
            else:
                found.append(evaluate_stages(step.cut_as_decided(each), each, step.batch))
    best = min(found, key=lambda result: result.best.score)
    if not _fits(best.best) and candidate.may_load_weights:
        loading = search(step, candidate.with_sync(weights_on_host=True))
        best = loading if _fits(loading.best) else best
    if candidate.tells_replicas:
        with suppress(InputError):  # no other layout runs this model
            told = [as_alternative(each.best) for each in _other_layouts(step, candidate, _Tried(step.batch))]
            best = replace(best, alternatives=(*best.alternatives, *told))
    return best


def evaluate_stages(staged: StagedGraph, candidate: Candidate, batch: int) -> SearchResult:
    """The best schedule and number of microbatches on stages that are placed. Raises as ``search``."""
    assert candidate.placement is not None
    tried = _Tried(batch)
    tried.add(tried.evaluate(candidate, staged, candidate.placement, candidate.counts(batch)[0]))
    tried.add_other_counts()
    return tried.result()


def _search_layouts(step: CapturedStep, candidate: Candidate) -> SearchResult:
    tried, own = _Tried(step.batch), candidate.replica_arrangements()
    plans = [plan for each in own for plan in tried.on_fastest_cuts(step, each)]
    if candidate.tunes_replicas:
        plans += _other_layouts(step, candidate, tried)
    tried.add(plans)
    tried.add_other_counts()
    tried.add_cuts_within_memory(step)
    return tried.result()


def _other_layouts(step: CapturedStep, candidate: Candidate, tried: "_Tried") -> Sequence[SearchResult]:
    """Plans with other numbers of replicas. Model collectives are captured for one number."""
    others = [] if step.graph.first_collective else candidate.other_layouts()
    return [plan for each in others for plan in tried.on_fastest_cuts(step, each)]


def _by_layers(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best plan, whose ranks may gather or load parameters by groups of layers.

    Where replicas gather them, the groups are the smallest possible ones, and pipelines of several ranks are
    divided only if no other schedule that ``auto`` may take fits.
    """
    if candidate.loads_weights:
        return _loading_by_layers(step, candidate)
    whole = _search_layouts(step, candidate)
    candidate, policy = whole.candidate, whole.candidate.policy
    shares = candidate.options.sync_spec.shard is ShardingLevel.PARAMETERS and policy.replicas != 1
    if not shares or (policy.num_ranks > 1 and (policy.source != "auto" or _fits(whole.best))):
        return whole
    layers = policy.with_groups_of_layers(_MOST_GATHERED)
    found = (_if_it_gains(step, replace(candidate, policy=layered), whole) for layered in layers)
    return next(filter(None, found), whole)


def _loading_by_layers(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best plan that loads weights, in groups of layers that get smaller while that gains.

    It begins with the first groups of which two fit into a device, those that run and the next ones, if the
    model has as many.
    """
    policy, devices = candidate.policy, candidate.options.topology.devices
    least = min(device.memory_bytes for device in devices) * policy.num_ranks
    groups = [policy, *reversed(policy.with_groups_of_layers(_MOST_LOADED))]
    fitting = [each for k, each in enumerate(groups) if 2 * step.parameter_bytes <= least * 2**k]
    first, *others = fitting or groups[:1]
    try:
        best = _search_layouts(step, replace(candidate, policy=first))
    except (InputError, PlanError):
        return _search_layouts(step, candidate)
    for layered in others:
        found = _if_it_gains(step, replace(candidate, policy=layered), best)
        if found is None or found is best:
            break
        best = found
    return best


def _if_it_gains(step: CapturedStep, candidate: Candidate, than: SearchResult) -> SearchResult | None:
    """The best plan of a candidate, or the other one; None if the model has not as many stages.

    It is taken if it fits where the other does not, if it is faster, or if it takes less memory and about the
    same time.
    """
    try:
        found = _search_layouts(step, candidate)
    except (InputError, PlanError):
        return None
    best, other = found.best, than.best
    gains = best.score < other.score or (other.is_close(best) and best.peak_bytes < other.peak_bytes)
    return replace(found, alternatives=(*found.alternatives, *than.alternatives)) if gains else than


@dataclass
class _Tried:
    """The plans that were tried for steps of ``batch`` rows.

    ``fastest`` are the seconds of the fastest one without regard to memory. ``first_error`` is the first
    reason why a plan could not be tried.
    """

    batch: int
    plans: list[SearchResult] = field(default_factory=list)
    fastest: float = math.inf
    first_error: InputError | PlanError | None = None

    def result(self) -> SearchResult:
        """The best plan. Raises ``first_error`` if nothing could be tried."""
        if not self.plans:
            assert self.first_error is not None, "no plan was tried, and no error says why"
            raise self.first_error
        return replace(
            best_result(self.plans), alternatives=tuple(as_alternative(each.best) for each in self.plans)
        )

    def on_fastest_cuts(self, step: CapturedStep, candidate: Candidate) -> Iterator[SearchResult]:
        """Plans for the usual number of microbatches: a cut for each placement of the allowed schedules."""
        try:
            count = candidate.counts(self.batch)[0]
            placements = candidate.policy.placements(count)
        except InputError as error:
            self.first_error = self.first_error or error
            return
        for placement in placements:
            how = candidate.fastest_cut(placement, count, split_sizes(self.batch, count)[0])
            yield from self._on_cut(step, candidate, how, placement, count)

    def _on_cut(
        self, step: CapturedStep, candidate: Candidate, how: Pass, placement: Placement, count: int
    ) -> Sequence[SearchResult]:
        try:
            staged = step.cut(how, candidate.options)
        except PlanError as error:
            self.first_error = self.first_error or error
            return []
        if replicas := staged.graph.assignment.replicas:
            if len({*replicas}) == 1:
                return []  # which is a layout of its own
            candidate = candidate.with_replicas(replicas)
            placement = candidate.policy.placements(count)[0]
        return self.evaluate(candidate, staged, placement, count)

    def evaluate(
        self, candidate: Candidate, staged: StagedGraph, placement: Placement, count: int
    ) -> Sequence[SearchResult]:
        """The allowed schedules with ``count`` microbatches on these stages.

        A graph may be valid for some sizes of microbatch alone. A number of microbatches with other sizes is
        then skipped or, if it is the only one, tried with the leading microbatches of valid sizes.
        """
        sizes = split_sizes(self.batch, count)
        num_valid = len(list(takewhile(staged.graph.is_valid_for, sizes)))
        if num_valid != count and (num_valid == 0 or len(candidate.counts(self.batch)) > 1):
            return []
        try:
            schedules = candidate.policy.candidate_schedules(
                num_valid, placement, lambda schedule: staged.workload(schedule, sizes[0])
            )
        except (InputError, PlanError) as error:
            self.first_error = self.first_error or error
            return []
        return [
            SearchResult(candidate, _following_checkpoints(staged, schedule, sizes[0]), staged)
            for schedule in schedules
        ]

    def add(self, plans: Sequence[SearchResult]) -> None:
        """Add plans. Of those that lack memory, add a few with what is recomputed or offloaded.

        It is chosen for the fastest, and for those that lack least, unless a plan fits that is about as fast
        as they would be without a limit.
        """
        self.fastest = min([self.fastest, *(each.best.seconds for each in plans)])
        lacking = [each for each in plans if not _fits(each.best) and may_free_memory(each.best)]
        self.plans += [each for each in plans if each not in lacking]
        fastest = sorted(lacking, key=lambda each: each.best.seconds)
        nearest = sorted(fastest[_CHOICES:], key=lambda each: each.best.score)
        for each in (*fastest[:_CHOICES], *nearest[:_CHOICES]):
            if not self.has_about(each.best.seconds):
                self.plans.append(replace(each, best=fit_into_memory(each.best)))

    def has_about(self, seconds: float) -> bool:
        """Whether a plan fits that takes about these seconds, or less."""
        fitting = (each.best.seconds for each in self.plans if _fits(each.best))
        return any(each <= (1 + PREDICTION_TOLERANCE) * seconds for each in fitting)

    def add_other_counts(self) -> None:
        """Add plans of more and fewer microbatches on the stages of the best and of the fastest plan."""
        if not self.plans:
            return
        best, fastest = best_result(self.plans), min(self.plans, key=lambda each: each.best.score)
        self._add_counts_around(best)
        if fastest.best.schedule.placement != best.best.schedule.placement or fastest.base != best.base:
            self._add_counts_around(fastest)

    def _add_counts_around(self, usual: SearchResult) -> None:
        """Add plans of more and fewer microbatches on the same stages, while they are as good.

        All numbers are tried if schedules may be asynchronous, because each of these supports few numbers.
        """
        candidate, plan = usual.candidate, usual.best.plan
        counts, at = sorted(candidate.counts(self.batch)), plan.num_microbatches
        for others in ([n for n in counts if n > at], [n for n in reversed(counts) if n < at]):
            best = usual.best
            for count in others:
                found = self.evaluate(candidate, usual.base, usual.best.schedule.placement, count)
                num_known = len(self.plans)
                self.add(found)
                added = [each.best for each in self.plans[num_known:]]
                is_good = any(each.score < best.score or best.is_close(each) for each in added)
                if found and not is_good and not candidate.policy.may_be_asynchronous:
                    break
                best = min([best, *added], key=lambda each: each.score)

    def add_cuts_within_memory(self, step: CapturedStep) -> None:
        """Add plans on cuts that need less memory, unless one fits that is about as fast as without limits.

        First on cuts that fit although stages save all that their backwards read. If nothing fits then, on
        cuts of which the weights fit, for stages that recompute or offload the rest.
        """
        for saves, seconds in ((True, self.fastest), (False, math.inf)):
            for near in self._nearest_on_fastest_layouts():
                usual = split_sizes(self.batch, near.candidate.counts(self.batch)[0])[0]
                for size in dict.fromkeys([usual, near.best.plan.microbatch_size]):
                    if not self.has_about(seconds) and (saves or may_free_memory(near.best)):
                        self._add_cuts_near(step, near, size, saves)

    def _nearest_on_fastest_layouts(self) -> Sequence[SearchResult]:
        """The plan that lacks least on each of the fastest layouts that can be cut for less memory."""
        nearest = dict[StagedGraph, SearchResult]()
        for each in sorted(self.plans, key=lambda each: each.best.score):
            if each.candidate.cuts_within_memory(each.best.schedule.placement):
                nearest.setdefault(each.base, each)
        return sorted(nearest.values(), key=lambda each: each.best.seconds)[:_MEMORY_LAYOUTS]

    def _add_cuts_near(self, step: CapturedStep, near: SearchResult, size: int, saves: bool) -> None:
        """Add plans like one that lacks memory, on cuts that fit by what the planner sums, for some size.

        The planner does not know of temporary values inside a phase function, nor of messages. So the memory
        that these took in the last attempt, or that it lacked, is reserved.
        """
        candidate, schedule, plan = near.candidate, near.best.schedule, near.best.plan
        ordered, in_flight = near.base.ordered(schedule), tuple[int, ...]()
        if saves:  # on the first replica of each stage
            firsts = (ordered.orders[ranks[0]] for ranks in ordered.placement)
            in_flight = tuple(map(max_in_flight_of_order, firsts))
        last = near.base.evaluate(schedule, plan.microbatch_size) if saves else near.best
        reserved = [candidate.unplanned_bytes(need, saves) for need in last.memory]
        if not saves:
            reserved = [old + excess for old, excess in zip(reserved, last.excess_bytes, strict=True)]
        for _ in range(_MEMORY_ATTEMPTS):
            how = candidate.cut_within(reserved, plan.num_microbatches, size, in_flight)
            found = self._on_cut(step, candidate, how, schedule.placement, plan.num_microbatches)
            if not found:
                return
            nearest = min(found, key=lambda each: each.best.score)
            last = nearest.best if saves or _fits(nearest.best) else fit_into_memory(nearest.best)
            self.plans.append(replace(nearest, best=last))
            if _fits(last):
                return
            needs = zip(reserved, last.excess_bytes, last.memory, strict=True)
            reserved = [
                max(old + excess, candidate.unplanned_bytes(need, saves)) for old, excess, need in needs
            ]


def _fits(evaluated: EvaluatedPlan) -> bool:
    return not any(evaluated.excess_bytes)


def _following_checkpoints(staged: StagedGraph, schedule: Schedule, size: int) -> EvaluatedPlan:
    """A schedule on these stages, without choosing what to recompute.

    What the model asks ``torch.utils.checkpoint`` to compute again is computed again, unless that does not
    fit, and another choice is to be found.
    """
    if staged.options.recompute == "auto" and (again := staged.checkpointed):
        every = frozenset(range(staged.graph.num_stages))
        following = staged.with_recompute(MarkRecompute(again, every)).evaluate(schedule, size)
        if _fits(following):
            return following
    return staged.evaluate(schedule, size)


def best_result(plans: Sequence[SearchResult]) -> SearchResult:
    """The fastest plan that fits; among plans that are about as fast, the simplest.

    The simplest has the fewest and largest microbatches, then the fewest instructions, then the least memory.
    An asynchronous schedule is chosen only if it is faster. Of several cuts for a schedule, only the fastest
    counts.

    A plan that is about as fast as the fastest may gain too little over a simpler one that is slower. So
    among the schedules for these microbatches, a simpler one is given up only for one that is clearly
    faster::

        1f1b 57.6 ms, zb-h1 55.6 ms, zb-h2 54.0 ms     ->     zb-h2, the only one to gain more than
                                                       PREDICTION_TOLERANCE
    """
    on_best_cut: dict[object, SearchResult] = {}
    for each in sorted(plans, key=lambda each: each.best.score):
        schedule = each.best.schedule
        on_best_cut.setdefault((schedule.name, schedule.placement, each.best.plan.num_microbatches), each)
    fastest = next(iter(on_best_cut.values())).best

    def order(each: SearchResult) -> tuple[bool, int, float, float]:
        best = each.best
        return best.is_asynchronous, best.plan.num_microbatches, best.num_instructions, best.peak_bytes

    simplest = min((each for each in on_best_cut.values() if fastest.is_close(each.best)), key=order)
    same_count = [each for each in on_best_cut.values() if order(each)[:2] == order(simplest)[:2]]
    taken, *others = sorted(same_count, key=order)
    for each in others:
        if each.best.score < taken.best.score and not each.best.is_close(taken.best):
            taken = each
    return taken if fastest.is_close(taken.best) else simplest
