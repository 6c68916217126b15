"""What was compiled for which call of a model, and where its first call put stages and parameters."""

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from pipec.artifact.directory import Artifact
from pipec.capture.call import Call
from pipec.capture.state import State
from pipec.capture.tracer import capture, traced_module
from pipec.compiler.alternatives import refused
from pipec.compiler.autotuner import Autotuner, Choice, fastest_cut
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged import StagedGraph, Trial
from pipec.console import log
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph
from pipec.hardware.topology import Topology
from pipec.ir import Alternative, Mode, Placement
from pipec.ir.batch import split_sizes
from pipec.passes import Pass
from pipec.passes.follow_owners import FollowOwners, Owners, owners_of
from pipec.plan.memory import shortfall
from pipec.torch_compat import Place, pytree


@dataclass(frozen=True, eq=False)
class Compiled:
    """An artifact and the shape of what the model returns, to put its results back into."""

    artifact: Artifact
    output_spec: pytree.TreeSpec | None


Groups = list[tuple[Compiled, list[int]]]
"""What runs each group of consecutive microbatches of a call, and their sizes."""

Kind = tuple[Mode, Hashable, State]
"""A mode, what a call has beside its values and its rows, and the state of the model."""

Signature = tuple[Kind, int]
"""What a captured graph is of: a kind of call, and a number that counts what the model's code found there."""

KEPT = 8
"""So many captures of one kind of call are kept, in case that what they found comes back."""


@dataclass(frozen=True)
class Turn:
    """A call that all ranks make, what it is compiled as, its seed, and the random state after it."""

    call: Call
    signature: Signature
    seed: int
    random_state: torch.Tensor


@dataclass(frozen=True)
class Settled:
    """Where the first call put stages and parameters. Every later call follows it.

    ``placement`` is the placement that schedules have. ``owners`` are the stages that hold each parameter.
    ``ranks[k]`` is the rank that really plays the part of rank k of a schedule.
    """

    placement: Placement
    owners: Owners
    ranks: tuple[int, ...]


@dataclass
class Compiler:
    """Compiles the calls of one model. The first call decides where stages are, and what they own.

    ``device`` is one of those that will run the code. A model on another kind of device is copied there to be
    captured. ``microbatches`` is the number of microbatches of a batch; None leaves it to ``autotuner``.
    Unless ``dynamic``, the microbatches of a call are captured for the one size they have, if it is one.
    Costs are then known for that size alone, so nothing is searched. ``seconds`` says how long each step of
    all compilations took together.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    autotuner: Autotuner
    options: CompilerOptions
    device: torch.device
    canonical: Mapping[str, str]
    microbatches: int | None = None
    dynamic: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    _settled: Settled | None = None
    _traced: dict[Mode, nn.Module] = field(default_factory=dict)
    _last: dict[tuple[Mode, Hashable], Kind] = field(default_factory=dict)
    _counts: dict[Kind, int] = field(default_factory=dict)
    _staged: dict[Signature, list[StagedGraph]] = field(default_factory=dict)
    _compiled: dict[tuple[StagedGraph, int, int], Compiled] = field(default_factory=dict)

    def of(self, model: nn.Module) -> "Compiler":
        """One for a copy of the model, that knows where stages are and has compiled nothing."""
        caches: dict[str, Any] = {"_traced": {}, "_last": {}, "_counts": {}, "_staged": {}, "_compiled": {}}
        return replace(self, model=model, seconds={}, **caches)

    def version(self, kind: Kind) -> int:
        """Which capture of a kind of call is still right, the latest first; a new number if none is."""
        count = self._counts.setdefault(kind, 1)
        for number in range(count - 1, max(count - 1 - KEPT, -1), -1):
            if not self._obsolete((kind, number)):
                if (kind, number) in self._staged:
                    self._last[kind[:2]] = kind
                return number
        return count

    def compile(self, signature: Signature, call: Call) -> Groups:
        """What runs the microbatches of ``call``: groups of consecutive ones, with the rows of each.

        There is one group unless the model specialises on the number of rows.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        self._announce(signature)
        count = self._choose(signature, call)
        groups, rest = [], split_sizes(call.batch_size, count)
        while rest:
            staged = self._stages(signature, call, call.batch_size - sum(rest), rest)
            served = list(takewhile(staged.graph.serves, rest))
            groups.append((self._group(staged, len(served), rest[0]), served))
            rest = rest[len(served) :]
        return groups

    def read(self, signature: Signature) -> dict[Place, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        graphs = [staged.graph for staged in self._staged.get(signature, [])]
        return {place: x for graph in graphs for place, x in graph.assumptions.constants.items()}

    def traced(self, mode: Mode) -> nn.Module:
        """A module that has model and loss where ``read`` finds values."""
        if mode not in self._traced:
            self._traced[mode] = traced_module(self.model, self.loss_fn, mode)
        return self._traced[mode]

    def _announce(self, signature: Signature) -> None:
        """Say why a call is compiled that was compiled before, and make room for what comes of it."""
        kind, number = signature
        mode, called, state = kind
        last = self._last.get((mode, called))
        if last is not None and last[2] != state:
            log(f"pipec: compiles anew: {state.change_since(last[2], self.model)}")
        elif number:
            log(f"pipec: compiles anew: {self._obsolete((kind, number - 1))}" + _OFTEN * (number >= 3))
        self._last[mode, called] = kind
        self._counts[kind] = max(self._counts.get(kind, 1), number + 1)
        for staged in self._staged.pop(expired(signature), []):
            self._compiled = {key: x for key, x in self._compiled.items() if key[0] is not staged}

    def _obsolete(self, signature: Signature) -> str:
        """What a capture took for granted and is no longer so; empty if all is."""
        graphs = [staged.graph for staged in self._staged.get(signature, [])]
        return next((why for graph in graphs if (why := graph.assumptions.broken())), "")

    def _choose(self, signature: Signature, call: Call) -> int:
        """The number of microbatches of the call. The first call also settles where stages are."""
        policy, batch = self.autotuner.policy, call.batch_size
        counts = [self.microbatches] if self.microbatches else policy.counts(batch)
        if signature[0][0] is not Mode.TRAIN or not self.dynamic:
            counts = counts[:1]
        sizes = split_sizes(batch, counts[0])
        if self._settled is None:
            return self._settle(signature, self._capture(signature, call, 0, sizes), batch, counts)
        if len(counts) > 1:
            staged = self._stages(signature, call, 0, sizes)
            with self._timed("search"):
                choice = self.autotuner.choose_on(staged, self._settled.placement, batch, counts)
            self._keep(choice)
            return choice.best.plan.num_microbatches
        return counts[0]

    def _settle(self, signature: Signature, graph: TrainingGraph, batch: int, counts: Sequence[int]) -> int:
        """Decide how steps run and, for good, where stages and parameters are; returns the microbatches."""
        topology, policy = self.options.topology, self.autotuner.policy
        placements = policy.placements(counts)

        def cut(how: Pass, topology: Topology) -> StagedGraph:
            return self._cut(graph, how, replace(self.options, topology=topology))

        if graph.mode is not Mode.TRAIN:
            size = split_sizes(batch, counts[0])[0]
            staged = cut(fastest_cut(placements[0], topology, size), topology)
            self._settle_on(signature, staged, placements[0])
            return counts[0]
        with self._timed("search"):
            choice = self.autotuner.choose(cut, topology, placements, batch, counts)
            if not self.microbatches and self.dynamic:
                replicas = self.autotuner.with_replicas(cut, topology, batch)
                choice = replace(choice, tried=(*choice.tried, *replicas))
        self._settle_on(signature, choice.base, choice.best.schedule.placement)
        self._keep(choice)
        return choice.best.plan.num_microbatches if len(counts) > 1 else counts[0]

    def _settle_on(self, signature: Signature, staged: StagedGraph, placement: Placement) -> None:
        self._settled = Settled(placement, owners_of(staged.graph), staged.graph.ranks)
        self._staged[signature] = [staged]

    def _keep(self, choice: Choice) -> None:
        """Compile what was chosen."""
        best = choice.best
        key = choice.base, best.plan.num_microbatches, best.plan.microbatch_size
        if key not in self._compiled:
            self._compiled[key] = self._finish(best, choice.tried)

    def _group(self, staged: StagedGraph, num_microbatches: int, size: int) -> Compiled:
        """What runs so many microbatches, the first of which has ``size`` rows."""
        key = staged, num_microbatches, size
        if key not in self._compiled:
            assert self._settled is not None
            policy, placement = self.autotuner.policy, self._settled.placement
            if staged.graph.mode is Mode.TRAIN:
                batch = size * num_microbatches
                with self._timed("search"):
                    self._keep(self.autotuner.choose_on(staged, placement, batch, [num_microbatches]))
            else:
                trial = staged.trial(policy.forwards(num_microbatches, placement), size)
                self._compiled[key] = self._finish(trial, ())
        return self._compiled[key]

    def _stages(self, signature: Signature, call: Call, start: int, sizes: Sequence[int]) -> StagedGraph:
        """The cut graph that serves the first microbatch of these ``sizes``; it begins at row ``start``."""
        assert self._settled is not None
        known = self._staged.setdefault(signature, [])
        for staged in known:
            if staged.graph.serves(sizes[0]):
                return staged
        follow = FollowOwners(len(self._settled.placement), self._settled.owners, self._settled.ranks)
        graph = self._capture(signature, call, start, sizes)
        known.append(self._cut(graph, follow, replace(self.options, profile=None)))
        return known[-1]

    def _capture(self, signature: Signature, call: Call, start: int, sizes: Sequence[int]) -> TrainingGraph:
        """The graph of one microbatch, for any size of microbatch if these have several or may change."""
        symbolic = self.dynamic or len(set(sizes)) > 1
        model, rows = on_device(self.model, call.rows(start, start + sizes[0]), self.device)
        with self._timed("capture and differentiate"):
            return capture(
                model, self.loss_fn, signature[0][0], rows, self.canonical, self.device, symbolic, self.model
            )

    def _cut(self, graph: TrainingGraph, cut: Pass, options: CompilerOptions) -> StagedGraph:
        return StagedGraph(graph, cut, options, observers=(self._time,))

    def _finish(self, trial: Trial, tried: Sequence[Alternative]) -> Compiled:
        if any(trial.excess):
            limits = [device.memory_bytes for device in self.options.topology.devices]
            raise InfeasibleError(shortfall(trial.memory, limits, trial.plan.placement))
        with self._timed("generate code"):
            artifact = trial.artifact()
            trial.staged.write_dumps()
        name = "auto" if self.autotuner.policy.choice == "auto" else trial.plan.schedule
        plan = replace(trial.plan, schedule=name, alternatives=refused(tried, trial))
        return Compiled(replace(artifact, plan=plan), trial.staged.graph.output_spec)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Note how long a block takes, without the time of what is noted within it."""
        started, noted = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - noted
            self._note(what, time.perf_counter() - started - within)

    def _time(self, position: int, transform: Pass, graph: TrainingGraph, seconds: float) -> None:
        self._note(type(transform).__name__, seconds)

    def _note(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds


def expired(signature: Signature) -> Signature:
    """Whose capture makes room when this one is compiled."""
    kind, number = signature
    return kind, number - KEPT


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"


def on_device(model: nn.Module, call: Call, device: torch.device) -> tuple[nn.Module, Call]:
    """Model and call on the kind of device that will run them, because operators differ between kinds."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds <= {device.type, "meta"}:
        return model, call

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return copy.deepcopy(model).to(device), call.map(moved)
