"""A captured graph cut into stages, and everything derived from it: functions, plans, programs and code."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipec.artifact.artifact import Artifact
from pipec.codegen.names import name_nodes
from pipec.codegen.stage_header import stage_header
from pipec.codegen.stage_source import StageSource
from pipec.compiler import pass_list
from pipec.compiler.batch_equivalence import (
    refuse_replica_state,
    refuse_tied_weights,
    require_full_rounds,
)
from pipec.compiler.pass_list import NO_OFFLOAD, CompilerOptions
from pipec.errors import PipecError
from pipec.graph import TailGradient, TrainingGraph
from pipec.graph.phase_functions import StageFunctions, stage_functions
from pipec.ir import (
    Mode,
    Payload,
    Phase,
    Plan,
    Program,
    RankMemory,
    RepresentativeRanks,
    Schedule,
    SyncSpec,
)
from pipec.ir.columns import PHASE_CODE, ComputeColumns
from pipec.ir.text_format import value_bytes
from pipec.passes import Observer, Pass, run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute, checkpointed_values, stage_values
from pipec.passes.pass_dump import requested_pass_dumps
from pipec.plan.buckets import segment_backwards
from pipec.plan.build_plan import Names, build_plan, with_host_memory
from pipec.plan.optimizer_cost import with_training_state, with_update_costs
from pipec.plan.predictions import plan_memory, simulate_plan, step_seconds
from pipec.planner.recompute_solver import ForwardValue
from pipec.programs.lower import lower
from pipec.programs.lower_periodic import lower_periodic
from pipec.programs.rank_memory import NUM_SENDS_IN_TRANSIT
from pipec.programs.representative_replicas import representative_programs
from pipec.programs.shared_receives import runs_stages_in_order
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify, verify_parts
from pipec.schedules import Workload, remap_ranks

T = TypeVar("T")

NO_RECOMPUTE = MarkRecompute()

PREDICTION_TOLERANCE = 0.05
"""Relative error of predicted step times. Plans whose times differ by less count as equally fast."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A plan for a step with its verified programs and their predicted time and memory.

    ``schedule`` is the requested one; the plan's placement maps its ranks to ranks of the topology. Of many
    equal replicas, ``programs`` are those of one of each kind.
    ``stages`` are the functions that the programs call. ``excess_bytes[rank]`` is the memory that a rank
    needs beyond what its device has.
    """

    staged: "StagedGraph"
    schedule: Schedule
    stages: Sequence[StageFunctions]
    plan: Plan
    programs: Sequence[Program]
    seconds: float
    memory: Sequence[RankMemory]
    excess_bytes: Sequence[float]

    @property
    def peak_bytes(self) -> float:
        return max(need.peak_bytes for need in self.memory)

    @property
    def score(self) -> tuple[float, float]:
        """Lower is better: first the bytes that do not fit into memory, then the predicted seconds."""
        return max(self.excess_bytes), self.seconds

    @property
    def num_instructions(self) -> float:
        """The most instructions that a rank has in a step, or in a mini-batch of an asynchronous schedule."""
        count = self.plan.num_microbatches
        return max(len(each.instructions) * count / (each.period or count) for each in self.programs)

    def is_close(self, other: "EvaluatedPlan") -> bool:
        """Whether ``other`` lacks no more memory and is not slower beyond the prediction's tolerance."""
        (lacks, seconds), (other_lacks, other_seconds) = self.score, other.score
        return other_lacks <= lacks and other_seconds <= seconds * (1 + PREDICTION_TOLERANCE)

    def program(self, rank: int) -> Program:
        """The program of a rank, or of the one that represents it."""
        few = RepresentativeRanks.of(self.plan.placement, [each.rank for each in self.programs])
        if few is None:
            return self.programs[rank]
        return next(each for each in self.programs if each.rank == few.represented_by[rank])

    def memory_limit(self, rank: int) -> float:
        """The memory of a rank's device, in bytes."""
        return self.staged.options.topology.devices[rank].memory_bytes

    @property
    def is_asynchronous(self) -> bool:
        """Whether the next step begins before this one ends."""
        return self.schedule.stream is not None

    def artifact(self) -> Artifact:
        """The plan, the programs and the code of the stages. Constants are copied to the host."""
        if len(self.programs) == self.plan.num_ranks:
            verify_parts(self.plan, self.programs)
        names, graph = self.staged.names, self.staged.graph
        sent: dict[int, set[str]] = defaultdict(set)
        for link in self.plan.links:
            if link.payload.per_microbatch:
                sent[link.source] |= {*link.names}
        titles = [stage_header(stage, self.plan) for stage in self.plan.stages]
        sources = tuple(
            StageSource.of(graph, functions, names, title, sent[functions.index]).write()
            for functions, title in zip(self.stages, titles, strict=True)
        )
        constants = {name: x if x.is_meta else x.cpu() for name, x in graph.constants.items()}
        return Artifact(
            self.plan,
            sources,
            self.programs,
            constants,
            self.staged.options.recorded,
            functools.partial(_every_program, self.staged.ordered(self.schedule), self.plan),
        )


class StagedGraph:
    """A copy of a captured graph after all passes, immutable from then on.

    ``prepared`` is the graph before the cut, of which there may be several, if another one has made it.
    Schedules may be for any ranks; they are mapped to the ranks that the graph was cut for. Everything
    derived from the graph is cached here, and nowhere else.
    """

    def __init__(
        self,
        captured: TrainingGraph,
        cut: Pass,
        options: CompilerOptions,
        recompute: MarkRecompute = NO_RECOMPUTE,
        offload: MarkOffload = NO_OFFLOAD,
        observers: Sequence[Observer] = (),
        prepared: TrainingGraph | None = None,
    ) -> None:
        self.options = options
        self._dumps = requested_pass_dumps()
        self.captured, self._observers = captured, observers
        self._known: dict[tuple[object, ...], Any] = {}
        passes = pass_list.make_passes(options, cut, recompute, offload)
        first = passes.index(cut)
        observers = (*observers, *self._dumps)
        try:
            if prepared is None or self._dumps:  # each graph has dumps of all passes
                prepared = run_passes(captured, passes[:first], observers)
            self.prepared: TrainingGraph | None = prepared
            self.graph = run_passes(prepared, passes[first:], observers, first)
        except PipecError:
            self.write_dumps()
            raise

    def write_dumps(self) -> None:
        """Write the graph after each pass, if the environment requests it."""
        for dump in self._dumps:
            dump.write()

    def with_recompute(self, recompute: MarkRecompute, offload: MarkOffload = NO_OFFLOAD) -> "StagedGraph":
        """The same cut, with these values recomputed and offloaded."""
        cut, how = AssignStages(self.graph.assignment), (recompute, offload)
        return self._once(
            ("variant", *how),
            lambda: StagedGraph(self.captured, cut, self.options, *how, self._observers, self.prepared),
        )

    def forward_values(self, size: int) -> Sequence[Mapping[str, ForwardValue]]:
        """For each stage, the forward values that may be saved or recomputed, by name, for ``size`` rows."""
        return self._once(("values", size), lambda: stage_values(self.graph, size))

    def clear_evaluated(self) -> None:
        """Drop the plans and programs that were tried on these stages, and the graph before the cut."""
        self.prepared = None
        self._known = {key: x for key, x in self._known.items() if key[0] not in ("evaluated", "plan")}
        for (kind, *_), known in self._known.items():
            if kind == "variant":
                known.clear_evaluated()

    def evaluate(
        self, schedule: Schedule, microbatch_size: int, sync_spec: SyncSpec | None = None
    ) -> EvaluatedPlan:
        """The schedule on these stages, lowered, verified and simulated; the result is cached.

        Schedules are identified by name, placement and number of microbatches. ``sync_spec`` defaults to that
        of the options. Gradients that replicas shard are reduced once a step if this fits into the memory of
        the devices, or, where that has no limit, if it takes no more than to reduce them after each round.

        Raises:
            VerifyError: the schedule is broken.
        """
        sync = sync_spec or self.options.sync_spec
        key = schedule.name, schedule.placement, schedule.num_microbatches, microbatch_size, sync
        return self._once(
            ("evaluated", *key), lambda: self._with_fewest_sums(schedule, microbatch_size, sync)
        )

    def workload(self, schedule: Schedule, size: int) -> Workload:
        """The costs of stages on one rank each, for a microbatch of ``size`` rows, in seconds and bytes.

        Memory is an upper bound: each microbatch in flight has buffers for all its messages.
        """
        plan, _ = self._plan(self.ordered(schedule), size, self.options.sync_spec)
        stages, devices = plan.stages, self.options.topology.devices
        received, sent, messages = ([0.0] * len(stages) for _ in range(3))
        for link, seconds in zip(plan.links, plan.link_seconds, strict=True):
            if link.payload.per_microbatch and link.target >= 0:
                num_bytes = sum(value_bytes(value, plan.sizes) for value in link.values)
                received[link.target] += num_bytes
                sent[link.source] += num_bytes
                messages[link.source] += seconds * (link.payload is Payload.ACTIVATION)
        memory = (
            replace(
                own,
                saved=own.saved + arrived,
                weight_gradient_saved=own.weight_gradient_saved + arrived,
                in_transit=own.in_transit + NUM_SENDS_IN_TRANSIT * left,
            )
            for own, arrived, left in zip((each.cost.memory for each in stages), received, sent, strict=True)
        )
        phases = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)
        forward, backward_input, backward_weight, recompute = (
            tuple(each.cost.seconds.get(phase, 0.0) for each in stages) for phase in phases
        )
        return Workload(
            forward,
            backward_input,
            backward_weight,
            recompute,
            messages=tuple(messages[:-1]),
            memory=tuple(memory),
            memory_limit=tuple(devices[ranks[0]].memory_bytes for ranks in plan.placement),
        )

    def stages(self, split_backward: bool) -> Sequence[StageFunctions]:
        """The functions of each stage, with one backward or with backwards split in two."""
        graph = self.graph
        return self._once(
            ("functions", split_backward),
            lambda: [stage_functions(graph, stage, split_backward) for stage in range(graph.num_stages)],
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """The cached value for ``key``, made on the first request."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def ordered(self, schedule: Schedule) -> Schedule:
        """The schedule as it runs: in the order that the loss demands, on the ranks of the graph's stages."""
        has_tail_gradients = any(isinstance(role, TailGradient) for role in self.graph.tail_results)
        if has_tail_gradients or self.graph.mode is Mode.OUTPUTS:
            schedule = with_forwards_first(schedule)
        ranks = self.graph.assignment.ranks
        return remap_ranks(schedule, ranks) if ranks else schedule

    @functools.cached_property
    def checkpointed(self) -> frozenset[str]:
        """The values that ``torch.utils.checkpoint`` in the model computes again."""
        return checkpointed_values(self.graph)

    @functools.cached_property
    def names(self) -> Names:
        return name_nodes(self.graph)

    def _with_fewest_sums(self, schedule: Schedule, size: int, sync_spec: SyncSpec) -> EvaluatedPlan:
        if schedule.stream or not (sync_spec.updates and sync_spec.shards_gradients):
            return self._evaluate(schedule, size, sync_spec)
        once = self._evaluate(schedule, size, replace(sync_spec, reduces_once=True))
        limits = {device.memory_bytes for device in self.options.topology.devices}
        if math.inf not in limits and not any(once.excess_bytes):
            return once
        every_round = self._evaluate(schedule, size, sync_spec)
        return min(once, every_round, key=lambda each: (max(each.excess_bytes), each.peak_bytes))

    def _evaluate(self, schedule: Schedule, size: int, sync_spec: SyncSpec) -> EvaluatedPlan:
        require_full_rounds(self.graph, schedule.placement, schedule.num_microbatches)
        placed = self.ordered(schedule)
        plan, stages = self._plan(placed, size, replace(sync_spec, stream=placed.stream))
        if placed.stream:
            refuse_tied_weights(plan)
            refuse_replica_state(plan, self.graph)
        programs = representative_programs(placed, plan, _lowered)
        memory = plan_memory(plan, programs)
        devices = self.options.topology.devices
        excess = [max(0.0, need.peak_bytes - devices[rank].memory_bytes) for rank, need in enumerate(memory)]
        seconds = step_seconds(plan, simulate_plan(plan, programs))
        return EvaluatedPlan(self, schedule, stages, plan, programs, seconds, memory, excess)

    def _plan(
        self, schedule: Schedule, size: int, sync_spec: SyncSpec
    ) -> tuple[Plan, Sequence[StageFunctions]]:
        """The plan of a schedule and the functions of its stages.

        Schedules share plans, unless they differ in splitting the backward, in placement, or in running
        stages out of order, which needs other links.
        """
        orders = [*map(ComputeColumns.of, schedule.orders)]
        split = any((order.phases == PHASE_CODE[Phase.BACKWARD_INPUT]).any() for order in orders)
        count = schedule.stream.microbatches if schedule.stream else schedule.num_microbatches
        like = split, size, schedule.placement, sync_spec, runs_stages_in_order(orders)
        plan, stages = self._once(
            ("plan", *like, count if self.graph.tail else 0),
            lambda: self._build_plan(schedule, split, size, sync_spec),
        )
        return replace(plan, schedule=schedule.name, num_microbatches=count), stages

    def _build_plan(
        self, schedule: Schedule, split: bool, size: int, sync_spec: SyncSpec
    ) -> tuple[Plan, Sequence[StageFunctions]]:
        options, device, optimizer = self.options, self.options.device_model, self.options.optimizer
        stages = self.stages(split)
        if not schedule.stream:
            stages = segment_backwards(self.graph, stages, split, schedule.placement)
        plan = build_plan(self.graph, stages, self.names, schedule, size, options.topology, sync_spec)
        plan = replace(
            with_host_memory(plan, device.host_link),
            host=device.host,
            cost_source=options.cost_source,
            assumptions=options.topology.assumptions,
        )
        if options.sync_spec.updates and optimizer:
            plan = (
                with_update_costs(plan, optimizer, device)
                if plan.sync_spec.updates
                else with_training_state(plan, options.sync_spec, optimizer)
            )
        return plan, stages


def _lowered(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    programs = (lower_periodic if schedule.stream else lower)(schedule, plan)
    verify(plan, programs)
    return programs


def _every_program(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    """The programs of all ranks, where those that represent them were enough to predict the step."""
    programs = _lowered(schedule, plan)
    verify_parts(plan, programs)
    return programs
