"""A cut graph as its stages: what they take under any schedule and size of microbatch, and their code."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipec.artifact.directory import Artifact
from pipec.codegen.names import name_nodes
from pipec.codegen.stage import StageSource
from pipec.codegen.title import stage_title
from pipec.cost.formulas import node_bytes
from pipec.graph import TrainingGraph, copy_graph, memory_of
from pipec.graph.functions import StageFunctions, stage_functions
from pipec.hardware.topology import Topology
from pipec.ir import Phase, Plan, Program, Schedule, StageMemory
from pipec.ir.columns import PHASE_CODE, Cells
from pipec.ir.text import value_bytes
from pipec.passes import Pass, run_passes
from pipec.passes.mark_recompute import MarkRecompute
from pipec.plan.build import Names, build_plan, stage_cost, value_of
from pipec.plan.memory import RankBytes, rank_bytes
from pipec.plan.predictions import simulate_plan
from pipec.programs.lower import lower
from pipec.programs.verify import verify_programs
from pipec.schedules import Workload, on_ranks


@dataclass(frozen=True)
class Estimate:
    """What a step is predicted to take: seconds, and the bytes of each rank."""

    seconds: float
    needs: Sequence[RankBytes]

    @property
    def peak_bytes(self) -> int:
        return max(need.total for need in self.needs)

    def excess(self, topology: Topology) -> list[float]:
        """By how many bytes each rank is above the memory of its device."""
        pairs = zip(self.needs, topology.devices, strict=True)
        return [max(0, need.total - device.memory_bytes) for need, device in pairs]


class Staged:
    """The stages of a graph that has been through every pass and does not change any more.

    Schedules may be for any ranks: those that the graph was cut for take their parts.
    """

    def __init__(self, graph: TrainingGraph, topology: Topology, cut: Pass | None = None) -> None:
        """``cut`` is the pass that gave the nodes their stages, where somebody may ask for it."""
        self.graph = graph
        self.topology = topology
        self.cut = cut
        self._functions: dict[bool, Sequence[StageFunctions]] = {}
        self._plans: dict[object, Plan] = {}
        self._recomputing: dict[frozenset[int], Staged] = {}

    def recomputing(self, stages: frozenset[int]) -> "Staged":
        """The same, with these stages computing again what they did not receive."""
        if stages not in self._recomputing:
            graph = run_passes(copy_graph(self.graph), [MarkRecompute(stages)])
            self._recomputing[stages] = Staged(graph, self.topology, self.cut)
        return self._recomputing[stages]

    def planned(self, schedule: Schedule, microbatch_size: int) -> tuple[Plan, tuple[Program, ...]]:
        """The plan of a step, and what each rank executes. Raises VerifyError if the schedule is broken."""
        schedule = on_ranks(schedule, self.graph.ranks) if self.graph.ranks else schedule
        plan = self._plan(schedule, microbatch_size)
        recompute = [stage.index for stage in plan.stages if stage.recompute]
        programs = lower(schedule, plan.links, recompute)
        verify_programs(programs, plan.placement, plan.links, plan.num_microbatches, recompute=recompute)
        return plan, programs

    def estimate(self, schedule: Schedule, microbatch_size: int) -> Estimate:
        """The seconds of the simulated step, and its bytes."""
        plan, programs = self.planned(schedule, microbatch_size)
        return Estimate(simulate_plan(plan, programs).makespan, rank_bytes(plan, programs))

    def ranks_of(self, placement: Sequence[int]) -> list[int]:
        """Which rank really has each stage of schedules with this placement."""
        return [self.graph.ranks[rank] for rank in placement] if self.graph.ranks else list(placement)

    def artifact(self, schedule: Schedule, microbatch_size: int) -> Artifact:
        """Plan, code and programs."""
        plan, programs = self.planned(schedule, microbatch_size)
        stages = self._stages(_splits_backward(schedule))
        sources = tuple(
            StageSource.of(self.graph, functions, self._names, stage_title(stage, plan)).write()
            for functions, stage in zip(stages, plan.stages, strict=True)
        )
        return Artifact(plan, sources, programs, self.graph.constants)

    def workload(self, placement: Sequence[int], size: int) -> Workload:
        """What each stage does for a microbatch of ``size`` rows, in seconds and bytes."""
        stages, ranks = self._stages(split_backward=True), self.ranks_of(placement)
        devices = self.topology.devices
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
                self._message_seconds(stage, size, *joined)
                for stage, joined in zip(stages, pairwise(ranks), strict=False)
            ),
            memory=tuple(
                StageMemory(
                    weights=cost.parameter_bytes,
                    gradients=cost.parameter_bytes,
                    saved=cost.saved_bytes,
                    kept=_kept_for_weights(stage, size),
                    transient=cost.transient_bytes,
                )
                for stage, cost in zip(stages, costs, strict=True)
            ),
            memory_limit=tuple(
                devices[rank].memory_bytes for _, rank in sorted(set(zip(placement, ranks, strict=True)))
            ),
        )

    def _message_seconds(self, stage: StageFunctions, size: int, source: int, target: int) -> float:
        """Time of what the stage's forward sends from one rank to another."""
        forwards = (function for function in stage.functions if function.phase is Phase.FORWARD)
        sent = [node for function in forwards for node in function.sent]
        if source == target or not sent:
            return 0.0
        sizes = [value_bytes(value_of(self.graph, node, node.name), size) for node in sent]
        return self.topology.link_between(source, target).seconds(sum(sizes))

    def _plan(self, schedule: Schedule, size: int) -> Plan:
        """Schedules that split the backward alike, or not, share the costs of their stages."""
        split = _splits_backward(schedule)
        key = split, size, schedule.placement
        if key not in self._plans:
            stages = self._stages(split)
            self._plans[key] = build_plan(self.graph, stages, self._names, schedule, size, self.topology)
        return replace(self._plans[key], schedule=schedule.name, num_microbatches=schedule.num_microbatches)

    def _stages(self, split_backward: bool) -> Sequence[StageFunctions]:
        if split_backward not in self._functions:
            self._functions[split_backward] = [
                stage_functions(self.graph, stage, split_backward) for stage in range(self.graph.num_stages)
            ]
        return self._functions[split_backward]

    @functools.cached_property
    def _names(self) -> Names:
        return name_nodes(self.graph)


def _splits_backward(schedule: Schedule) -> bool:
    code = PHASE_CODE[Phase.BACKWARD_INPUT]
    return any((Cells.of(order).phases == code).any() for order in schedule.orders)


def _kept_for_weights(stage: StageFunctions, size: int) -> int:
    """Bytes of what a microbatch still holds between its two backwards."""
    halves = [function for function in stage.functions if function.phase is Phase.BACKWARD_INPUT]
    kept = {memory_of(node) for function in halves for node in function.saved_out}
    return sum(node_bytes(node, size) for node in kept)
