"""A captured graph cut into stages, and all that is known of it: stages, plans, evaluated plans and code."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from pipec.artifact.artifact import Artifact
from pipec.codegen.names import name_nodes
from pipec.codegen.stage_header import stage_header
from pipec.codegen.stage_source import StageSource
from pipec.compiler import pass_list
from pipec.compiler.batch_equivalence import refuse_replica_state, refuse_tied_weights, require_full_rounds
from pipec.compiler.pass_list import NO_OFFLOAD, CompilerOptions
from pipec.cost.formulas import node_bytes
from pipec.errors import PipecError
from pipec.graph import Operator, TrainingGraph, copy_graph
from pipec.graph.phase_functions import StageFunctions, stage_functions
from pipec.hardware.topology import Topology
from pipec.ir import (
    Phase,
    Placement,
    Plan,
    Program,
    RankMemory,
    Schedule,
    StageMemory,
    SyncSpec,
    rank_of,
)
from pipec.ir.columns import PHASE_CODE, ComputeColumns
from pipec.ir.text_format import value_bytes
from pipec.passes import Observer, Pass, run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute, stage_values
from pipec.passes.pass_dump import requested_pass_dumps
from pipec.plan.buckets import segment_backwards
from pipec.plan.build_plan import Names, build_plan, stage_cost
from pipec.plan.memory_needs import plan_memory
from pipec.plan.node_values import plan_value
from pipec.plan.offload_cost import with_offload_seconds
from pipec.plan.optimizer_cost import with_training_state, with_update_costs
from pipec.plan.predictions import simulate_plan, step_seconds
from pipec.planner.recompute_solver import ForwardValue
from pipec.programs.lower import lower
from pipec.programs.lower_periodic import lower_periodic
from pipec.programs.rank_memory import NUM_SENDS_IN_TRANSIT
from pipec.programs.representative_replicas import (
    ReplicatedPrograms,
    representative_programs,
    representative_replicas,
)
from pipec.programs.shared_receives import runs_stages_in_order
from pipec.programs.verify import verify
from pipec.schedules import Workload, remap_ranks

T = TypeVar("T")

NO_RECOMPUTE = MarkRecompute()

PREDICTION_TOLERANCE = 0.05
"""Share of a step by which predictions of it are off. Ways that are this close count as equally fast."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """One way to run a step: the plan and the verified programs, and what the step is predicted to take.

    ``schedule`` is the one that was requested; the plan's placement says which ranks act for those of the
    schedule. ``stages`` are the functions that the programs call. ``excess_bytes[rank]`` are those by which a
    rank exceeds the memory of its device.
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
        """Less is better: first what does not fit into memory, then what the step is expected to take."""
        return max(self.excess_bytes), self.seconds

    @property
    def num_instructions(self) -> float:
        """How many instructions the rank with the most has in a step, or without a flush in a mini-batch."""
        count, programs = self.plan.num_microbatches, representative_programs(self.programs)
        return max(len(each.instructions) * count / (each.period or count) for each in programs)

    def is_close(self, other: "EvaluatedPlan") -> bool:
        """Whether another one lacks no more memory, and is slower by less than can be told beforehand."""
        (lacks, seconds), (other_lacks, other_seconds) = self.score, other.score
        return other_lacks <= lacks and other_seconds <= seconds * (1 + PREDICTION_TOLERANCE)

    def representative(self, rank: int) -> int:
        """Which of the ranks whose programs were made does what this rank does."""
        return (
            self.programs.representative_replicas.representative(rank)
            if isinstance(self.programs, ReplicatedPrograms)
            else rank
        )

    def memory_limit(self, rank: int) -> float:
        """The bytes that the device of a rank holds."""
        return self.staged.options.topology.devices[rank].memory_bytes

    @property
    def is_asynchronous(self) -> bool:
        """Whether the next step begins before this one is over."""
        return self.schedule.stream is not None

    def artifact(self) -> Artifact:
        """The plan, the programs and the code of the stages. Constants are on the host, for any process."""
        names, graph = self.staged.names, self.staged.graph
        sources = tuple(
            StageSource.of(graph, functions, names, stage_header(stage, self.plan)).write()
            for functions, stage in zip(self.stages, self.plan.stages, strict=True)
        )
        constants = {name: x if x.is_meta else x.cpu() for name, x in graph.constants.items()}
        return Artifact(self.plan, sources, self.programs, constants, self.staged.options.recorded)


class StagedGraph:
    """A copy of a captured graph that has been through every pass, and does not change any more.

    Schedules may be for any ranks: those that the graph was cut for take their parts. Everything that is
    worked out of the graph is kept here, and nowhere else.
    """

    def __init__(
        self,
        captured: TrainingGraph,
        cut: Pass,
        options: CompilerOptions,
        recompute: MarkRecompute = NO_RECOMPUTE,
        offload: MarkOffload = NO_OFFLOAD,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.options = options
        self._dumps = requested_pass_dumps()
        self.captured, self._observers = captured, observers
        self._known: dict[tuple[object, ...], Any] = {}
        passes = pass_list.make_passes(options, cut, recompute, offload)
        try:
            self.graph = run_passes(copy_graph(captured), passes, (*observers, *self._dumps))
        except PipecError:
            self.write_dumps()
            raise

    def write_dumps(self) -> None:
        """Write what each pass made of the graph, if the environment asks for it."""
        for dump in self._dumps:
            dump.write()

    def with_recompute(self, recompute: MarkRecompute, offload: MarkOffload = NO_OFFLOAD) -> "StagedGraph":
        """The same cut, with stages computing again what is marked, or offloading it."""
        cut, observers = self._repeated_cut, self._observers
        return self._once(
            ("variant", recompute, offload),
            lambda: StagedGraph(self.captured, cut, self.options, recompute, offload, observers),
        )

    def with_topology(self, topology: Topology) -> "StagedGraph":
        """The same cut on other devices."""
        options = replace(self.options, topology=topology)
        return StagedGraph(self.captured, self._repeated_cut, options, observers=self._observers)

    def forward_values(self, size: int) -> Sequence[Mapping[str, ForwardValue]]:
        """By stage and by name, what may be saved or recomputed of the forward of ``size`` rows."""
        return self._once(("values", size), lambda: stage_values(self.graph, size))

    def clear_evaluated(self) -> None:
        """Let go of the plans and programs that were tried on these stages."""
        self._known = {key: x for key, x in self._known.items() if key[0] not in ("evaluated", "plan")}
        for (kind, *_), known in self._known.items():
            if kind == "variant":
                known.clear_evaluated()

    def evaluate(
        self, schedule: Schedule, microbatch_size: int, sync_spec: SyncSpec | None = None
    ) -> EvaluatedPlan:
        """The schedule on these stages, lowered, verified and simulated: once, however often it is asked for.

        Of schedules with the same name, placement and number of microbatches there is only one. The step ends
        as ``sync_spec`` says, or else the options.

        Raises:
            VerifyError: the schedule is broken.
        """
        ends = sync_spec or self.options.sync_spec
        key = schedule.name, schedule.placement, schedule.num_microbatches, microbatch_size, ends
        return self._once(("evaluated", *key), lambda: self._evaluate(schedule, microbatch_size, ends))

    def workload(self, placement: Placement, size: int) -> Workload:
        """What each stage does for a microbatch of ``size`` rows, in seconds and bytes.

        The first replicas of stages stand for all.
        """
        stages, devices = self.stages(True), self.options.topology.devices
        played_by = self.graph.assignment.ranks or tuple(range(len(devices)))
        ranks = [played_by[rank_of(placement, stage.index)] for stage in stages]
        costs = [
            stage_cost(self.graph, stage, size, devices[rank].speed)
            for stage, rank in zip(stages, ranks, strict=True)
        ]

        def seconds(phase: Phase) -> tuple[float, ...]:
            return tuple(cost.seconds.get(phase, 0.0) for cost in costs)

        return Workload(
            forward=seconds(Phase.FORWARD),
            backward_input=seconds(Phase.BACKWARD_INPUT),
            backward_weight=seconds(Phase.BACKWARD_WEIGHT),
            recompute=seconds(Phase.RECOMPUTE),
            messages=tuple(
                self._message_seconds(stage, size, *ends)
                for stage, ends in zip(stages, pairwise(ranks), strict=False)
            ),
            memory=tuple(
                _with_messages(cost.memory, stage, size) for cost, stage in zip(costs, stages, strict=True)
            ),
            memory_limit=tuple(
                devices[played_by[rank]].memory_bytes for rank in sorted({ranks[0] for ranks in placement})
            ),
        )

    def stages(self, split_backward: bool) -> Sequence[StageFunctions]:
        """The functions of each stage, with whole backwards or with backwards in two halves."""
        graph = self.graph
        return self._once(
            ("functions", split_backward),
            lambda: [stage_functions(graph, stage, split_backward) for stage in range(graph.num_stages)],
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What is worked out of the graph, once for each key."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    @functools.cached_property
    def operator_numbers(self) -> Mapping[str, int]:
        """The operator that each node comes from, by its name; arguments come before all."""
        return {node.name: node.meta.get("operator", -1) for node in self.graph.module.graph.nodes}

    @property
    def operator_stages(self) -> Sequence[tuple[Operator, int]]:
        """The operators of the model, each with its stage."""
        return [*zip(self.graph.operators, self.graph.assignment.stages, strict=True)]

    @functools.cached_property
    def names(self) -> Names:
        return name_nodes(self.graph)

    def _evaluate(self, schedule: Schedule, size: int, sync_spec: SyncSpec) -> EvaluatedPlan:
        require_full_rounds(self.graph, schedule.placement, schedule.num_microbatches)
        ranks = self.graph.assignment.ranks
        placed = remap_ranks(schedule, ranks) if ranks else schedule
        plan, stages = self._plan(placed, size, replace(sync_spec, stream=placed.stream))
        if placed.stream:
            refuse_tied_weights(plan)
            refuse_replica_state(plan, self.graph)
        programs = _programs(placed, plan)
        memory = plan_memory(plan, programs)
        devices = self.options.topology.devices
        excess = [max(0.0, need.peak_bytes - devices[rank].memory_bytes) for rank, need in enumerate(memory)]
        seconds = step_seconds(plan, simulate_plan(plan, programs))
        return EvaluatedPlan(self, schedule, stages, plan, programs, seconds, memory, excess)

    def _plan(
        self, schedule: Schedule, size: int, sync_spec: SyncSpec
    ) -> tuple[Plan, Sequence[StageFunctions]]:
        """Schedules that split the backward alike, or not, share the costs of their stages.

        Those that run stages out of order have links of their own.
        """
        split = _splits_backward(schedule)
        in_order = runs_stages_in_order(map(ComputeColumns.of, schedule.orders))
        plan, stages = self._once(
            ("plan", split, size, schedule.placement, sync_spec, in_order),
            lambda: self._build_plan(schedule, split, size, sync_spec),
        )
        count = schedule.stream.microbatches if schedule.stream else schedule.num_microbatches
        return replace(plan, schedule=schedule.name, num_microbatches=count), stages

    def _build_plan(
        self, schedule: Schedule, split: bool, size: int, sync_spec: SyncSpec
    ) -> tuple[Plan, Sequence[StageFunctions]]:
        topology, device, stages = self.options.topology, self.options.device_model, self.stages(split)
        if not schedule.stream:
            launch = device.launch_seconds
            stages = segment_backwards(
                self.graph, stages, split, schedule.placement, size, topology, launch, sync_spec
            )
        plan = build_plan(self.graph, stages, self.names, schedule, size, topology, sync_spec)
        plan = with_offload_seconds(plan, device.host_link)
        plan = replace(plan, host=device.host, cost_source=self.options.cost_source)
        return self._with_updates(plan), stages

    def _with_updates(self, plan: Plan) -> Plan:
        if not (self.options.sync_spec.updates and self.options.optimizer):
            return plan
        if not plan.sync_spec.updates:
            return with_training_state(plan, self.options.sync_spec, self.options.optimizer)
        return with_update_costs(plan, self.options.optimizer, self.options.device_model)

    def _message_seconds(self, stage: StageFunctions, size: int, source: int, target: int) -> float:
        """The time of what the stage's forward sends from one rank to another."""
        sent = [node for function in stage.phase_functions(Phase.FORWARD) for node in function.sent]
        if source == target or not sent:
            return 0.0
        planned = {"b": size, **self.graph.planned_sizes}
        sizes = [value_bytes(plan_value(self.graph, node, node.name), planned) for node in sent]
        return self.options.topology.link_between(source, target).seconds(sum(sizes))

    @property
    def _repeated_cut(self) -> Pass:
        """The pass that cuts a copy of the captured graph in the same way."""
        return AssignStages(self.graph.assignment)


def _programs(schedule: Schedule, plan: Plan) -> Sequence[Program]:
    """The verified programs of a plan. Of many replicas that are alike, those of a few are made at first."""
    few = representative_replicas(schedule)
    if few is None:
        return _of_all(schedule, plan)
    those = _of_all(few.schedule, few.plan(plan))
    return ReplicatedPrograms(few, those, functools.partial(_of_all, schedule, plan))


def _of_all(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    programs = (lower_periodic if schedule.stream else lower)(schedule, plan)
    verify(plan, programs)
    return programs


def _with_messages(memory: StageMemory, stage: StageFunctions, size: int) -> StageMemory:
    """No less than what a stage holds with its messages: each microbatch in flight has a buffer for them."""
    received, sent = (
        sum(node_bytes(node, size) for function in stage.functions for node in getattr(function, kind))
        for kind in ("received", "sent")
    )
    return replace(
        memory,
        saved=memory.saved + received,
        weight_gradient_saved=memory.weight_gradient_saved + received,
        in_transit=memory.in_transit + NUM_SENDS_IN_TRANSIT * sent,
    )


def _splits_backward(schedule: Schedule) -> bool:
    code = PHASE_CODE[Phase.BACKWARD_INPUT]
    return any((ComputeColumns.of(order).phases == code).any() for order in schedule.orders)
