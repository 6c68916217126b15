"""What was compiled for which call of a model, and where its first call put stages and parameters."""

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from pipec.capture.autocast import autocast, require_wide_weights
from pipec.capture.call import Call
from pipec.capture.step import traced_module
from pipec.capture.symbols import FixedVariableError
from pipec.capture.tracer import capture
from pipec.capture.variables import symbolic_choices
from pipec.compiler.alternatives import refused, shard_costs
from pipec.compiler.autotuner import Autotuner, Choice, CutGraph, best_of
from pipec.compiler.captures import Captures, Kind, Signature
from pipec.compiler.checks import (
    check_batch,
    joins_replicas,
    told_of_changed_buffers,
    told_of_one_row,
    told_of_rounds,
    warnings_of,
)
from pipec.compiler.groups import Compiled, Groups, check_groups, check_outputs, check_served
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.processor import measured_processor
from pipec.compiler.settled import Settled
from pipec.compiler.shortage import refuse, refuse_on_its_stages
from pipec.compiler.staged import StagedGraph, Trial
from pipec.compiler.stopwatch import Stopwatch
from pipec.errors import InputError, PlanError
from pipec.graph import Findings, Output, TrainingGraph
from pipec.hardware.topology import Topology
from pipec.ir import Alternative, Mode, Placement, Precision, Shard, Sizes, Variable
from pipec.ir.batch import require_equal_rows, split_sizes, variable_values
from pipec.passes import Pass
from pipec.passes.follow_owners import FollowOwners, owners_of
from pipec.passes.steps_in_time import divided
from pipec.torch_compat import Place

log = logging.getLogger("pipec")


@dataclass
class Compiler:
    """Compiles the calls of one model. The first call decides where stages are, and what they own.

    ``device`` is one of those that will run the code. A model on another kind of device is captured as if it
    were there. ``microbatches`` is the number of microbatches of a batch; None leaves it to ``autotuner``.
    Unless ``dynamic``, the microbatches of a call are captured for the one size they have, if it is one.
    Costs are then known for that size alone, so nothing is searched. With ``searches_replicas`` the first
    call chooses how many replicas stages have. With ``searches_shard`` the first training step chooses what
    they divide. ``microbatch_weight`` is that of the plan. ``precision`` is what operators compute in, if
    not in the model's own types. If it ``measures_processor``, costs are those measured on this machine.
    While the pipeline ``tries_axes``, a batch whose rows depend on one another is refused.
    ``watch`` says how long each step of all compilations took together.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    autotuner: Autotuner
    options: CompilerOptions
    device: torch.device
    canonical: Mapping[str, str]
    microbatches: int | None = None
    dynamic: bool = True
    searches_replicas: bool = False
    searches_shard: bool = False
    microbatch_weight: str = ""
    precision: Precision | None = None
    measures_processor: bool = False
    tries_axes: bool = False
    watch: Stopwatch = field(default_factory=Stopwatch)
    _settled: Settled | None = None
    _traced: dict[Mode, nn.Module] = field(default_factory=dict)
    _captures: Captures = field(default_factory=Captures)
    _compiled: dict[tuple[StagedGraph, int, int], Compiled] = field(default_factory=dict)
    _symbolic: dict[Signature, list[tuple[Variable, ...]]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _warned: set[str] = field(default_factory=set)

    def of(self, model: nn.Module) -> "Compiler":
        """One for a copy of the model, that knows where stages are and has compiled nothing."""
        fresh: dict[str, Any] = {"_traced": {}, "_captures": Captures(), "_compiled": {}, "_symbolic": {}}
        return replace(self, model=model, watch=Stopwatch(), **fresh, _warned=set())

    def version(self, kind: Kind, call: Call | None) -> int:
        """Which capture of a kind of call is still right; a new number if none is."""
        return self._captures.version(kind, call)

    def is_right(self, signature: Signature) -> bool:
        """Whether what was captured is still right for the model."""
        return not self._captures.obsolete(signature, None)

    def retain(self, numbers: Collection[int]) -> None:
        """Let go of what was compiled, but of these."""
        self._compiled = {key: made for key, made in self._compiled.items() if made.number in numbers}
        used = {staged for staged, _, _ in self._compiled}
        self._captures.retain(used)
        for staged in used:
            staged.forget_trials()
        self._symbolic = {key: x for key, x in self._symbolic.items() if key in self._captures.staged}

    def compile(self, signature: Signature, call: Call, variables: str = "") -> Groups:
        """What runs the microbatches of ``call``: groups of consecutive ones, with the rows of each.

        There is one group unless the model specialises on the number of rows. ``variables`` is what about the
        variables of the call is new.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        reason = self._captures.announce(signature, call, self.model, variables)
        with self.watch.telling(f"pipec: compiles, {reason}"):
            return self._compile(signature, call)

    def _compile(self, signature: Signature, call: Call) -> Groups:
        sizes = variable_values(signature.kind.variables, call.leaves)
        count = self._choose(signature, call)
        groups, graphs, rest = [], [], split_sizes(call.batch_size, count)
        first = self._captures.staged[signature][0].graph
        if joins_replicas(first):
            require_equal_rows(rest)
        self._warn_once(told_of_rounds(first, self.autotuner.policy.replicas, count))
        self._warn_once(told_of_one_row(first, call.batch_size))
        self._warn_once(told_of_changed_buffers(first, self.model, count))
        while rest:
            staged = self._stages(signature, call, call.batch_size - sum(rest), rest)
            graphs.append(staged.graph)
            served = list(takewhile(functools.partial(staged.graph.serves, values=sizes), rest))
            groups.append((self._group(staged, len(served), rest[0]), served))
            rest = rest[len(served) :]
        if count > 1:
            check_outputs(graphs[0])
            check_batch(self._findings(graphs[0], call.batch_size, sizes), count)
            for warning in warnings_of(graphs[0].findings):
                self._warn_once(warning)
        check_groups(groups)
        return groups

    def require_served(self, signature: Signature, sizes: Sequence[int], values: Sizes) -> None:
        """Refuse microbatches of several sizes that one graph is not right for, whoever runs which of them.

        Raises:
            InputError: the model makes a constant of the batch, or was captured for one size.
        """
        graphs = [staged.graph for staged in self._captures.staged[signature]]
        check_served(graphs, sizes, values, self.dynamic)

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)

    def read(self, signature: Signature) -> dict[Place, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        return self._captures.read(signature)

    def traced(self, mode: Mode) -> nn.Module:
        """A module that has model and loss where ``read`` finds values."""
        if mode not in self._traced:
            self._traced[mode] = traced_module(self.model, self.loss_fn, mode)
        return self._traced[mode]

    def _choose(self, signature: Signature, call: Call) -> int:
        """The number of microbatches of the call. The first call also settles where stages are."""
        batch, trains = call.batch_size, signature.kind.mode is Mode.TRAIN
        if self._settled is None:
            return self._settle(signature, self._capture_first(signature, call), batch)
        sizes = split_sizes(batch, self._counts(self.autotuner, batch)[0])
        staged = self._stages(signature, call, 0, sizes)
        if self._is_taken_whole(
            self._findings(staged.graph, batch, variable_values(signature.kind.variables, call.leaves))
        ):
            return 1
        counts = self._counts(self.autotuner, batch)
        if self.searches_shard and trains:
            choice = self._settle_shard(signature, call, sizes, counts)
        elif len(counts) > 1 and trains:
            choice = self._choose_on(staged, batch, counts)
        else:
            return counts[0]
        self._keep(choice)
        return choice.best.plan.num_microbatches

    def _capture_first(self, signature: Signature, call: Call) -> TrainingGraph:
        """The graph of the first call. What it joins may decide the number of microbatches."""
        sizes = split_sizes(call.batch_size, self._counts(self.autotuner, call.batch_size)[0])
        graph = self._capture(signature, call, 0, sizes)
        again = split_sizes(call.batch_size, self._counts(self.autotuner, call.batch_size)[0])
        return graph if graph.serves(again[0]) else self._capture(signature, call, 0, again)

    def _settle_shard(
        self, signature: Signature, call: Call, sizes: Sequence[int], counts: Sequence[int]
    ) -> Choice:
        """Decide what replicas divide, where an evaluation has settled where stages are."""

        def choose() -> tuple[Autotuner, Choice]:
            self._captures.staged.pop(signature, None)
            staged = self._stages(signature, call, 0, sizes)
            return self.autotuner, self._choose_on(staged, call.batch_size, counts)

        _, choice = self._best_sharded(choose)
        self._captures.staged[signature] = [choice.base]
        return choice

    def _choose_on(self, staged: StagedGraph, batch: int, counts: Sequence[int]) -> Choice:
        assert self._settled is not None
        with self.watch.timed("search"):
            return self.autotuner.choose_on(staged, self._settled.placement, batch, counts)

    def _settle(self, signature: Signature, graph: TrainingGraph, batch: int) -> int:
        """Decide how steps run and, for good, where stages and parameters are; returns the microbatches."""
        if self.measures_processor:
            self._measure_processor()

        def cut(how: Pass) -> StagedGraph:
            return self._cut(graph, how, self.options)

        if graph.mode is not Mode.TRAIN:
            found = self._findings(graph, batch, graph.planned)
            count = 1 if self._is_taken_whole(found) else self._counts(self.autotuner, batch)[0]
            placement = self.autotuner.policy.placements([count])[0]
            size = split_sizes(batch, count)[0]
            staged = cut(self.autotuner.fastest_cut(placement, self.options.topology, count, size))
            self._settle_on(signature, staged, placement)
            return count
        with self.watch.timed("search"):
            choose = functools.partial(self._choose_replicas, cut, batch, joins_replicas(graph))
            self.autotuner, choice = self._best_sharded(choose)
            refuse(choice.best, functools.partial(self._best_on, choose))
        self._settle_on(signature, choice.base, choice.best.schedule.placement)
        self._keep(choice)
        counts = self._counts(self.autotuner, batch)
        return choice.best.plan.num_microbatches if len(counts) > 1 else counts[0]

    def _measure_processor(self) -> None:
        """Take what this machine was measured at for the costs; one process decides for all."""
        with self.watch.timed("measure the processor"):
            model = measured_processor()
        self.options = replace(self.options, device_model=model)
        self.autotuner = replace(self.autotuner, bytes_per_second=model.memory_bytes_per_second)

    def _best_on(self, choose: Callable[[], tuple[Autotuner, Choice]], topology: Topology) -> Trial:
        """The best trial on other devices."""
        given, self.options = self.options, replace(self.options, topology=topology)
        try:
            return choose()[1].best
        finally:
            self.options = given

    def _best_sharded(self, choose: Callable[[], tuple[Autotuner, Choice]]) -> tuple[Autotuner, Choice]:
        """The best choice with any level of sharding, if that is searched; every later step follows it."""
        if not self.searches_shard:
            return choose()
        self.searches_shard = False
        found = []
        for shard in (None, *Shard):
            self.options = replace(self.options, ending=replace(self.options.ending, shard=shard))
            with suppress(InputError) if shard else nullcontext():  # what cannot be sharded
                found.append((self.options, choose()))
        self.options, best = min(found, key=lambda each: each[1][1].best.score)
        return best

    def _choose_replicas(self, cut: CutGraph, batch: int, joins: bool) -> tuple[Autotuner, Choice]:
        """The best way to run a step, and the autotuner that found it.

        If the numbers of replicas may be chosen, all that divide the ranks are tried, and where a schedule
        runs stages with different numbers, those that the planner gives each stage. If not, but the number of
        microbatches may, they are tried as well, so that the plan can say what they would gain. A graph that
        ``joins`` replicas is for their number.
        """
        asked, obstacle = self.autotuner, None
        found, others = list[tuple[Autotuner, Choice]](), list[tuple[Autotuner, Choice]]()
        try:
            found.append(self._choose_arranged(asked, cut, batch))
        except PlanError as error:
            if not self.searches_replicas:
                raise
            obstacle = error
        if self.dynamic and not joins and (self.searches_replicas or not self.microbatches):
            for replicas in asked.policy.other_replicas():
                with suppress(InputError, PlanError):
                    others.append(self._choose_arranged(asked.with_replicas(replicas), cut, batch))
            for policy in asked.policy.of_unequal_stages():
                tuner = replace(asked, policy=policy)
                counts = self._counts(tuner, batch)
                others += tuner.choose_unequal(cut, self.options.topology, batch, counts)
        if obstacle and not others:
            raise obstacle
        chosen = best_of([*found, *others]) if self.searches_replicas else found[0]
        tried = [alternative for _, choice in others for alternative in choice.tried]
        return chosen[0], replace(chosen[1], tried=(*chosen[1].tried, *tried))

    def _choose_arranged(self, tuner: Autotuner, cut: CutGraph, batch: int) -> tuple[Autotuner, Choice]:
        """The best way with any arrangement of replicas on ranks, and the autotuner that found it."""
        tuners = tuner.arrangements(self.options.topology)
        return best_of([(each, self._choose_with(each, cut, batch)) for each in tuners])

    def _choose_with(self, tuner: Autotuner, cut: CutGraph, batch: int) -> Choice:
        counts = self._counts(tuner, batch)
        return tuner.choose(cut, self.options.topology, tuner.policy.placements(counts), batch, counts)

    def _counts(self, tuner: Autotuner, batch: int) -> list[int]:
        """The numbers of microbatches on offer."""
        counts = [self.microbatches] if self.microbatches else tuner.policy.counts(batch)
        return counts if self.dynamic else counts[:1]

    def _settle_on(self, signature: Signature, staged: StagedGraph, placement: Placement) -> None:
        graph = staged.graph
        self._settled = Settled(
            placement, owners_of(graph), graph.ranks, divided(graph), staged.cut_operators
        )
        self._captures.staged[signature] = [staged]

    def _keep(self, choice: Choice) -> None:
        """Compile what was chosen, which later steps follow."""
        best = choice.best
        self.autotuner = self.autotuner.following(best.schedule)
        key = choice.base, best.plan.num_microbatches, best.plan.microbatch_size
        if key not in self._compiled:
            self._compiled[key] = self._finish(best, choice.tried, choice.base)

    def _group(self, staged: StagedGraph, num_microbatches: int, size: int) -> Compiled:
        """What runs so many microbatches, the first of which has ``size`` rows."""
        key = staged, num_microbatches, size
        if key not in self._compiled:
            assert self._settled is not None
            policy, placement = self.autotuner.policy, self._settled.placement
            if staged.graph.mode is Mode.TRAIN:
                self._keep(self._choose_on(staged, size * num_microbatches, [num_microbatches]))
            else:
                trial = staged.trial(policy.forwards(num_microbatches, placement), size)
                self._compiled[key] = self._finish(trial, (), staged)
        return self._compiled[key]

    def _stages(self, signature: Signature, call: Call, start: int, sizes: Sequence[int]) -> StagedGraph:
        """The cut graph that serves the first microbatch of these ``sizes``; it begins at row ``start``."""
        assert self._settled is not None
        known = self._captures.staged.setdefault(signature, [])
        values = variable_values(signature.kind.variables, call.leaves)
        for staged in known:
            if staged.graph.serves(sizes[0], values):
                return staged
        settled = self._settled
        follow = FollowOwners(
            len(settled.placement), settled.owners, settled.ranks, settled.divided, settled.cut
        )
        graph = self._capture(signature, call, start, sizes)
        known.append(self._cut(graph, follow, replace(self.options, profile=None)))
        return known[-1]

    def _capture(self, signature: Signature, call: Call, start: int, sizes: Sequence[int]) -> TrainingGraph:
        """The graph of one microbatch, for any size of microbatch if these have several or may change.

        It is for any value of the variables as well, of those for which that was not found to be impossible.
        """
        symbolic, replicas = self.dynamic or len(set(sizes)) > 1, self.autotuner.policy.replicas
        variables = signature.kind.variables
        traced = functools.partial(
            capture,
            self.model,
            self.loss_fn,
            signature.kind.mode,
            call.rows(start, start + sizes[0]),
            self.canonical,
            self.device,
            batch=call,
            adds_up=not self.microbatch_weight,
            outputs=signature.kind.outputs,
            num_replicas=None if self.searches_replicas or isinstance(replicas, tuple) else replicas,
        )
        require_wide_weights(self.precision, self.model)
        with self.watch.timed("capture and differentiate"), autocast(self.precision, self.device):
            graph = self._trace_variables(signature, traced) or traced(symbolic=symbolic)
        if graph.joined and self.microbatches is None:
            log.info("%s joins replicas: a step is one round, of %s microbatches", graph.joined, replicas)
            assert isinstance(replicas, int), "a model that joins unequal replicas is refused"
            self.microbatches = replicas
        graph = replace(graph, variables=variables, planned=variable_values(variables, call.leaves))
        found = self._findings(graph, call.batch_size, graph.planned)
        if self._is_taken_whole(found):
            self.microbatches = 1 if graph.mode is Mode.TRAIN else self.microbatches
        elif len(sizes) > 1:
            check_batch(found, len(sizes))
        return graph

    def _findings(self, graph: TrainingGraph, batch_size: int, values: Sizes) -> Findings:
        """What is found of a batch of so many rows. Whoever weighs microbatches takes each by itself."""
        return graph.findings if self.microbatch_weight else graph.found_in(batch_size, values)

    def _is_taken_whole(self, found: Findings) -> bool:
        """Whether the batch is one microbatch, since rows depend on others, and nobody asked for several.

        First another dimension of the arguments is tried, if there is one that may be the batch.
        """
        why = found.mixed or found.output
        if not why or self.tries_axes or self.microbatches is not None or self.autotuner.policy.replicas != 1:
            return False
        self._warn_once(f"a step has one microbatch, the whole batch, for rows depend on other rows: {why}")
        return True

    def _trace_variables(
        self, signature: Signature, traced: Callable[..., TrainingGraph]
    ) -> TrainingGraph | None:
        """A graph in which variables are symbolic: all of them, or the sizes alone, or the numbers alone.

        What cannot be done is not tried again for the signature.
        """
        if not self.dynamic:
            return None
        attempts = self._symbolic.setdefault(signature, symbolic_choices(signature.kind.variables))
        while attempts:
            try:
                return traced(variables=attempts[0])
            except FixedVariableError as error:
                names = ", ".join(dict.fromkeys(variable.path for variable in attempts.pop(0)))
                log.warning("each value of %s is compiled on its own: %s", names, error)
        return None

    def _cut(self, graph: TrainingGraph, cut: Pass, options: CompilerOptions) -> StagedGraph:
        return StagedGraph(graph, cut, options, observers=(self.watch.observe,))

    def _finish(self, trial: Trial, tried: Sequence[Alternative], base: StagedGraph) -> Compiled:
        refuse_on_its_stages(trial, base, functools.partial(self._again_on, trial))
        with self.watch.timed("generate code"):
            artifact = trial.artifact()
            trial.staged.write_dumps()
        name = "auto" if self.autotuner.policy.choice == "auto" else trial.plan.schedule
        plan = replace(
            trial.plan,
            schedule=name,
            microbatch_weight=self.microbatch_weight,
            alternatives=refused(tried, trial),
            shard_costs=shard_costs(trial),
        )
        graph = trial.staged.graph
        outputs = (role for role, _ in graph.outputs if isinstance(role, Output))
        axes = {
            name: role.axis
            for name, role in zip(plan.outputs, outputs, strict=True)
            if role.axis and role.axis.has_outer
        }
        return Compiled(next(self._numbers), replace(artifact, plan=plan), graph.output_spec, axes)

    def _again_on(self, trial: Trial, staged: StagedGraph) -> Trial:
        """As many microbatches of as many rows on other stages."""
        count, size = trial.plan.num_microbatches, trial.plan.microbatch_size
        if staged.graph.mode is Mode.TRAIN:
            return self._choose_on(staged, size * count, [count]).best
        return staged.trial(trial.schedule, size)
