"""Searches the fastest schedule and number of microbatches of a step, as the simulator predicts them.

The score of an asynchronous schedule is the time from one mini-batch to the next.

A candidate is tried on the stages of a cut graph: each of its schedules is lowered, verified and simulated
once. The result is the best plan, with its programs.

First the usual number of microbatches is tried: on all placements of the schedules that are allowed, and with
all numbers of replicas if these are open. For what else there is, on the best placement first, there is a
budget: ``search_budget``. Until something fits into memory, all is tried that might. Then schedules that must
recompute or offload to fit are tried only if they would be faster without, the fastest first.
"""

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import product, takewhile

import numpy as np

from pipec.compiler.alternatives import as_alternative
from pipec.compiler.batch_equivalence import has_model_collectives
from pipec.compiler.candidate import Candidate, is_straight, sharding_levels
from pipec.compiler.memory_budget import fit_into_memory
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.search_budget import SearchBudget
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE, EvaluatedPlan, StagedGraph, UncutGraph
from pipec.errors import InputError, PlanError
from pipec.graph import TrainingGraph
from pipec.ir import Alternative, Placement, Plan, Program, Schedule
from pipec.ir.batch_split import split_sizes
from pipec.passes import Observer, Pass
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.choose_replicas import ChooseReplicas
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.cut_with_recompute import CutWithRecompute
from pipec.passes.mark_recompute import MarkRecompute
from pipec.planner.cost_model import MAX_LOAD, PIPEC
from pipec.programs.rank_memory import memory_by_category
from pipec.programs.tail_order import has_two_forwards

log = logging.getLogger("pipec")

_MEMORY_ATTEMPTS = 4
"""How many cuts are tried until one fits into memory. Each attempt reserves what the last one lacked."""

_MODEL_STATES = frozenset({"parameters", "buffers", "gradients", "optimizer", "versions"})
"""The kinds of memory that neither recomputing nor offloading frees."""

_OF_REPLAYING = frozenset({"received", "sent", "running"})
"""The kinds of memory that the planner also sums for stages that recompute; all memory is counted then."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step of ``batch`` rows on a captured graph. ``observers`` are called after every pass.

    ``known`` is the graph cut as decided, if an earlier call was compiled on it. Without ``budget``, all that
    may be tried is tried.
    """

    graph: TrainingGraph
    batch: int
    observers: Sequence[Observer] = ()
    known: StagedGraph | None = None
    budget: SearchBudget | None = None

    def cut(self, how: Pass, options: CompilerOptions) -> StagedGraph:
        """The graph after all passes; ``how`` is the pass that assigns stages. Placements may share it."""
        for known_how, known_options, staged in self._cuts:
            if (how, options) == (known_how, known_options):
                return staged
        staged = StagedGraph(self.graph, how, options, observers=self.observers, uncut=self._uncut)
        self._cuts.append((how, options, staged))
        return staged

    def may_cut(self, found: Sequence[EvaluatedPlan], may_be_chosen: bool = True) -> bool:
        """Whether to try another cut, after these plans; until one fits, only if it ``may_be_chosen``."""
        if not any(map(_fits, found)):
            return may_be_chosen
        return self.budget is None or self.budget.takes_cut()

    @functools.cached_property
    def _uncut(self) -> UncutGraph:
        return UncutGraph(self.graph)

    @functools.cached_property
    def _cuts(self) -> list[tuple[Pass, CompilerOptions, StagedGraph]]:
        return []

    def cut_as_decided(self, candidate: Candidate) -> StagedGraph:
        """The graph with the stages of an earlier call. A profile would be of that call's graph: unused."""
        assert candidate.cut is not None
        return self.known or self.cut(AssignStages(candidate.cut), replace(candidate.options, profile=None))


@dataclass(frozen=True)
class SearchResult:
    """The best plan of a step, the candidate it belongs to, and all plans that were tried.

    ``base`` is the cut graph before recompute is marked.
    """

    candidate: Candidate
    best: EvaluatedPlan
    base: StagedGraph
    alternatives: tuple[Alternative, ...]

    @property
    def key(self) -> tuple[StagedGraph, int, int]:
        """The cut graph, the number of microbatches, and the rows of the first."""
        return self.base, self.best.plan.num_microbatches, self.best.plan.microbatch_size


def search(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best of all candidates that ``candidate`` leaves to the search, on stages that are cut for it.

    Raises:
        InputError, InfeasibleError, PlanError: nothing could be tried, and why.
    """
    budget = SearchBudget.of(step.graph)
    found = search_within(budget, step, candidate)
    if budget.num_skipped:
        log.info(
            "%d plans were not tried: besides the plans that are always tried, a search takes a tenth of the "
            "work of the capture, and half of it more where memory is short; to leave fewer, fix "
            "microbatches=..., schedule=... or replicas=...",
            budget.num_skipped,
        )
    return found


def search_within(budget: SearchBudget, step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The result of a search with this budget. Raises as ``search``."""
    found, step = [], replace(step, budget=budget)
    for each in sharding_levels(candidate):
        shard = each.options.sync_spec.shard if candidate.tunes_shard else None
        with suppress(InputError) if shard else nullcontext():  # a level that the plan cannot have
            if each.cut is None:
                found.append(_gathering_by_layers(step, _with_best_replicas(step, each)))
            else:
                found.append(_on_decided_stages(step, each))
    return min(found, key=lambda result: result.best.score)


def _on_decided_stages(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best schedule on the stages of an earlier call."""
    staged = step.cut_as_decided(candidate)
    return evaluate_stages(staged, candidate, step.batch, candidate.counts(step.batch))


def _gathering_by_layers(step: CapturedStep, whole: SearchResult) -> SearchResult:
    """The result, or one that gathers less at a time: if it fits where ``whole`` does not, if it is faster,
    or if it takes less memory and about the same time.

    Pipelines of several ranks are divided only if no other schedule that ``auto`` may take fits.
    """
    policy, lacks = whole.candidate.policy, any(whole.best.excess_bytes)
    if policy.num_ranks > 1 and not (policy.source == "auto" and lacks):
        return whole
    for found in _divided(step, whole.candidate):
        best, other = found.best, whole.best
        gains = best.score < other.score or (other.is_close(best) and best.peak_bytes < other.peak_bytes)
        tried = (*found.alternatives, *whole.alternatives)
        return replace(found, alternatives=tried) if gains else whole
    return whole


def fitting_division(step: CapturedStep, candidate: Candidate) -> str:
    """The schedule that fits into memory because it gathers sharded parameters by fewer layers; or ""."""
    fitting = (found for found in _divided(step, candidate) if not any(found.best.excess_bytes))
    return next((found.best.schedule.name for found in fitting), "")


def _divided(step: CapturedStep, candidate: Candidate) -> Iterator[SearchResult]:
    """The possible results that gather sharded parameters by groups of layers, the smallest groups first."""
    for each in candidate.gathering_by_layers():
        with suppress(InputError, PlanError):
            yield _best_arranged(step, each)


def _with_best_replicas(step: CapturedStep, candidate: Candidate) -> SearchResult:
    """The best candidate with this level of sharding.

    Tries every number of replicas that divides the ranks and, for schedules that run stages with different
    numbers of replicas, the numbers that the planner chooses. If only the number of microbatches is open,
    replicas are tried too, so that the plan can report what they would gain. A graph with model collectives
    is valid for its own number of replicas alone.
    """
    found, others, first_error = list[SearchResult](), list[SearchResult](), None
    try:
        found.append(_best_arranged(step, candidate))
    except PlanError as error:
        if not candidate.tunes_replicas:
            raise
        first_error = error
    is_open = candidate.tunes_replicas or not candidate.num_microbatches
    if candidate.dynamic and is_open and not has_model_collectives(step.graph):
        for replicas in candidate.policy.other_replica_counts():
            if candidate.tunes_replicas or step.may_cut([each.best for each in [*found, *others]], False):
                with suppress(InputError, PlanError):
                    others.append(_best_arranged(step, candidate.with_replicas(replicas), False))
        for policy in candidate.policy.with_unequal_replicas():
            others += _with_unequal_replicas(step, replace(candidate, policy=policy), [*found, *others])
    if first_error and not others:
        raise first_error
    chosen = fastest_result([*found, *others]) if candidate.tunes_replicas else found[0]
    every = [chosen, *(each for each in [*found, *others] if each is not chosen)]
    return replace(chosen, alternatives=tuple(other for each in every for other in each.alternatives))


def _best_arranged(step: CapturedStep, candidate: Candidate, every_placement: bool = True) -> SearchResult:
    """The best of all arrangements of replicas on ranks; ``every_placement`` as for ``evaluate_cuts``."""
    arrangements = candidate.replica_arrangements()
    return fastest_result([evaluate_cuts(step, each, every_placement) for each in arrangements])


def evaluate_cuts(step: CapturedStep, candidate: Candidate, every_placement: bool = True) -> SearchResult:
    """The best schedule of a candidate, on the best of the cuts that the planner makes for it.

    Without ``every_placement``, placements after the first are tried only if work for them is left.

    Raises:
        InputError, InfeasibleError, PlanError: nothing could be tried, and why.
    """
    tried, cuts = _Search(candidate, step.batch, candidate.counts(step.batch), step.budget), []
    for placement in candidate.policy.placements(tried.counts):
        is_tried = every_placement or step.may_cut([evaluated for evaluated, _ in tried.evaluated])
        if is_tried and (staged := tried.fastest_cut(step, placement)):
            cuts.append((placement, staged))
            tried.try_schedules(staged, placement, tried.counts[:1])
    for placement, staged in sorted(cuts, key=lambda cut: tried.best_score(*cut)):
        tried.try_schedules(staged, placement, tried.counts[1:])
        tried.try_cuts_within_memory(step, placement, staged)
    return tried.result()


def evaluate_stages(
    staged: StagedGraph, candidate: Candidate, batch: int, counts: Sequence[int]
) -> SearchResult:
    """The best schedule of a candidate on stages that are cut. Raises as ``evaluate_cuts``."""
    placement = candidate.placement or candidate.policy.placements(counts)[0]
    tried = _Search(candidate, batch, counts)
    tried.try_schedules(staged, placement, counts)
    return tried.result()


def _with_unequal_replicas(
    step: CapturedStep, candidate: Candidate, before: Sequence[SearchResult]
) -> list[SearchResult]:
    """The best schedule for each number of microbatches, with the replicas that the planner gives stages.

    For asynchronous schedules the planner makes several plans, because its predictions are less accurate: few
    mini-batches are in flight, so that messages are not always hidden, and it also plans for messages that
    are never hidden; gradients are reduced over all replicas of a stage at once, not level by level, and it
    also plans for one level. Plans with equally many replicas on all stages are omitted, and plans that
    cannot be tried.
    """
    topology = candidate.options.topology
    topologies, models = [topology], [PIPEC]
    if candidate.policy.is_asynchronous:
        topologies, models = list(dict.fromkeys([topology, topology.single_level()])), [PIPEC, MAX_LOAD]
    found = list[SearchResult]()
    for count, planned_for, model in product(candidate.counts(step.batch), topologies, models):
        size = split_sizes(step.batch, count)[0]
        how = ChooseReplicas(planned_for, count, size, candidate.updates(count), model)
        is_first = candidate.tunes_replicas and not found
        if is_first or step.may_cut([each.best for each in [*before, *found]], candidate.tunes_replicas):
            with suppress(InputError, PlanError):
                found += _planned(step, candidate, how)
    return found


def _planned(step: CapturedStep, candidate: Candidate, how: ChooseReplicas) -> list[SearchResult]:
    """The planner's first plan that fits: each attempt reserves the memory that the last one lacked."""
    count = how.num_microbatches
    sizes = split_sizes(step.batch, count)
    reserved = [0.0] * len(how.topology.devices)
    for _ in range(_MEMORY_ATTEMPTS):
        devices = how.topology.with_reserved_memory(reserved)
        staged = step.cut(AssignStages(replace(how, topology=devices)), candidate.options)
        replicas = staged.graph.assignment.replicas
        if len({*replicas}) == 1 or not all(map(staged.graph.is_valid_for, sizes)):
            return []
        found = evaluate_stages(staged, candidate.with_replicas(replicas), step.batch, [count])
        if not any(found.best.excess_bytes):
            break
        lacking = zip(reserved, found.best.excess_bytes, found.best.memory, strict=True)
        reserved = [max(old + excess, candidate.unplanned_bytes(need)) for old, excess, need in lacking]
    return [found]


def fastest_result(found: Sequence[SearchResult]) -> SearchResult:
    """The fastest result that fits; an asynchronous one only if no synchronous one is about as fast."""
    fastest = min((each.best for each in found), key=lambda evaluated: evaluated.score)

    def order(evaluated: EvaluatedPlan) -> tuple[bool, bool, tuple[float, float]]:
        return not fastest.is_close(evaluated), evaluated.is_asynchronous, evaluated.score

    return min(found, key=lambda each: order(each.best))


@dataclass
class _Search:
    """The plans tried for steps of ``batch`` rows, each with its cut graph before recompute is marked.

    ``counts`` are numbers of microbatches, the usual one first. ``first_error`` is the first reason why a
    plan could not be tried.
    """

    candidate: Candidate
    batch: int
    counts: Sequence[int]
    budget: SearchBudget | None = None
    evaluated: list[tuple[EvaluatedPlan, StagedGraph]] = field(default_factory=list)
    first_error: InputError | PlanError | None = None

    @functools.cached_property
    def sizes(self) -> Mapping[int, int]:
        """The rows of the first microbatch, by the number of microbatches."""
        return {count: split_sizes(self.batch, count)[0] for count in self.counts}

    def result(self) -> SearchResult:
        """The best plan of all. Raises ``first_error`` if nothing could be tried."""
        if not self.evaluated:
            assert self.first_error is not None, "no plan was tried, and no error says why"
            raise self.first_error
        tried = tuple(as_alternative(evaluated) for evaluated, _ in self.evaluated)
        best, base = best_evaluated(self.evaluated)
        schedule, size = best.schedule, best.plan.microbatch_size
        work = functools.partial(base.workload, schedule.placement, size)
        searched = self.candidate.policy.searched_schedules(schedule, work)
        orders = [order for each in searched for order in base.orders_for_tail(each)]
        others = (self._within_memory(_following_checkpoints(base, order, size)) for order in orders)
        fastest = min([best, *filter(None, others)], key=lambda evaluated: evaluated.score)
        return SearchResult(self.candidate, best if fastest.is_close(best) else fastest, base, tried)

    def fastest_cut(self, step: CapturedStep, placement: Placement) -> StagedGraph | None:
        """The fastest cut for the usual number of microbatches; None if the planner fails."""
        count = self.counts[0]
        try:
            return step.cut(
                self.candidate.fastest_cut(placement, count, self.sizes[count]), self.candidate.options
            )
        except PlanError as error:
            self.first_error = self.first_error or error
            return None

    def best_score(self, placement: Placement, staged: StagedGraph) -> tuple[float, float]:
        """The score of the best plan that was evaluated on these stages, so placed."""
        scores = (evaluated.score for evaluated in self._evaluated(placement, staged))
        return min(scores, default=(math.inf, math.inf))

    def _evaluated(self, placement: Placement, staged: StagedGraph) -> list[EvaluatedPlan]:
        """The plans that were evaluated on these stages, so placed."""
        return [each for each, on in self.evaluated if on is staged and each.schedule.placement == placement]

    def try_cuts_within_memory(self, step: CapturedStep, placement: Placement, staged: StagedGraph) -> None:
        """Unless the best schedule fits on the fastest cut, ``staged``, try cuts that need less memory."""
        first, replicas = self.sizes[self.counts[0]], self.candidate.policy.replicas
        nearest = self._nearest(placement, staged)
        if nearest and any(nearest.excess_bytes) and isinstance(replicas, int) and is_straight(placement):
            for size in dict.fromkeys([first, min(self.sizes.values())]):
                self._try_cuts_of_size_within_memory(step, placement, size, nearest)

    def _try_cuts_of_size_within_memory(
        self, step: CapturedStep, placement: Placement, size: int, nearest: EvaluatedPlan
    ) -> None:
        """Try cuts that fit into memory by the planner's account.

        The planner sums what operators hold. It does not know of temporary values inside a phase function,
        nor, unless stages recompute, of messages. So the memory that these took in the last attempt, or that
        it lacked, is reserved.
        """
        candidate, count = self.candidate, next(count for count in self.counts if self.sizes[count] == size)
        in_flight = candidate.policy.max_in_flight(count)
        if nearest.staged.waits_for_tail and not has_two_forwards(nearest.schedule):
            in_flight = tuple(-(-count // max(map(len, placement))) for _ in in_flight)
        updates = candidate.updates(count)
        devices, members = candidate.pipeline_topology(), candidate.replica_groups()
        replays = updates is None and candidate.plans_recompute_on(devices)
        planned = _OF_REPLAYING if replays else frozenset[str]()
        unplanned_bytes = functools.partial(candidate.unplanned_bytes, planned=planned)
        reserved = [max(unplanned_bytes(nearest.memory[rank]) for rank in group) for group in members]
        for _ in range(_MEMORY_ATTEMPTS):
            fits = any(_fits(evaluated) for evaluated, _ in self.evaluated)
            if fits and self.budget and not self.budget.takes_cut_within_memory():
                return
            try:
                within = devices.with_reserved_memory(reserved)
                cut = (
                    CutWithRecompute(within, size, in_flight)
                    if replays
                    else CutStages(within, size, in_flight, updates)
                )
                shared = candidate.for_replicas(cut)
                staged = step.cut(shared, candidate.options)
                self.try_schedules(staged, placement, self.counts)
                found = self._nearest(placement, staged, replays)
            except PlanError as error:
                self.first_error = self.first_error or error
                return
            if found is None or not any(found.excess_bytes):
                return
            unplanned = [0.0 if replays else unplanned_bytes(need) for need in found.memory]
            reserved = [
                max(max(old + found.excess_bytes[rank], unplanned[rank]) for rank in group)
                for group, old in zip(members, reserved, strict=True)
            ]

    def _nearest(
        self, placement: Placement, staged: StagedGraph, replays: bool = False
    ) -> EvaluatedPlan | None:
        """The plan that was evaluated on these stages and lacks least memory, if any.

        It is a plan without recompute, unless the graph is cut for stages that recompute.
        """
        tried = self._evaluated(placement, staged)
        if not replays:
            tried = [
                staged.evaluate(evaluated.schedule, evaluated.plan.microbatch_size) for evaluated in tried
            ]
        return min(tried, key=lambda evaluated: evaluated.score, default=None)

    def try_schedules(self, staged: StagedGraph, placement: Placement, counts: Sequence[int]) -> None:
        """Try every allowed schedule with each of these numbers of microbatches.

        A graph may be valid for some sizes of microbatch alone. A number of microbatches with other sizes is
        then skipped or, if it is the only one, tried with the leading microbatches of valid sizes.
        """
        for count in sorted(counts, key=lambda count: abs(math.log(count / self.counts[0]))):
            sizes = split_sizes(self.batch, count)
            num_valid = len(list(takewhile(staged.graph.is_valid_for, sizes)))
            if num_valid == count or (num_valid and len(self.counts) == 1):
                schedules = self._schedules(staged, placement, num_valid, sizes[0])
                assert {each.placement for each in schedules} <= {placement}, "cuts are told apart by it"
                lacking = []
                for schedule in schedules:
                    if self._may_evaluate(staged, schedule):
                        evaluated = _following_checkpoints(staged, schedule, sizes[0])
                        if _fits(evaluated):
                            self.evaluated.append((evaluated, staged))
                        else:
                            lacking.append(evaluated)
                for evaluated in sorted(lacking, key=lambda each: each.seconds):
                    if within := self._within_memory(evaluated):
                        self.evaluated.append((within, staged))

    def _within_memory(self, evaluated: EvaluatedPlan) -> EvaluatedPlan | None:
        """The plan, or if it lacks memory, one that recomputes or offloads; None if that is not worth trying.

        What it recomputes takes time. So if it would be slower than a plan that fits even without, it is not
        worth it.
        """
        if _fits(evaluated) or not _may_fit(evaluated):
            return evaluated
        fastest = min((each.seconds for each, _ in self.evaluated if _fits(each)), default=math.inf)
        fits = fastest < math.inf
        if evaluated.seconds > (1 + PREDICTION_TOLERANCE) * fastest:
            return None
        if self.budget and not self.budget.takes_fit(_num_computes(evaluated.schedule), fits):
            return None if fits else evaluated
        within = fit_into_memory(evaluated, looks_for_nearest=not fits)
        return within if _fits(within) or not fits else None

    def _may_evaluate(self, staged: StagedGraph, schedule: Schedule) -> bool:
        """Whether to evaluate a schedule: always for the usual number of microbatches, or until one fits."""
        if self.budget is None:
            return True
        is_new = not any(
            on is staged and known.plan.num_microbatches == schedule.num_microbatches
            for known, on in self.evaluated
        )
        is_usual = schedule.num_microbatches == self.counts[0]
        fits = any(_fits(evaluated) for evaluated, _ in self.evaluated)
        return is_usual or not fits or self.budget.takes_plan(_num_computes(schedule), is_new)

    def _schedules(
        self, staged: StagedGraph, placement: Placement, count: int, size: int
    ) -> Sequence[Schedule]:
        work = functools.partial(staged.workload, placement, size)
        try:
            schedules = self.candidate.policy.candidate_schedules(count, placement, work)
            return [order for each in schedules for order in staged.orders_for_tail(each)]
        except (InputError, PlanError) as error:
            self.first_error = self.first_error or error
            return []


def _fits(evaluated: EvaluatedPlan) -> bool:
    return not any(evaluated.excess_bytes)


def _may_fit(evaluated: EvaluatedPlan) -> bool:
    """Whether recomputing or offloading may be all that a plan lacks.

    It may not if model states alone take more than the limit. If they are sharded, what is gathered and
    reduced at once depends on the times of backwards, and so on what is recomputed.
    """
    if not _may_free(evaluated) or evaluated.plan.sync_spec.shard:
        return _may_free(evaluated)
    return all(
        _model_state_bytes(evaluated.plan, each) <= evaluated.memory_limit(each.rank)
        for each in evaluated.programs
    )


def _model_state_bytes(plan: Plan, program: Program) -> float:
    """The most bytes that weights, gradients and the optimizer's state take at once on a program's rank."""
    by_category, _ = memory_by_category(plan, program)
    running = [amounts for kind, (_, amounts, _) in by_category.items() if kind in _MODEL_STATES]
    return float(np.max(sum(running), initial=0.0))


def _may_free(evaluated: EvaluatedPlan) -> bool:
    options = evaluated.staged.options
    return options.recompute == "auto" or options.may_offload


def nearest_plan(best: EvaluatedPlan) -> EvaluatedPlan:
    """The best plan of a search in which none fits, with what is recomputed so that it lacks least memory."""
    return fit_into_memory(best) if _may_free(best) and not _may_fit(best) else best


def _num_computes(schedule: Schedule) -> int:
    return sum(map(len, schedule.orders))


def evaluate_within_memory(staged: StagedGraph, schedule: Schedule, size: int) -> EvaluatedPlan:
    """A schedule on these stages; ranks that lack memory recompute or offload, if the options allow it."""
    evaluated = _following_checkpoints(staged, schedule, size)
    return evaluated if _fits(evaluated) or not _may_fit(evaluated) else fit_into_memory(evaluated)


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


def best_evaluated(
    evaluated: Sequence[tuple[EvaluatedPlan, StagedGraph]],
) -> tuple[EvaluatedPlan, StagedGraph]:
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
    on_best_cut: dict[object, tuple[EvaluatedPlan, StagedGraph]] = {}
    for pair in sorted(evaluated, key=lambda pair: pair[0].score):
        how = pair[0].schedule
        on_best_cut.setdefault((how.name, how.placement, pair[0].plan.num_microbatches), pair)
    fastest, _ = next(iter(on_best_cut.values()))
    as_fast = [pair for pair in on_best_cut.values() if fastest.is_close(pair[0])]

    def order(each: EvaluatedPlan) -> tuple[bool, int, float, float]:
        return each.is_asynchronous, each.plan.num_microbatches, each.num_instructions, each.peak_bytes

    simplest = min(as_fast, key=lambda pair: order(pair[0]))
    same_count = [pair for pair in on_best_cut.values() if order(pair[0])[:2] == order(simplest[0])[:2]]
    taken, *others = sorted(same_count, key=lambda pair: order(pair[0]))
    for pair in others:
        if pair[0].score < taken[0].score and not pair[0].is_close(taken[0]):
            taken = pair
    return taken if fastest.is_close(taken[0]) else simplest
