"""The fastest way to run a step: how many microbatches under which schedule, as the simulator scores them.

Without a flush that is the time from one mini-batch to the next.

A way to run a step is tried on the stages of a cut graph: its schedule is lowered, verified and simulated,
once. The best plan is what is returned, with its plan and its programs.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product, takewhile

from pipec.compiler.alternatives import as_alternative
from pipec.compiler.memory_budget import fit_into_memory
from pipec.compiler.schedule_policy import Replicas, SchedulePolicy
from pipec.compiler.staged_graph import EvaluatedPlan, StagedGraph
from pipec.errors import InputError, PlanError
from pipec.hardware.topology import Topology, equal_devices
from pipec.ir import Alternative, Placement, RankMemory, Schedule, count_ranks
from pipec.ir.batch_split import split_sizes
from pipec.passes import Pass
from pipec.passes.assign_stages import Assign, AssignStages
from pipec.passes.assignments.choose_replicas import ChooseReplicas
from pipec.passes.assignments.cut_for_replicas import CutForReplicas
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.cut_with_recompute import CutWithRecompute
from pipec.passes.assignments.update_cost import UpdateCost
from pipec.plan.optimizer_cost import OptimizerProperties
from pipec.planner.cost_model import MAX_LOAD, PIPEC
from pipec.schedules.replicated import adjacent_pipelines, adjacent_replicas

CutGraph = Callable[[Pass], StagedGraph]
"""Runs every pass on a copy of the captured graph, which the given one cuts."""

_MEMORY_ATTEMPTS = 4
"""How often a cut is made anew until it fits into memory. An attempt knows what the one before lacked."""


_OF_OPERATORS = frozenset({"parameters", "buffers", "gradients", "saved"})
"""The kinds of memory that the planner adds up over operators."""

_OF_REPLAYING = frozenset({"received", "sent", "running"})
"""Those that it adds up, too, for stages that replay: then all memory is wanted."""

_OF_UPDATES = frozenset({"optimizer", "versions"})
"""Those that it adds up, too, where stages update after every mini-batch."""


@dataclass(frozen=True)
class TuningResult:
    """The best way to run a step, and all that was tried. ``base`` is its cut before any recomputing."""

    best: EvaluatedPlan
    base: StagedGraph
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Autotuner:
    """Tries the schedules of ``policy``.

    If ``may_recompute``, ranks that would need more memory than they have get stages that recompute, and if
    ``may_offload``, such that let values wait on the host. Replicas of a stage are next to each other, or far
    apart if the ranks of each pipeline are next to each other (``adjacent_pipelines``); unless it
    ``may_rearrange`` them, they stay where they are. In an asynchronous step, stages update with the
    ``optimizer``, on devices that move ``memory_bytes_per_second``.
    """

    policy: SchedulePolicy
    may_recompute: bool
    adjacent_pipelines: bool = False
    may_rearrange: bool = True
    optimizer: OptimizerProperties | None = None
    memory_bytes_per_second: float = math.inf
    may_offload: bool = False

    def choose(
        self,
        cut: CutGraph,
        topology: Topology,
        placements: Sequence[Placement],
        batch: int,
        counts: Sequence[int],
    ) -> TuningResult:
        """The best way to run steps of ``batch`` rows, on stages that are cut for it.

        ``counts`` are the numbers of microbatches on offer, the usual one first.

        Raises:
            InputError, InfeasibleError, PlanError: nothing could be tried, and why.
        """
        search = _Search(self, batch, counts)
        for placement in placements:
            search.try_cuts(cut, topology, placement)
        return search.result()

    def choose_on(
        self, staged: StagedGraph, placement: Placement, batch: int, counts: Sequence[int]
    ) -> TuningResult:
        """The best way to run steps of ``batch`` rows on stages that are cut. Raises as ``choose``."""
        search = _Search(self, batch, counts)
        search.try_schedules(staged, placement)
        return search.result()

    def choose_unequal_replicas(
        self, cut: CutGraph, topology: Topology, batch: int, counts: Sequence[int]
    ) -> list[tuple["Autotuner", TuningResult]]:
        """For each number of microbatches, the stages that the planner finds best for it, and who tries them.

        Without a flush the planner is asked several times, because its seconds are farther from what runs. A
        stage has few mini-batches in flight, which do not always hide messages: so it also plans for messages
        that nothing hides. And gradients are summed over all replicas of a stage, not level by level: so it
        also plans for one level. Plans of which all stages have as many replicas are left out, and those that
        cannot be tried.
        """
        joins, models = [topology], [PIPEC]
        if self.policy.is_asynchronous:
            joins, models = list(dict.fromkeys([topology, topology.single_level()])), [PIPEC, MAX_LOAD]
        found = []
        for count, joined, model in product(counts, joins, models):
            size = split_sizes(batch, count)[0]
            how = ChooseReplicas(joined, count, size, self.updates(count), model)
            with suppress(InputError, PlanError):
                found += self._planned(cut, how, batch)
        return found

    def _planned(
        self, cut: CutGraph, how: ChooseReplicas, batch: int
    ) -> list[tuple["Autotuner", TuningResult]]:
        """The first plan, or others that need less memory: what a rank lacks on one is set aside next."""
        count = how.num_microbatches
        sizes = split_sizes(batch, count)
        reserved = [0.0] * len(how.topology.devices)
        for _ in range(_MEMORY_ATTEMPTS):
            staged = cut(AssignStages(replace(how, topology=how.topology.with_reserved_memory(reserved))))
            replicas = staged.graph.assignment.replicas
            if len({*replicas}) == 1 or not all(map(staged.graph.is_valid_for, sizes)):
                return []
            tuner = self.with_replicas(replicas)
            choice = tuner.choose_on(staged, tuner.policy.placements([count])[0], batch, [count])
            if not any(choice.best.excess_bytes):
                break
            lacking = zip(reserved, choice.best.excess_bytes, choice.best.memory, strict=True)
            reserved = [max(held + excess, self.unplanned_bytes(need)) for held, excess, need in lacking]
        return [(tuner, choice)]

    def with_replicas(self, replicas: Replicas) -> "Autotuner":
        """The same on all ranks, with so many replicas of each stage, or of every one."""
        return replace(self, policy=self.policy.with_replicas(replicas), adjacent_pipelines=False)

    def for_next_steps(self, schedule: Schedule) -> "Autotuner":
        """The same for steps that come after one of that schedule."""
        return replace(self, policy=self.policy.for_next_steps(schedule))

    def replica_arrangements(self, topology: Topology) -> list["Autotuner"]:
        """The ways to put the replicas of stages on ranks that differ on these devices, this one first."""
        policy = self.policy
        if not self.may_rearrange:
            return [self]
        if len(set(topology.devices)) == 1 and sum(level.size > 1 for level in topology.levels) < 2:
            return [self]
        several = isinstance(policy.replicas, int) and policy.replicas > 1 and policy.num_ranks > 1
        return [self, replace(self, adjacent_pipelines=not self.adjacent_pipelines)] if several else [self]

    def replica_groups(self) -> Placement:
        """The ranks that act for each rank of a pipeline, where all stages have as many replicas."""
        assert isinstance(self.policy.replicas, int)
        arranged = adjacent_pipelines if self.adjacent_pipelines else adjacent_replicas
        return arranged(self.policy.num_ranks, self.policy.replicas)

    def fastest_cut(self, placement: Placement, topology: Topology, count: int, size: int) -> Pass:
        """The pass that cuts for the fastest step of so many microbatches, whatever memory it takes.

        Where a rank has several stages, all devices and links are taken to be alike.
        """
        updates = self.updates(count)
        if not isinstance(self.policy.replicas, int):
            return AssignStages(CutForReplicas(self.policy.replicas, size, updates))
        if not _is_straight(placement):
            devices = equal_devices(len(placement), topology.slowest_link)
            return self.for_replicas(CutStages(devices, size))
        devices = self.pipeline_topology(topology).without_memory_limits()
        return self.for_replicas(CutStages(devices, size, updates=updates))

    def updates(self, count: int) -> UpdateCost | None:
        """The updates after each mini-batch of so many microbatches; None where there is a flush."""
        if not (self.policy.may_be_asynchronous and self.optimizer):
            return None
        state, versions = self.optimizer.state_bytes or {}, self.policy.versions
        return UpdateCost(state, self.memory_bytes_per_second, versions, count)

    def pipeline_topology(self, topology: Topology) -> Topology:
        """What a pipeline runs on: a device for each group of ranks that act for one of its ranks."""
        return topology if self.policy.replicas == 1 else topology.grouped(self.replica_groups())

    def unplanned_bytes(self, need: RankMemory, planned: frozenset[str] = frozenset()) -> float:
        """What a rank holds at its peak of which the planner does not know. ``planned`` it knows as well."""
        updates = self.policy.may_be_asynchronous and self.optimizer is not None
        return need.excluding(planned | _OF_OPERATORS | (_OF_UPDATES if updates else frozenset()))

    def plans_recompute_on(self, devices: Topology) -> bool:
        """Whether cuts for these devices of a pipeline take into account what stages recompute.

        That is so if they may, and if the devices are alike.
        """
        return self.may_recompute and len({*devices.devices}) == 1 and len(devices.levels) == 1

    def for_replicas(self, assign: Assign) -> Pass:
        """The cut for a pipeline as that for all its replicas."""
        return AssignStages(assign, () if self.policy.replicas == 1 else self.replica_groups())

    def evaluate_within_memory(self, staged: StagedGraph, schedule: Schedule, size: int) -> EvaluatedPlan:
        """A schedule on these stages. Those that would not fit recompute, or offload, if they may."""
        evaluated = staged.evaluate(schedule, size)
        may_fit = self.may_recompute or self.may_offload
        return fit_into_memory(evaluated) if may_fit and any(evaluated.excess_bytes) else evaluated


def fastest_result(found: Sequence[tuple[Autotuner, TuningResult]]) -> tuple[Autotuner, TuningResult]:
    """The fastest choice that fits; of those about as fast, one with a flush, if there is one."""
    fastest = min((choice.best for _, choice in found), key=lambda evaluated: evaluated.score)

    def order(evaluated: EvaluatedPlan) -> tuple[bool, bool, tuple[float, float]]:
        return not fastest.is_close(evaluated), evaluated.is_asynchronous, evaluated.score

    return min(found, key=lambda each: order(each[1].best))


@dataclass
class _Search:
    """What has been tried for steps of ``batch`` rows: each evaluated plan with the cut it began from.

    ``first_error`` is the first reason why something could not be tried.
    """

    tuner: Autotuner
    batch: int
    counts: Sequence[int]
    evaluated: list[tuple[EvaluatedPlan, StagedGraph]] = field(default_factory=list)
    first_error: InputError | PlanError | None = None

    @functools.cached_property
    def sizes(self) -> Mapping[int, int]:
        """The rows of the first microbatch, by the number of microbatches."""
        return {count: split_sizes(self.batch, count)[0] for count in self.counts}

    def result(self) -> TuningResult:
        """The best plan of all. Raises ``first_error`` if nothing could be tried."""
        if not self.evaluated:
            assert self.first_error is not None, "nothing was tried, and nothing was in the way"
            raise self.first_error
        tried = tuple(as_alternative(evaluated) for evaluated, _ in self.evaluated)
        best, base = self._best()
        schedule, size = best.schedule, best.plan.microbatch_size
        work = functools.partial(base.workload, schedule.placement, size)
        searched = self.tuner.policy.searched_schedules(schedule, work)
        evaluated = [best, *(self.tuner.evaluate_within_memory(base, order, size) for order in searched)]
        fastest = min(evaluated, key=lambda evaluated: evaluated.score)
        return TuningResult(best if fastest.is_close(best) else fastest, base, tried)

    def try_cuts(self, cut: CutGraph, topology: Topology, placement: Placement) -> None:
        """Try the fastest cut and, unless the best schedule fits on it, cuts that need less memory."""
        first = self.sizes[self.counts[0]]
        try:
            fastest = self.tuner.fastest_cut(placement, topology, self.counts[0], first)
            nearest = self._nearest(cut(fastest), placement)
        except PlanError as error:
            self.first_error = self.first_error or error
            return
        replicas = self.tuner.policy.replicas
        if nearest and any(nearest.excess_bytes) and isinstance(replicas, int) and _is_straight(placement):
            for size in dict.fromkeys([first, min(self.sizes.values())]):
                self._try_cuts_within_memory(cut, topology, placement, size, nearest)

    def _try_cuts_within_memory(
        self, cut: CutGraph, topology: Topology, placement: Placement, size: int, nearest: EvaluatedPlan
    ) -> None:
        """Try cuts of which the planner finds that they fit.

        The planner adds up what operators hold. It does not know of what lives inside a phase function
        alone, nor of messages unless stages replay. So some memory is set aside: what the attempt before
        held of these, or lacked.
        """
        count = next(count for count in self.counts if self.sizes[count] == size)
        in_flight = self.tuner.policy.max_in_flight(count)
        updates = self.tuner.updates(count)
        devices, members = self.tuner.pipeline_topology(topology), self.tuner.replica_groups()
        replays = updates is None and self.tuner.plans_recompute_on(devices)
        planned = _OF_REPLAYING if replays else frozenset[str]()
        unplanned_bytes = functools.partial(self.tuner.unplanned_bytes, planned=planned)
        reserved = [max(unplanned_bytes(nearest.memory[rank]) for rank in group) for group in members]
        for _ in range(_MEMORY_ATTEMPTS):
            try:
                options = devices.with_reserved_memory(reserved), size, in_flight
                within = CutWithRecompute(*options) if replays else CutStages(*options, updates)
                found = self._nearest(cut(self.tuner.for_replicas(within)), placement, replays)
            except PlanError as error:
                self.first_error = self.first_error or error
                return
            if found is None or not any(found.excess_bytes):
                return
            besides = [0.0 if replays else unplanned_bytes(need) for need in found.memory]
            reserved = [
                max(max(held + found.excess_bytes[rank], besides[rank]) for rank in group)
                for group, held in zip(members, reserved, strict=True)
            ]

    def _nearest(
        self, staged: StagedGraph, placement: Placement, replays: bool = False
    ) -> EvaluatedPlan | None:
        """Try schedules; returns the evaluated plan that comes nearest to fitting, if any.

        It is one without recompute, unless the graph is cut for stages that replay.
        """
        tried = self.try_schedules(staged, placement)
        if not replays:
            tried = [
                staged.evaluate(evaluated.schedule, evaluated.plan.microbatch_size) for evaluated in tried
            ]
        return min(tried, key=lambda evaluated: evaluated.score, default=None)

    def try_schedules(self, staged: StagedGraph, placement: Placement) -> list[EvaluatedPlan]:
        """Try every allowed schedule with each number of microbatches; returns the evaluated plans.

        A graph may serve only some sizes of microbatch. A number of microbatches is then passed over, unless
        it is the only one: the microbatches are tried that the graph serves from the first one on.
        """
        before = len(self.evaluated)
        for count in self.counts:
            sizes = split_sizes(self.batch, count)
            served = len(list(takewhile(staged.graph.is_valid_for, sizes)))
            if served == count or (served and len(self.counts) == 1):
                for schedule in self._schedules(staged, placement, served, sizes[0]):
                    self.evaluated.append(
                        (self.tuner.evaluate_within_memory(staged, schedule, sizes[0]), staged)
                    )
        return [evaluated for evaluated, _ in self.evaluated[before:]]

    def _schedules(
        self, staged: StagedGraph, placement: Placement, count: int, size: int
    ) -> Sequence[Schedule]:
        work = functools.partial(staged.workload, placement, size)
        try:
            return self.tuner.policy.candidate_schedules(count, placement, work)
        except (InputError, PlanError) as error:
            self.first_error = self.first_error or error
            return []

    def _best(self) -> tuple[EvaluatedPlan, StagedGraph]:
        """The fastest that fits; of those about as fast, the simplest.

        It has the fewest and largest microbatches, for them the fewest instructions, and of those with as
        many it needs the least memory. Only what is faster is taken without a flush. Of several cuts for a
        schedule, only the fastest counts.

        What is about as fast as the fastest may still gain too little over what is simpler and is not. So of
        all schedules for these microbatches, a simpler one is given up only for one that is clearly faster::

            1f1b 57.6 ms, zb-h1 55.6 ms, zb-h2 54.0 ms     ->     zb-h2, the only one to gain more than
                                                           PREDICTION_TOLERANCE
        """
        on_best_cut: dict[object, tuple[EvaluatedPlan, StagedGraph]] = {}
        for pair in sorted(self.evaluated, key=lambda pair: pair[0].score):
            how = pair[0].schedule
            on_best_cut.setdefault((how.name, how.placement, pair[0].plan.num_microbatches), pair)
        fastest, _ = next(iter(on_best_cut.values()))
        as_fast = [pair for pair in on_best_cut.values() if fastest.is_close(pair[0])]

        def order(evaluated: EvaluatedPlan) -> tuple[bool, int, float, float]:
            return (
                evaluated.is_asynchronous,
                evaluated.plan.num_microbatches,
                evaluated.num_instructions,
                evaluated.peak_bytes,
            )

        simplest = min(as_fast, key=lambda pair: order(pair[0]))
        alike = [pair for pair in on_best_cut.values() if order(pair[0])[:2] == order(simplest[0])[:2]]
        taken, *others = sorted(alike, key=lambda pair: order(pair[0]))
        for pair in others:
            if pair[0].score < taken[0].score and not pair[0].is_close(taken[0]):
                taken = pair
        return taken if fastest.is_close(taken[0]) else simplest


def _is_straight(placement: Placement) -> bool:
    """Whether every rank has one stage, in order."""
    return [rank for ranks in placement for rank in ranks] == list(range(count_ranks(placement)))
