"""From a model and a call to an artifact: the list of passes, in order, and what is emitted at its end."""

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from pipec.artifact.directory import Artifact
from pipec.capture.tracer import Call, capture
from pipec.compiler.autotuner import Choice, Search, refused
from pipec.compiler.policy import Placement, Scheduler
from pipec.compiler.staged import Staged
from pipec.cost.profile import Profile
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph, copy_graph
from pipec.hardware.devices import DeviceModel
from pipec.hardware.topology import Topology
from pipec.ir import Alternative, Mode
from pipec.ir.batch import split_sizes
from pipec.passes import Observer, Pass, run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.dump import requested_dumps
from pipec.passes.follow_owners import FollowOwners, Owners, owners_of
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.mark_recompute import MarkRecompute
from pipec.passes.simplify import Simplify
from pipec.passes.split_backward import SplitBackward
from pipec.passes.untie_gradients import UntieGradients
from pipec.passes.ways_to_cut import ways_to_cut
from pipec.plan.memory import shortfall
from pipec.torch_compat import pytree


@dataclass(frozen=True)
class Target:
    """What code is generated for: devices of one kind, and how they are joined.

    ``recompute`` is "auto", "none" or "full"; ``profile`` is of the training graph that decides the cut.
    """

    device: DeviceModel
    topology: Topology
    recompute: str = "auto"
    profile: Profile | None = None


@dataclass(frozen=True)
class Compiled:
    """An artifact and the shape of what the model returns, to put its results back into."""

    artifact: Artifact
    output_spec: pytree.TreeSpec | None


def passes(target: Target, cut: Pass, recompute: frozenset[int]) -> list[Pass]:
    """The compilation, top to bottom. ``recompute`` are the stages that do."""
    return [
        Simplify(),
        AnnotateCost(target.device, target.profile),
        cut,
        UntieGradients(),
        InsertCommunication(target.topology.slowest_link),
        MarkRecompute(recompute),
        SplitBackward(),
    ]


def on_device(model: nn.Module, call: Call, device: torch.device) -> tuple[nn.Module, Call]:
    """Model and call on the kind of device that will run them: operators differ between kinds."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds <= {device.type, "meta"}:
        return model, call

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    arguments = pytree.tree_map(moved, (call.args, call.kwargs, call.target))
    return copy.deepcopy(model).to(device), Call(*arguments)


Signature = tuple[Mode, Hashable, tuple[bool, ...]]
"""What a captured graph is of: the mode, the kind of call, which modules are in training mode."""


@dataclass
class Compiler:
    """Compiles the calls of one model, each once. The first call decides where stages are, and what they own.

    ``device`` is one of those that will run the code; a model on another kind of device is copied there to be
    captured. ``microbatches`` is into how many a batch is split; None: what ``search`` finds to be best.
    Unless ``dynamic``, the microbatches of a call are captured for the size they all have, if they have one,
    and nothing is searched, as costs are known for that size alone. ``seconds`` says how long each step of
    the compilations took, all together.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    search: Search
    target: Target
    device: torch.device
    canonical: Mapping[str, str]
    microbatches: int | None = None
    dynamic: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    placement: Placement | None = None
    owners: Owners | None = None
    ranks: tuple[int, ...] = ()
    _staged: dict[Signature, list[Staged]] = field(default_factory=dict)
    _choices: dict[Hashable, Choice] = field(default_factory=dict)
    _compiled: dict[Hashable, Compiled] = field(default_factory=dict)

    def compile(self, mode: Mode, call: Call) -> list[tuple[Compiled, list[int]]]:
        """What runs the microbatches of ``call``, in groups of consecutive ones, with the rows of each.

        There is one group unless the model specialises on the number of rows.

        Raises CaptureError, InputError, PlanError or InfeasibleError; nothing has run or been sent by then.
        """
        signature = (mode, call.signature(), self.training_flags())
        key = signature, call.batch_size
        if key not in self._choices:
            self._choices[key] = self._choose(signature, call)
        choice = self._choices[key]
        sizes = split_sizes(call.batch_size, choice.num_microbatches)
        symbolic = self.dynamic or len(set(sizes)) > 1
        groups, rest = [], list(sizes)
        while rest:
            staged = self._stages(signature, call.rows(0, rest[0]), symbolic, choice.placement)
            served = list(takewhile(staged.graph.serves, rest))
            code = (id(staged), rest[0], len(served))
            if code not in self._compiled:
                self._compiled[code] = self._finish(staged, rest[0], len(served), choice.tried)
            groups.append((self._compiled[code], served))
            rest = rest[len(served) :]
        return groups

    def training_flags(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(module.training for module in self.model.modules())

    def _choose(self, signature: Signature, call: Call) -> Choice:
        """Into how many microbatches to split the call and, the first time, on which ranks stages are."""
        scheduler, batch, trains = self.search.scheduler, call.batch_size, signature[0] is Mode.TRAIN
        counts = [self.microbatches] if self.microbatches else scheduler.counts(batch)
        counts = counts if trains and self.dynamic else counts[:1]
        placements = [self.placement] if self.placement else scheduler.placements(counts)
        limited = self.target.topology.least_memory_bytes < math.inf
        if not trains or (len(counts) == len(placements) == 1 and not limited):
            return Choice(placements[0], counts[0])
        rows = call.rows(0, split_sizes(batch, counts[0])[0])
        symbolic = self.dynamic or batch % counts[0] > 0
        if self.placement:
            staged = self._stages(signature, rows, symbolic, self.placement)
            with self._timed("search"):
                return self.search.choose(lambda *_: [staged], placements, batch, counts)
        return self._settle_choice(signature, self._capture(signature, rows, symbolic), batch, counts)

    def _settle_choice(
        self, signature: Signature, graph: TrainingGraph, batch: int, counts: Sequence[int]
    ) -> Choice:
        def cuts(scheduler: Scheduler, placement: Placement, sizes: Mapping[int, int]) -> Iterator[Staged]:
            topology = self.target.topology.part(scheduler.num_ranks)
            in_flight = {size: scheduler.in_flight(count) for count, size in sizes.items()}
            for cut in ways_to_cut(placement, topology, in_flight):
                yield self._cut(copy_graph(graph), placement, cut, topology)

        placements = self.search.scheduler.placements(counts)
        with self._timed("search"):
            choice = self.search.choose(cuts, placements, batch, counts)
            if not self.microbatches:
                choice = self.search.with_replicas(choice, cuts, batch, self.target.topology.slowest_link)
        self._settle(signature, graph, choice.placement, choice.cut)
        return choice

    def _stages(self, signature: Signature, call: Call, symbolic: bool, placement: Placement) -> Staged:
        """The cut graph that serves a microbatch."""
        known = self._staged.setdefault(signature, [])
        for staged in known:
            if staged.graph.serves(call.batch_size):
                return staged
        return self._settle(signature, self._capture(signature, call, symbolic), placement)

    def _capture(self, signature: Signature, call: Call, symbolic: bool) -> TrainingGraph:
        model, call = on_device(self.model, call, self.device)
        with self._timed("capture and differentiate"):
            return capture(model, self.loss_fn, signature[0], call, self.canonical, self.device, symbolic)

    def _settle(
        self, signature: Signature, graph: TrainingGraph, placement: Placement, cut: Pass | None = None
    ) -> Staged:
        """Cut a graph for good, where the parameters already are or, the first time, where they will be."""
        topology = self.target.topology
        if self.owners is not None:
            cut = FollowOwners(len(placement), self.owners, self.ranks)
        cut = cut or next(ways_to_cut(placement, topology, {graph.batch_size: ()}))
        staged = self._cut(graph, placement, cut, topology, self._time, *requested_dumps())
        if self.owners is None:
            self.placement, self.owners, self.ranks = placement, owners_of(staged.graph), staged.graph.ranks
        self._staged.setdefault(signature, []).append(staged)
        return staged

    def _cut(
        self,
        graph: TrainingGraph,
        placement: Placement,
        cut: Pass,
        topology: Topology,
        *observers: Observer,
    ) -> Staged:
        first = self.owners is None and graph.mode is Mode.TRAIN
        target = replace(self.target, topology=topology, profile=self.target.profile if first else None)
        everything = frozenset(range(len(placement)))
        again = everything if self.target.recompute == "full" else frozenset[int]()
        return Staged(run_passes(graph, passes(target, cut, again), observers), topology, cut)

    def _finish(
        self, staged: Staged, size: int, num_microbatches: int, tried: Sequence[Alternative]
    ) -> Compiled:
        assert self.placement is not None
        with self._timed("schedule"):
            if staged.graph.mode is Mode.TRAIN:
                trial = self.search.best(staged, self.placement, num_microbatches, size)
            else:
                schedule = self.search.scheduler.forwards(num_microbatches, self.placement)
                trial = replace(self.search, may_recompute=False).trial(staged, schedule, size)
        if trial.excess:
            limits = [device.memory_bytes for device in self.target.topology.devices]
            placement = trial.staged.ranks_of(trial.schedule.placement)
            raise InfeasibleError(shortfall(trial.estimate.needs, limits, placement))
        with self._timed("generate code"):
            artifact = trial.staged.artifact(trial.schedule, size)
        plan = replace(artifact.plan, alternatives=refused(tried, trial))
        return Compiled(replace(artifact, plan=plan), staged.graph.output_spec)

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
