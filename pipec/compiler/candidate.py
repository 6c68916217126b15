"""One point of the search space: the decisions that are fixed, and those left to the search."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import Replicas, SchedulePolicy
from pipec.compiler.staged_graph import StagedGraph
from pipec.graph import TrainingGraph
from pipec.hardware.topology import Topology, equal_devices
from pipec.ir import Placement, Plan, RankMemory, Schedule, ShardingLevel, count_ranks
from pipec.passes import Pass
from pipec.passes.assign_stages import Assign, AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.follow_placement import FollowPlacement, parameter_stages
from pipec.passes.assignments.operator_blocks import UpdateCost
from pipec.schedules.replicated import adjacent_pipelines, adjacent_replicas

log = logging.getLogger("pipec")

_OF_OPERATORS = frozenset({"parameters", "buffers", "gradients", "saved"})
"""The kinds of memory that the planner sums over operators."""

_OF_RECOMPUTE = frozenset({"received", "sent", "running"})
"""The kinds that depend on what is recomputed, and on where stages are cut for it."""

_OF_UPDATES = frozenset({"optimizer", "versions"})
"""The kinds that it also sums if stages update after every mini-batch."""

_MAX_RANKS_TOLD = 64
"""The most ranks on which other numbers of replicas are tried although they are not open."""


@dataclass(frozen=True)
class Candidate:
    """The decisions about how steps run.

    ``policy`` holds the allowed schedules and the replicas of stages; ``options`` the devices, the level of
    sharding, and what may be recomputed and offloaded. ``num_microbatches`` is None if the search chooses it.
    The ranks of a stage's replicas are adjacent, or with ``adjacent_pipelines`` those of each pipeline are.
    After the first call has placed stages and parameters, later calls follow it: ``placement`` holds the
    ranks of stages, and ``cut`` repeats the cut.

    The search chooses the replicas of stages with ``tunes_replicas``, the level of sharding with
    ``tunes_shard``, and the ranks of replicas with ``may_rearrange``. With ``plans_replicas``, the planner
    chooses the replicas of each stage when it cuts.
    """

    policy: SchedulePolicy
    options: CompilerOptions
    num_microbatches: int | None = None
    adjacent_pipelines: bool = False
    placement: Placement | None = None
    cut: FollowPlacement | None = None
    tunes_replicas: bool = False
    tunes_shard: bool = False
    may_rearrange: bool = True
    plans_replicas: bool = False

    @property
    def tells_replicas(self) -> bool:
        """Whether the plan says what other numbers of replicas would gain, although they are not open.

        Only where little is open and there are few ranks, because no such plan is taken.
        """
        is_open = self.tunes_replicas or self.tunes_shard or self.policy.source == "auto"
        is_small = self.cut is None and self.policy.total_ranks <= _MAX_RANKS_TOLD
        return is_small and not (is_open or self.num_microbatches)

    @property
    def recorded_options(self) -> Mapping[str, Any]:
        """The options of the pipeline, with the replicas that follow from them."""
        return {**self.options.recorded, "replicas": self.policy.replicas}

    def counts(self, batch: int) -> list[int]:
        """The numbers of microbatches to try for ``batch`` rows, the usual one first."""
        return [self.num_microbatches] if self.num_microbatches else self.policy.microbatch_counts(batch)

    def with_replicas(self, replicas: Replicas) -> "Candidate":
        """The candidate on all ranks with these replicas: one number for all stages, or one for each."""
        return replace(self, policy=self.policy.with_replicas(replicas), adjacent_pipelines=False)

    def with_sync(self, **changed: Any) -> "Candidate":
        """The candidate whose steps end otherwise: these are fields of its ``SyncSpec``."""
        sync_spec = replace(self.options.sync_spec, **changed)
        return replace(self, options=replace(self.options, sync_spec=sync_spec))

    @property
    def may_load_weights(self) -> bool:
        """Whether weights may wait in host memory if nothing else fits, although nobody asked for it.

        A CPU has no other memory.
        """
        spec, policy = self.options.sync_spec, self.policy
        is_asked = self.options.may_offload or spec.state_on_host or spec.weights_on_host or spec.shard
        is_fixed = self.cut is not None or self.tunes_replicas or self.tunes_shard
        can_load = policy.replicas == 1 and not policy.may_be_asynchronous
        return can_load and not (is_asked or is_fixed) and self.options.device_model.name != "cpu"

    @property
    def loads_weights(self) -> bool:
        """Whether weights are in host memory, and loaded for use."""
        return self.options.sync_spec.weights_on_host

    def restricted_by(self, graph: TrainingGraph) -> "Candidate":
        """The candidate for steps on this graph: a tail and model collectives do not allow everything."""
        restricted, replicas = self, self.policy.replicas
        if graph.first_collective and self.num_microbatches is None:
            rounds = "%s is a collective of replicas: a step is one round, of %s microbatches"
            log.info(rounds, graph.first_collective, replicas)
            assert isinstance(replicas, int), "model collectives of unequal replicas are refused"
            restricted = replace(restricted, num_microbatches=replicas)
        if graph.findings.tail:
            restricted = replace(restricted, policy=replace(self.policy, is_synchronous_only=True))
        return restricted

    def on_stages_of(self, staged: StagedGraph, placement: Placement) -> "Candidate":
        """The candidate with stages and parameters placed as in a cut graph."""
        graph = staged.graph
        cut = FollowPlacement(
            len(placement),
            parameter_stages(graph),
            graph.assignment.ranks,
            tuple(zip(graph.operators, graph.assignment.stages, strict=True)),
        )
        return replace(self, placement=placement, cut=cut)

    def gathering(self, plan: Plan) -> "Candidate":
        """The candidate whose evaluations gather the parameters that the training of ``plan`` shards."""
        shares = plan.sync_spec.shard is ShardingLevel.PARAMETERS
        return self.with_sync(buckets=plan.sync_spec.buckets) if shares else self

    def for_next_steps(self, schedule: Schedule) -> "Candidate":
        """The candidate for the steps after one that ran ``schedule``."""
        return replace(self, policy=self.policy.for_next_steps(schedule))

    def other_layouts(self) -> list["Candidate"]:
        """The candidates with other numbers of replicas, in all arrangements."""
        equal = map(self.with_replicas, self.policy.other_replica_counts())
        unequal = self.policy.with_unequal_replicas()
        planned = [replace(self, policy=policy, plans_replicas=True) for policy in unequal]
        return [*(each for one in equal for each in one.replica_arrangements()), *planned]

    def replica_arrangements(self) -> list["Candidate"]:
        """The candidates whose replicas are on other ranks with other costs, this one first."""
        policy, topology = self.policy, self.options.topology
        if not self.may_rearrange:
            return [self]
        if len(set(topology.devices)) == 1 and sum(level.size > 1 for level in topology.levels) < 2:
            return [self]
        several = isinstance(policy.replicas, int) and policy.replicas > 1 and policy.num_ranks > 1
        return [self, replace(self, adjacent_pipelines=not self.adjacent_pipelines)] if several else [self]

    def replica_groups(self) -> Placement:
        """The replicas of each rank of a pipeline; all stages must have equally many."""
        assert isinstance(self.policy.replicas, int)
        arranged = adjacent_pipelines if self.adjacent_pipelines else adjacent_replicas
        return arranged(self.policy.num_ranks, self.policy.replicas)

    def fastest_cut(self, placement: Placement, count: int, size: int) -> Pass:
        """The pass that cuts for the fastest step of ``count`` microbatches, without regard to memory.

        If a rank has several stages, all devices and links are assumed to be equal.
        """
        updates = self.updates(count)
        if self.plans_replicas:
            return self._choosing_replicas(self.options.topology.without_memory_limits(), count, size)
        if not isinstance(self.policy.replicas, int):
            devices = equal_devices(self.policy.total_ranks, self.options.topology.slowest_link)
            return AssignStages(self._cut(devices, size, (), updates, self.policy.replicas, count))
        if not _is_straight(placement):
            devices = equal_devices(len(placement), self.options.topology.slowest_link)
            return self._for_replicas(self._cut(devices, size, narrow=count_ranks(placement) == 1))
        devices = self.pipeline_topology().without_memory_limits()
        return self._for_replicas(self._cut(devices, size, updates=updates))

    def cuts_within_memory(self, placement: Placement) -> bool:
        """Whether stages so placed can be cut for less memory."""
        return self.plans_replicas or (isinstance(self.policy.replicas, int) and _is_straight(placement))

    def cut_within(
        self, reserved: Sequence[float], count: int, size: int, in_flight: tuple[int, ...]
    ) -> Pass:
        """The pass that cuts for the fastest step that fits, with memory reserved on each rank.

        With ``in_flight``, what so many microbatches save on each rank of a pipeline must fit as well.
        """
        if self.plans_replicas:
            return self._choosing_replicas(self.options.topology.with_reserved_memory(reserved), count, size)
        most = [max(reserved[rank] for rank in group) for group in self.replica_groups()]
        devices = self.pipeline_topology().with_reserved_memory(most)
        return self._for_replicas(self._cut(devices, size, in_flight, self.updates(count)))

    def updates(self, count: int) -> UpdateCost | None:
        """The cost of the updates after each mini-batch of ``count`` microbatches; None if synchronous."""
        optimizer, device = self.options.optimizer, self.options.device_model
        if not (self.policy.may_be_asynchronous and optimizer):
            return None
        state = optimizer.state_bytes or {}
        return UpdateCost(state, device.memory_bytes_per_second, self.policy.versions, count)

    def pipeline_topology(self) -> Topology:
        """The topology of one pipeline: a device for each group of replicas."""
        topology = self.options.topology
        return topology if self.policy.replicas == 1 else topology.grouped(self.replica_groups())

    def unplanned_bytes(self, need: RankMemory, saves: bool) -> float:
        """The bytes at a rank's peak that the planner does not sum, and that recomputing does not free.

        If a stage ``saves`` all that its backward reads, nothing is freed.
        """
        updates = self.policy.may_be_asynchronous and self.options.optimizer is not None
        freed = frozenset[str]() if saves or self.plans_replicas else _OF_RECOMPUTE
        return need.excluding(_OF_OPERATORS | freed | (_OF_UPDATES if updates else frozenset()))

    def _choosing_replicas(self, topology: Topology, count: int, size: int) -> Pass:
        """The pass for which the planner chooses the replicas of each stage, on any devices."""
        devices, most = topology.single_level(), self.policy.total_ranks
        return AssignStages(self._cut(devices, size, None, self.updates(count), most, count))

    @property
    def _cut(self) -> Callable[..., CutStages]:
        return functools.partial(CutStages, between_modules=self.options.between_modules)

    def _for_replicas(self, assign: Assign) -> Pass:
        """The pass that applies the cut of one pipeline to all its replicas."""
        return AssignStages(assign, () if self.policy.replicas == 1 else self.replica_groups())


def _is_straight(placement: Placement) -> bool:
    """Whether every rank has one stage, in order."""
    return [rank for ranks in placement for rank in ranks] == list(range(count_ranks(placement)))
