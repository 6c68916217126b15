"""From a model and a call to an artifact: the list of passes, in order, and what is emitted at its end."""

import copy
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from pipec.artifact import Artifact
from pipec.capture import Call, capture
from pipec.codegen.names import name_nodes
from pipec.codegen.stage import StageSource
from pipec.codegen.title import stage_title
from pipec.cost.devices import DeviceModel, LinkModel
from pipec.cost.profile import Profile
from pipec.errors import InfeasibleError, PlanError
from pipec.functions import StageFunctions, stage_functions
from pipec.graph import TrainingGraph, copy_graph
from pipec.ir import Mode, Phase, Plan, Program, Schedule
from pipec.lower import lower
from pipec.memory import rank_bytes, shortfall
from pipec.passes import Pass, run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.cut_stages import CutStages, FollowOwners, Owners, owners_of
from pipec.passes.dump import requested_dumps
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.mark_recompute import MarkRecompute
from pipec.passes.simplify import Simplify
from pipec.passes.split_backward import SplitBackward
from pipec.passes.untie_gradients import UntieGradients
from pipec.plan import Names, build_plan
from pipec.report import simulate_plan
from pipec.scheduling import Placement, Scheduler, Score, workload_of
from pipec.torch_compat import pytree
from pipec.verify import verify_programs


@dataclass(frozen=True)
class Target:
    """What code is generated for: devices with the links between them, and what to do about memory.

    ``recompute`` is "auto", "none" or "full"; ``memory_limit`` is in bytes per device. ``profile`` is of the
    training graph that decides the cut.
    """

    device: DeviceModel
    recompute: str = "auto"
    memory_limit: int | None = None
    profile: Profile | None = None


@dataclass(frozen=True)
class Compiled:
    """An artifact and the shape of what the model returns, to put its results back into."""

    artifact: Artifact
    output_spec: pytree.TreeSpec | None


def passes(
    target: Target, cut: Pass, recompute: frozenset[int], profile: Profile | None = None
) -> list[Pass]:
    """The compilation, top to bottom."""
    return [
        Simplify(),
        AnnotateCost(target.device, profile),
        cut,
        UntieGradients(),
        InsertCommunication(target.device.link),
        MarkRecompute(recompute),
        SplitBackward(),
    ]


def planned(
    graph: TrainingGraph, schedule: Schedule, microbatch_size: int, link: LinkModel
) -> tuple[Plan, tuple[Program, ...], Sequence[StageFunctions], Names]:
    """Plan and programs of a graph that has been through every pass, and what its code is written from."""
    split = any(cell.phase is Phase.BACKWARD_INPUT for order in schedule.orders for cell in order)
    names = name_nodes(graph)
    stages = [stage_functions(graph, stage, split) for stage in range(graph.num_stages)]
    plan = build_plan(graph, stages, names, schedule, microbatch_size, link)
    programs = lower(schedule, plan.links, [stage.index for stage in plan.stages if stage.recompute])
    return plan, programs, stages, names


def emit(graph: TrainingGraph, schedule: Schedule, microbatch_size: int, link: LinkModel) -> Artifact:
    """Plan, code and programs of a graph that has been through every pass; the programs are verified."""
    plan, programs, stages, names = planned(graph, schedule, microbatch_size, link)
    recompute = [stage.index for stage in plan.stages if stage.recompute]
    verify_programs(programs, plan.placement, plan.links, plan.num_microbatches, recompute=recompute)
    sources = tuple(
        StageSource.of(graph, functions, names, stage_title(stage, plan)).write()
        for functions, stage in zip(stages, plan.stages, strict=True)
    )
    return Artifact(plan, sources, programs, graph.constants)


def on_device(model: nn.Module, call: Call, device: torch.device) -> tuple[nn.Module, Call]:
    """Model and call on the kind of device that will run them: operators differ between kinds."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds <= {device.type, "meta"}:
        return model, call

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    arguments = pytree.tree_map(moved, (call.args, call.kwargs, call.target))
    return copy.deepcopy(model).to(device), Call(*arguments)


@dataclass
class Compiler:
    """Compiles the calls of one model, each once. The first call decides where stages are, and what they own.

    ``device`` is one of those that will run the code; a model on another kind of device is copied there to be
    captured. Unless ``dynamic``, the microbatches of a call are captured for the size they all have, if they
    have one. ``seconds`` says how long each step of the compilations took, all together.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    scheduler: Scheduler
    target: Target
    device: torch.device
    canonical: Mapping[str, str]
    dynamic: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    owners: Owners | None = None
    placement: Placement | None = None
    _graphs: dict[Hashable, list[TrainingGraph]] = field(default_factory=dict)
    _compiled: dict[Hashable, Compiled] = field(default_factory=dict)

    def compile(self, mode: Mode, call: Call, sizes: Sequence[int]) -> list[tuple[Compiled, list[int]]]:
        """What runs microbatches of ``sizes`` rows of ``call``, in groups of consecutive ones.

        There is one group unless the model specialises on the number of rows.

        Raises CaptureError, InputError, PlanError or InfeasibleError; nothing has run or been sent by then.
        """
        signature = (mode, call.signature(), self.training_flags())
        groups, rest = [], list(sizes)
        symbolic = self.dynamic or len(set(sizes)) > 1
        while rest:
            graph = self._graph(signature, mode, call.rows(0, rest[0]), len(sizes), symbolic)
            served = list(takewhile(graph.serves, rest))
            key = (id(graph), rest[0], len(served))
            if key not in self._compiled:
                self._compiled[key] = self._finish(graph, rest[0], len(served))
            groups.append((self._compiled[key], served))
            rest = rest[len(served) :]
        return groups

    def training_flags(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(module.training for module in self.model.modules())

    def _graph(
        self, signature: Hashable, mode: Mode, call: Call, num_microbatches: int, symbolic: bool
    ) -> TrainingGraph:
        known = self._graphs.setdefault(signature, [])
        for graph in known:
            if graph.serves(call.batch_size):
                return graph
        known.append(self._capture(mode, call, num_microbatches, symbolic))
        return known[-1]

    def _capture(self, mode: Mode, call: Call, num_microbatches: int, symbolic: bool) -> TrainingGraph:
        size = call.batch_size
        model, call = on_device(self.model, call, self.device)
        with self._timed("capture and differentiate"):
            graph = capture(model, self.loss_fn, mode, call, self.canonical, self.device, symbolic)
        if self.placement is None:
            self.placement = self._best_placement(graph, size, num_microbatches)
        return self._place(graph, len(self.placement))

    def _best_placement(self, graph: TrainingGraph, size: int, num_microbatches: int) -> Placement:
        """The placement whose schedule is best once the model is cut for it, if there is a choice."""
        options = self.scheduler.placements(num_microbatches)
        if len(options) == 1 or graph.mode is not Mode.TRAIN:
            return options[0]
        scores: dict[Placement, tuple[float, float]] = {}
        try:
            for placement in options:
                with suppress(PlanError):  # too few operators for that many stages
                    self.placement, self.owners = placement, None
                    cut = self._place(copy_graph(graph), len(placement))
                    scores[placement] = self._score(cut, size)(self._schedule(cut, size, num_microbatches))
        finally:
            self.placement, self.owners = None, None
        return min(scores, key=lambda each: scores[each]) if scores else options[0]

    def _schedule(self, graph: TrainingGraph, size: int, num_microbatches: int) -> Schedule:
        assert self.placement is not None
        if graph.mode is not Mode.TRAIN:
            return self.scheduler.forwards(num_microbatches, self.placement)
        link, limit = self.target.device.link, self.target.memory_limit
        work = functools.partial(workload_of, graph, self.placement, size, link, limit)
        return self.scheduler.schedule(num_microbatches, self.placement, work, self._score(graph, size))

    def _score(self, graph: TrainingGraph, size: int) -> Score:
        def score(schedule: Schedule) -> tuple[float, float]:
            plan, programs = planned(graph, schedule, size, self.target.device.link)[:2]
            needs = [need.total for need in rank_bytes(plan, programs)]
            excess = max(0, max(needs) - (self.target.memory_limit or max(needs)))
            return excess, simulate_plan(plan, programs).makespan

        return score

    def _place(self, graph: TrainingGraph, stages: int) -> TrainingGraph:
        cut = (
            CutStages(stages, self.target.device.link)
            if self.owners is None
            else FollowOwners(stages, self.owners)
        )
        everything = frozenset(range(stages))
        again = everything if self.target.recompute == "full" else frozenset[int]()
        profile = self.target.profile if self.owners is None and graph.mode is Mode.TRAIN else None
        pipeline = passes(self.target, cut, again, profile)
        graph = run_passes(graph, pipeline, [self._time, *requested_dumps()])
        if self.owners is None:
            self.owners = owners_of(graph)
        return graph

    def _finish(self, graph: TrainingGraph, size: int, num_microbatches: int) -> Compiled:
        with self._timed("schedule"):
            schedule = self._schedule(graph, size, num_microbatches)
        with self._timed("generate code"):
            artifact = emit(graph, schedule, size, self.target.device.link)
            artifact = self._within_memory(graph, schedule, artifact, size)
        return Compiled(artifact, graph.output_spec)

    def _within_memory(
        self, graph: TrainingGraph, schedule: Schedule, artifact: Artifact, size: int
    ) -> Artifact:
        """The artifact, or one that recomputes on the stages that would not fit. Raises InfeasibleError."""
        limit = self.target.memory_limit
        if limit is None:
            return artifact
        plan = artifact.plan
        needs = rank_bytes(plan, artifact.programs)
        tight = [stage for stage, rank in enumerate(plan.placement) if needs[rank].total > limit]
        if tight and graph.mode is Mode.TRAIN and self.target.recompute == "auto":
            graph = run_passes(graph, [MarkRecompute(frozenset(tight))])
            artifact = emit(graph, schedule, size, self.target.device.link)
            needs = rank_bytes(artifact.plan, artifact.programs)
        if any(need.total > limit for need in needs):
            raise InfeasibleError(shortfall(needs, limit))
        return artifact

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started

    def _time(self, position: int, transform: Pass, graph: TrainingGraph, seconds: float) -> None:
        name = type(transform).__name__
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
