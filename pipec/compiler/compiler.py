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

from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.graph_symbols import SpecializedVariableError
from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import traced_step_without_call
from pipec.capture.tracer import capture
from pipec.capture.variable_history import symbolic_candidates
from pipec.compiler.alternatives import rejected_alternatives, sharding_costs
from pipec.compiler.autotuner import Autotuner, CutGraph, TuningResult, fastest_result
from pipec.compiler.batch_equivalence import (
    batch_warnings,
    changed_buffer_warning,
    has_model_collectives,
    require_independent_rows,
    several_rounds_warning,
    single_row_warning,
)
from pipec.compiler.calibration_cache import cached_calibration
from pipec.compiler.capture_cache import CaptureCache, CaptureKey, CaptureSignature
from pipec.compiler.fixed_placement import FixedPlacement
from pipec.compiler.infeasible import require_memory, require_memory_on_fixed_stages
from pipec.compiler.microbatch_groups import (
    CompiledArtifact,
    MicrobatchGroups,
    check_batch_counts,
    check_outputs,
    require_one_graph,
)
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged_graph import EvaluatedPlan, StagedGraph
from pipec.compiler.stopwatch import Stopwatch
from pipec.errors import InputError, PlanError
from pipec.graph import BatchFindings, Output, TrainingGraph
from pipec.hardware.topology import Topology
from pipec.ir import Alternative, Mode, Placement, Precision, ShardingLevel, Sizes, Variable
from pipec.ir.batch_split import require_equal_rows, split_sizes, variable_values
from pipec.passes import Pass
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.follow_placement import FollowPlacement, parameter_stages
from pipec.torch_compat import ValuePath

log = logging.getLogger("pipec")


@dataclass
class Compiler:
    """Compiles the calls of one model. The first call decides where stages are, and what they own.

    ``device`` is one of those that will run the code. A model on another kind of device is captured as if it
    were there. ``microbatches`` is the number of microbatches of a batch; None leaves it to ``autotuner``.
    Unless ``dynamic``, the microbatches of a call are captured for the one size they have, if it is one.
    Costs are then known for that size alone, so nothing is searched. With ``tunes_replicas`` the first call
    chooses how many replicas stages have, and with ``tunes_shard`` the first training step what they shard.
    ``microbatch_weight`` is that of the plan. ``precision`` is what operators compute in, if not in the
    model's own types. If it ``calibrates_cpu``, costs are those measured on this machine. While the pipeline
    ``refuses_mixed_rows``, a batch whose rows depend on one another is refused. ``stopwatch`` says how long
    each step of all compilations took together.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    autotuner: Autotuner
    options: CompilerOptions
    device: torch.device
    canonical: Mapping[str, str]
    microbatches: int | None = None
    dynamic: bool = True
    tunes_replicas: bool = False
    tunes_shard: bool = False
    microbatch_weight: str = ""
    precision: Precision | None = None
    calibrates_cpu: bool = False
    refuses_mixed_rows: bool = False
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _fixed_placement: FixedPlacement | None = None
    _traced: dict[Mode, nn.Module] = field(default_factory=dict)
    _captures: CaptureCache = field(default_factory=CaptureCache)
    _compiled: dict[tuple[StagedGraph, int, int], CompiledArtifact] = field(default_factory=dict)
    _symbolic: dict[CaptureSignature, list[tuple[Variable, ...]]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _warned: set[str] = field(default_factory=set)

    def of(self, model: nn.Module) -> "Compiler":
        """One for a copy of the model, that knows where stages are and has compiled nothing."""
        fresh: dict[str, Any] = {"_traced": {}, "_captures": CaptureCache(), "_compiled": {}, "_symbolic": {}}
        return replace(self, model=model, stopwatch=Stopwatch(), **fresh, _warned=set())

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """Which capture of a capture key is still right; a new number if none is."""
        return self._captures.version(key, call)

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether what was captured is still right for the model."""
        return not self._captures.guard_failure(signature, None)

    def retain(self, numbers: Collection[int]) -> None:
        """Let go of what was compiled, but of these."""
        self._compiled = {key: made for key, made in self._compiled.items() if made.number in numbers}
        used = {staged for staged, _, _ in self._compiled}
        self._captures.retain(used)
        for staged in used:
            staged.clear_evaluated()
        self._symbolic = {key: x for key, x in self._symbolic.items() if key in self._captures.staged}

    def compile(self, signature: CaptureSignature, call: ModelCall, variables: str = "") -> MicrobatchGroups:
        """What runs the microbatches of ``call``: groups of consecutive ones, with the rows of each.

        There is one group unless the model specialises on the number of rows. ``variables`` is what about the
        variables of the call is new.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        reason = self._captures.log_recompile(signature, call, self.model, variables)
        with self.stopwatch.reporting(f"pipec: compiling, {reason}"):
            return self._compile(signature, call)

    def _compile(self, signature: CaptureSignature, call: ModelCall) -> MicrobatchGroups:
        sizes = variable_values(signature.key.variables, call.leaves)
        count = self._choose(signature, call)
        groups, graphs, rest = [], [], split_sizes(call.batch_size, count)
        first = self._captures.staged[signature][0].graph
        if has_model_collectives(first):
            require_equal_rows(rest)
        self._warn_once(several_rounds_warning(first, self.autotuner.policy.replicas, count))
        self._warn_once(single_row_warning(first, call.batch_size))
        self._warn_once(changed_buffer_warning(first, self.model, count))
        while rest:
            staged = self._stages(signature, call, call.batch_size - sum(rest), rest)
            graphs.append(staged.graph)
            served = list(takewhile(functools.partial(staged.graph.is_valid_for, values=sizes), rest))
            groups.append((self._group(staged, len(served), rest[0]), served))
            rest = rest[len(served) :]
        if count > 1:
            check_outputs(graphs[0])
            require_independent_rows(self._findings(graphs[0], call.batch_size, sizes), count)
            for warning in batch_warnings(graphs[0].findings):
                self._warn_once(warning)
        check_batch_counts(groups)
        return groups

    def require_one_graph_for(self, signature: CaptureSignature, sizes: Sequence[int], values: Sizes) -> None:
        """Refuse microbatches of several sizes that one graph is not right for, whoever runs which of them.

        Raises:
            InputError: the model makes a constant of the batch, or was captured for one size.
        """
        graphs = [staged.graph for staged in self._captures.staged[signature]]
        require_one_graph(graphs, sizes, values, self.dynamic)

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)

    def read(self, signature: CaptureSignature) -> dict[ValuePath, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        return self._captures.read(signature)

    def traced(self, mode: Mode) -> nn.Module:
        """A module that has model and loss where ``read`` finds values."""
        if mode not in self._traced:
            self._traced[mode] = traced_step_without_call(self.model, self.loss_fn, mode)
        return self._traced[mode]

    def _choose(self, signature: CaptureSignature, call: ModelCall) -> int:
        """The number of microbatches of the call. The first call also settles where stages are."""
        batch, trains = call.batch_size, signature.key.mode is Mode.TRAIN
        if self._fixed_placement is None:
            return self._fix_placement(signature, self._capture_first(signature, call), batch)
        sizes = split_sizes(batch, self._counts(self.autotuner, batch)[0])
        staged = self._stages(signature, call, 0, sizes)
        if self._is_taken_whole(
            self._findings(staged.graph, batch, variable_values(signature.key.variables, call.leaves))
        ):
            return 1
        counts = self._counts(self.autotuner, batch)
        if self.tunes_shard and trains:
            choice = self._choose_shard_level(signature, call, sizes, counts)
        elif len(counts) > 1 and trains:
            choice = self._choose_on(staged, batch, counts)
        else:
            return counts[0]
        self._keep(choice)
        return choice.best.plan.num_microbatches

    def _capture_first(self, signature: CaptureSignature, call: ModelCall) -> TrainingGraph:
        """The graph of the first call. What it joins may decide the number of microbatches."""
        sizes = split_sizes(call.batch_size, self._counts(self.autotuner, call.batch_size)[0])
        graph = self._capture(signature, call, 0, sizes)
        again = split_sizes(call.batch_size, self._counts(self.autotuner, call.batch_size)[0])
        return graph if graph.is_valid_for(again[0]) else self._capture(signature, call, 0, again)

    def _choose_shard_level(
        self, signature: CaptureSignature, call: ModelCall, sizes: Sequence[int], counts: Sequence[int]
    ) -> TuningResult:
        """Choose the level of sharding where an evaluation has fixed the stages."""

        def choose() -> tuple[Autotuner, TuningResult]:
            self._captures.staged.pop(signature, None)
            staged = self._stages(signature, call, 0, sizes)
            return self.autotuner, self._choose_on(staged, call.batch_size, counts)

        _, choice = self._best_sharded(choose)
        self._captures.staged[signature] = [choice.base]
        return choice

    def _choose_on(self, staged: StagedGraph, batch: int, counts: Sequence[int]) -> TuningResult:
        assert self._fixed_placement is not None
        with self.stopwatch.timed("search"):
            return self.autotuner.choose_on(staged, self._fixed_placement.placement, batch, counts)

    def _fix_placement(self, signature: CaptureSignature, graph: TrainingGraph, batch: int) -> int:
        """Decide how steps run and, for good, where stages and parameters are; returns the microbatches."""
        if self.calibrates_cpu:
            self._calibrate_cpu()

        def cut(how: Pass) -> StagedGraph:
            return self._cut(graph, how, self.options)

        if graph.mode is not Mode.TRAIN:
            found = self._findings(graph, batch, graph.planned_sizes)
            count = 1 if self._is_taken_whole(found) else self._counts(self.autotuner, batch)[0]
            placement = self.autotuner.policy.placements([count])[0]
            size = split_sizes(batch, count)[0]
            staged = cut(self.autotuner.fastest_cut(placement, self.options.topology, count, size))
            self._record_placement(signature, staged, placement)
            return count
        with self.stopwatch.timed("search"):
            choose = functools.partial(self._choose_replicas, cut, batch, has_model_collectives(graph))
            self.autotuner, choice = self._best_sharded(choose)
            require_memory(choice.best, functools.partial(self._best_on, choose))
        self._record_placement(signature, choice.base, choice.best.schedule.placement)
        self._keep(choice)
        counts = self._counts(self.autotuner, batch)
        return choice.best.plan.num_microbatches if len(counts) > 1 else counts[0]

    def _calibrate_cpu(self) -> None:
        """Take what this machine was measured at for the costs; one process decides for all."""
        with self.stopwatch.timed("calibrate the CPU"):
            model = cached_calibration()
        self.options = replace(self.options, device_model=model)
        self.autotuner = replace(self.autotuner, memory_bytes_per_second=model.memory_bytes_per_second)

    def _best_on(
        self, choose: Callable[[], tuple[Autotuner, TuningResult]], topology: Topology
    ) -> EvaluatedPlan:
        """The best plan on other devices."""
        given, self.options = self.options, replace(self.options, topology=topology)
        try:
            return choose()[1].best
        finally:
            self.options = given

    def _best_sharded(
        self, choose: Callable[[], tuple[Autotuner, TuningResult]]
    ) -> tuple[Autotuner, TuningResult]:
        """The best choice with any level of sharding, if that is searched; every later step follows it."""
        if not self.tunes_shard:
            return choose()
        self.tunes_shard = False
        found = []
        for shard in (None, *ShardingLevel):
            self.options = replace(self.options, sync_spec=replace(self.options.sync_spec, shard=shard))
            with suppress(InputError) if shard else nullcontext():  # what cannot be sharded
                found.append((self.options, choose()))
        self.options, best = min(found, key=lambda each: each[1][1].best.score)
        return best

    def _choose_replicas(self, cut: CutGraph, batch: int, joins: bool) -> tuple[Autotuner, TuningResult]:
        """The best way to run a step, and the autotuner that found it.

        If the numbers of replicas may be chosen, all that divide the ranks are tried, and where a schedule
        runs stages with different numbers, those that the planner gives each stage. If not, but the number of
        microbatches may, they are tried as well, so that the plan can say what they would gain. A graph that
        ``joins`` replicas is for their number.
        """
        asked, first_error = self.autotuner, None
        found, others = list[tuple[Autotuner, TuningResult]](), list[tuple[Autotuner, TuningResult]]()
        try:
            found.append(self._choose_arranged(asked, cut, batch))
        except PlanError as error:
            if not self.tunes_replicas:
                raise
            first_error = error
        if self.dynamic and not joins and (self.tunes_replicas or not self.microbatches):
            for replicas in asked.policy.other_replica_counts():
                with suppress(InputError, PlanError):
                    others.append(self._choose_arranged(asked.with_replicas(replicas), cut, batch))
            for policy in asked.policy.with_unequal_replicas():
                tuner = replace(asked, policy=policy)
                counts = self._counts(tuner, batch)
                others += tuner.choose_unequal_replicas(cut, self.options.topology, batch, counts)
        if first_error and not others:
            raise first_error
        chosen = fastest_result([*found, *others]) if self.tunes_replicas else found[0]
        tried = [alternative for _, choice in others for alternative in choice.alternatives]
        return chosen[0], replace(chosen[1], alternatives=(*chosen[1].alternatives, *tried))

    def _choose_arranged(self, tuner: Autotuner, cut: CutGraph, batch: int) -> tuple[Autotuner, TuningResult]:
        """The best way with any arrangement of replicas on ranks, and the autotuner that found it."""
        tuners = tuner.replica_arrangements(self.options.topology)
        return fastest_result([(each, self._choose_with(each, cut, batch)) for each in tuners])

    def _choose_with(self, tuner: Autotuner, cut: CutGraph, batch: int) -> TuningResult:
        counts = self._counts(tuner, batch)
        return tuner.choose(cut, self.options.topology, tuner.policy.placements(counts), batch, counts)

    def _counts(self, tuner: Autotuner, batch: int) -> list[int]:
        """The numbers of microbatches on offer."""
        counts = [self.microbatches] if self.microbatches else tuner.policy.microbatch_counts(batch)
        return counts if self.dynamic else counts[:1]

    def _record_placement(
        self, signature: CaptureSignature, staged: StagedGraph, placement: Placement
    ) -> None:
        graph = staged.graph
        self._fixed_placement = FixedPlacement(
            placement, parameter_stages(graph), graph.assignment.ranks, staged.operator_stages
        )
        self._captures.staged[signature] = [staged]

    def _keep(self, choice: TuningResult) -> None:
        """Compile what was chosen, which later steps follow."""
        best = choice.best
        self.autotuner = self.autotuner.for_next_steps(best.schedule)
        key = choice.base, best.plan.num_microbatches, best.plan.microbatch_size
        if key not in self._compiled:
            self._compiled[key] = self._finish(best, choice.alternatives, choice.base)

    def _group(self, staged: StagedGraph, num_microbatches: int, size: int) -> CompiledArtifact:
        """What runs so many microbatches, the first of which has ``size`` rows."""
        key = staged, num_microbatches, size
        if key not in self._compiled:
            assert self._fixed_placement is not None
            policy, placement = self.autotuner.policy, self._fixed_placement.placement
            if staged.graph.mode is Mode.TRAIN:
                self._keep(self._choose_on(staged, size * num_microbatches, [num_microbatches]))
            else:
                evaluated = staged.evaluate(policy.forward_schedule(num_microbatches, placement), size)
                self._compiled[key] = self._finish(evaluated, (), staged)
        return self._compiled[key]

    def _stages(
        self, signature: CaptureSignature, call: ModelCall, start: int, sizes: Sequence[int]
    ) -> StagedGraph:
        """The cut graph that serves the first microbatch of these ``sizes``; it begins at row ``start``."""
        assert self._fixed_placement is not None
        known = self._captures.staged.setdefault(signature, [])
        values = variable_values(signature.key.variables, call.leaves)
        for staged in known:
            if staged.graph.is_valid_for(sizes[0], values):
                return staged
        fixed = self._fixed_placement
        follow = FollowPlacement(
            len(fixed.placement),
            fixed.parameter_stages,
            fixed.ranks,
            fixed.operator_stages,
        )
        graph = self._capture(signature, call, start, sizes)
        known.append(self._cut(graph, AssignStages(follow), replace(self.options, profile=None)))
        return known[-1]

    def _capture(
        self, signature: CaptureSignature, call: ModelCall, start: int, sizes: Sequence[int]
    ) -> TrainingGraph:
        """The graph of one microbatch, for any size of microbatch if these have several or may change.

        It is for any value of the variables as well, of those for which that was not found to be impossible.
        """
        symbolic, replicas = self.dynamic or len(set(sizes)) > 1, self.autotuner.policy.replicas
        variables = signature.key.variables
        traced = functools.partial(
            capture,
            self.model,
            self.loss_fn,
            signature.key.mode,
            call.rows(start, start + sizes[0]),
            self.canonical,
            self.device,
            batch=call,
            rewrite_loss=not self.microbatch_weight,
            outputs=signature.key.outputs,
            num_replicas=None if self.tunes_replicas or isinstance(replicas, tuple) else replicas,
        )
        refuse_float16_weights(self.precision, self.model)
        with self.stopwatch.timed("capture and differentiate"), autocast(self.precision, self.device):
            graph = self._trace_variables(signature, traced) or traced(symbolic=symbolic)
        if graph.first_collective and self.microbatches is None:
            log.info(
                "%s is a collective of replicas: a step is one round, of %s microbatches",
                graph.first_collective,
                replicas,
            )
            assert isinstance(replicas, int), "a model that joins unequal replicas is refused"
            self.microbatches = replicas
        graph = replace(graph, variables=variables, planned_sizes=variable_values(variables, call.leaves))
        found = self._findings(graph, call.batch_size, graph.planned_sizes)
        if self._is_taken_whole(found):
            self.microbatches = 1 if graph.mode is Mode.TRAIN else self.microbatches
        elif len(sizes) > 1:
            require_independent_rows(found, len(sizes))
        return graph

    def _findings(self, graph: TrainingGraph, batch_size: int, values: Sizes) -> BatchFindings:
        """What is found of a batch of so many rows. Whoever weighs microbatches takes each by itself."""
        return graph.findings if self.microbatch_weight else graph.findings_for(batch_size, values)

    def _is_taken_whole(self, found: BatchFindings) -> bool:
        """Whether the batch is one microbatch, since rows depend on others, and nobody asked for several.

        First another dimension of the arguments is tried, if there is one that may be the batch.
        """
        why = found.mixed_rows or found.output
        if (
            not why
            or self.refuses_mixed_rows
            or self.microbatches is not None
            or self.autotuner.policy.replicas != 1
        ):
            return False
        self._warn_once(f"a step has one microbatch, the whole batch, for rows depend on other rows: {why}")
        return True

    def _trace_variables(
        self, signature: CaptureSignature, traced: Callable[..., TrainingGraph]
    ) -> TrainingGraph | None:
        """A graph in which variables are symbolic: all of them, or the sizes alone, or the numbers alone.

        What cannot be done is not tried again for the signature.
        """
        if not self.dynamic:
            return None
        attempts = self._symbolic.setdefault(signature, symbolic_candidates(signature.key.variables))
        while attempts:
            try:
                return traced(variables=attempts[0])
            except SpecializedVariableError as error:
                names = ", ".join(dict.fromkeys(variable.path for variable in attempts.pop(0)))
                log.warning("each value of %s is compiled on its own: %s", names, error)
        return None

    def _cut(self, graph: TrainingGraph, cut: Pass, options: CompilerOptions) -> StagedGraph:
        return StagedGraph(graph, cut, options, observers=(self.stopwatch.observe,))

    def _finish(
        self, evaluated: EvaluatedPlan, tried: Sequence[Alternative], base: StagedGraph
    ) -> CompiledArtifact:
        require_memory_on_fixed_stages(evaluated, base, functools.partial(self._again_on, evaluated))
        with self.stopwatch.timed("generate code"):
            artifact = evaluated.artifact()
            evaluated.staged.write_dumps()
        name = "auto" if self.autotuner.policy.source == "auto" else evaluated.plan.schedule
        plan = replace(
            evaluated.plan,
            schedule=name,
            microbatch_weight=self.microbatch_weight,
            alternatives=rejected_alternatives(tried, evaluated),
            sharding_costs=sharding_costs(evaluated),
        )
        graph = evaluated.staged.graph
        outputs = (role for role, _ in graph.outputs if isinstance(role, Output))
        axes = {
            name: role.axis
            for name, role in zip(plan.outputs, outputs, strict=True)
            if role.axis and role.axis.has_outer
        }
        return CompiledArtifact(next(self._numbers), replace(artifact, plan=plan), graph.output_spec, axes)

    def _again_on(self, evaluated: EvaluatedPlan, staged: StagedGraph) -> EvaluatedPlan:
        """As many microbatches of as many rows on other stages."""
        count, size = evaluated.plan.num_microbatches, evaluated.plan.microbatch_size
        if staged.graph.mode is Mode.TRAIN:
            return self._choose_on(staged, size * count, [count]).best
        return staged.evaluate(evaluated.schedule, size)
