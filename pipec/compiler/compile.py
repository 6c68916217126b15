"""Compiles a call: capture it, try every candidate, take the best, generate code.

These are functions over values and keep no state: decisions and artifacts of earlier calls come in with the
request, and those of this call are returned. A number of microbatches is a *count*, and the rows of a
microbatch are its *size*.
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pipec.artifact.artifact import Artifact
from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import make_traced_step
from pipec.capture.tracer import CaptureRequest, capture_with_variables
from pipec.compiler.alternatives import rejected_alternatives, sharding_costs
from pipec.compiler.batch_equivalence import (
    batch_warnings,
    changed_buffer_warning,
    has_model_collectives,
    refuse_difference,
    refuse_unchecked_rows,
    require_concatenable_outputs,
    require_independent_graphs,
    require_independent_rows,
    require_rows_for_norms,
    several_rounds_warning,
    single_row_warning,
)
from pipec.compiler.candidate import Candidate
from pipec.compiler.check import CheckRequest, CheckResult, check_call
from pipec.compiler.compile_cache import CaptureKey, CompiledGraphs, MicrobatchGroups
from pipec.compiler.compiler import Compiler
from pipec.compiler.infeasible import require_memory
from pipec.compiler.search import CapturedStep, SearchResult, evaluate_stages, search
from pipec.compiler.staged_graph import StagedGraph
from pipec.errors import FailingModelError, PipecError, UnequalStepError
from pipec.graph import BatchFindings, TrainingGraph
from pipec.ir import Mode, Sizes
from pipec.ir.batch_split import require_equal_rows, split_sizes, variable_values

log = logging.getLogger("pipec")


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A call to compile, of the compiler's model in its present state.

    ``known`` are the graphs and artifacts of earlier calls with this key. ``has_changed`` is set if variables
    differ from the call before. With ``refuses_mixed_rows``, a batch whose rows depend on one
    another is refused instead of run as one microbatch. ``example`` is the part of the call
    whose values this process has, and ``unknown`` names the tensors of the model without values.
    """

    compiler: Compiler
    key: CaptureKey
    call: ModelCall
    known: CompiledGraphs
    has_changed: bool = False
    refuses_mixed_rows: bool = False
    example: ModelCall | None = None
    unknown: frozenset[str] = frozenset()

    @property
    def batch(self) -> int:
        return self.call.batch_size

    @property
    def trains(self) -> bool:
        return self.key.mode is Mode.TRAIN

    @functools.cached_property
    def values(self) -> Sizes:
        """The values of the call's variables."""
        return variable_values(self.key.variables, self.call.leaves)

    def valid_graph(self, graphs: Iterable[StagedGraph], size: int) -> StagedGraph | None:
        """The first of these graphs that is valid for a microbatch of ``size`` rows of the call, if any."""
        return next((each for each in graphs if each.graph.is_valid_for(size, self.values)), None)

    def findings(self, graph: TrainingGraph) -> BatchFindings:
        """The findings about the batch; with a microbatch weight, each microbatch is a batch of its own."""
        weighted = self.compiler.settings.microbatch_weight
        return graph.findings if weighted else graph.findings_for(self.batch, self.values)


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """The artifacts that run a call, the decisions for later calls, and what these may use again."""

    groups: MicrobatchGroups
    decided: Candidate
    known: CompiledGraphs


def compile_call(request: CompileRequest) -> CompiledCall:
    """Compile an artifact for each group of consecutive microbatches of a call.

    There is one group unless the model specialises on the number of rows.

    Raises:
        CaptureError, InputError, PlanError, InfeasibleError: the call cannot be compiled.
    """
    compiler, candidate = request.compiler, request.compiler.decided
    try:
        return _compile(request, candidate)
    except UnequalStepError as error:
        if request.refuses_mixed_rows or not _may_take_whole_batch(candidate):
            raise
        compiler.warn(f"a step has one microbatch, the whole batch: {str(error).splitlines()[1].strip()}")
        compiled = _compile(request, replace(candidate, num_microbatches=1))
        if request.trains:
            return compiled
        return replace(compiled, decided=replace(compiled.decided, num_microbatches=None))


def _compile(request: CompileRequest, candidate: Candidate) -> CompiledCall:
    graph, candidate, counts = _capture_first(request, candidate)
    choice = _choose(request, candidate, graph, counts)
    return _generate(request, choice)


# capture


def _capture_first(
    request: CompileRequest, candidate: Candidate
) -> tuple[TrainingGraph, Candidate, Sequence[int]]:
    """The graph of the first microbatch, the candidate that it allows, and the counts to try."""
    counts = candidate.counts(request.batch)
    try:
        graph = _graph_of(request, candidate, split_sizes(request.batch, counts[0]))
    except FailingModelError as failure:
        if counts[0] == 1 or not _may_take_whole_batch(candidate):
            raise
        graph = _capture_whole(request, candidate, failure)
        whole = replace(candidate, num_microbatches=1) if request.trains else candidate
        return graph, _restricted_by(graph, whole), [1]
    candidate = _restricted_by(graph, candidate)
    counts = candidate.counts(request.batch)
    if _takes_whole_batch(request, candidate, graph):
        counts = [1]
        candidate = replace(candidate, num_microbatches=1) if request.trains else candidate
    elif counts[0] > 1:
        require_independent_rows(request.findings(graph), counts[0], _options(candidate))
    sizes = split_sizes(request.batch, counts[0])
    if not graph.is_valid_for(sizes[0], request.values):
        graph = _graph_of(request, candidate, sizes)
    return graph, candidate, counts


def _graph_of(request: CompileRequest, candidate: Candidate, sizes: Sequence[int]) -> TrainingGraph:
    """The graph of an earlier call if it is valid for the first of these microbatches, or else a new one."""
    staged = request.valid_graph(request.known.graphs, sizes[0])
    return staged.captured if staged else _capture(request, candidate, sizes)


def _restricted_by(graph: TrainingGraph, candidate: Candidate) -> Candidate:
    """The candidate for steps on this graph: a tail and model collectives do not allow everything."""
    replicas = candidate.policy.replicas
    if graph.first_collective and candidate.num_microbatches is None:
        log.info(
            "%s is a collective of replicas: a step is one round, of %s microbatches",
            graph.first_collective,
            replicas,
        )
        assert isinstance(replicas, int), "model collectives of unequal replicas are refused"
        candidate = replace(candidate, num_microbatches=replicas)
    if graph.findings.tail:
        candidate = replace(candidate, policy=replace(candidate.policy, is_synchronous_only=True))
    return candidate


def _may_take_whole_batch(candidate: Candidate) -> bool:
    """Whether the batch may be one microbatch: the user has asked for no other number, nor for replicas."""
    return candidate.num_microbatches is None and candidate.policy.replicas == 1


def _capture_whole(
    request: CompileRequest, candidate: Candidate, failure: FailingModelError
) -> TrainingGraph:
    """The graph of the whole batch, for a model that fails on fewer rows, as with an adjacency matrix."""
    try:
        graph = _graph_of(request, candidate, [request.batch])
    except PipecError:
        raise failure from None
    request.compiler.warn(f"a step has one microbatch, the whole batch: with fewer rows, {failure.what}")
    return graph


def _takes_whole_batch(request: CompileRequest, candidate: Candidate, graph: TrainingGraph) -> bool:
    """Whether the batch must be one microbatch, because its rows depend on one another; warns if so.

    False if the user asked for several microbatches or replicas: ``require_independent_rows`` refuses then.
    """
    if request.refuses_mixed_rows or not _may_take_whole_batch(candidate):
        return False
    findings = request.findings(graph)
    if dependence := findings.mixed_rows or findings.output:
        request.compiler.warn(
            f"a step has one microbatch, the whole batch, for rows depend on other rows: {dependence}"
        )
    return bool(dependence)


def _capture(request: CompileRequest, candidate: Candidate, sizes: Sequence[int]) -> TrainingGraph:
    """The graph of one microbatch.

    ``sizes`` are the rows of the last microbatches of the call; the first of these is captured. The number of
    rows is symbolic if sizes differ or may change between calls. Variables are symbolic too where possible.
    """
    compiler, settings = request.compiler, request.compiler.settings
    start, replicas = request.batch - sum(sizes), candidate.policy.replicas

    one = CaptureRequest(
        compiler.model,
        settings.loss_fn,
        request.key.mode,
        request.call.rows(start, start + sizes[0]),
        compiler.canonical,
        settings.device,
        batch=request.call,
        rewrite_loss=not settings.microbatch_weight,
        may_have_tail=candidate.num_microbatches != 1 and not candidate.policy.is_asynchronous,
        loss_path=settings.loss_path,
        outputs=request.key.outputs,
        num_replicas=None if candidate.tunes_replicas or isinstance(replicas, tuple) else replicas,
        timed=compiler.stopwatch.timed,
    )
    refuse_float16_weights(settings.precision, compiler.model)
    with compiler.stopwatch.timed("capture"), autocast(settings.precision, settings.device):
        report = log.warning if request.has_changed else log.debug
        graph = capture_with_variables(one, request.key.variables, report)
    return replace(graph, variables=request.key.variables, planned_sizes=request.values)


# choose


@dataclass(frozen=True, eq=False)
class _Choice:
    """The decisions of a call, its cut graph and its count, and the search that found them, if any."""

    candidate: Candidate
    staged: StagedGraph
    count: int
    found: SearchResult | None = None


def _choose(
    request: CompileRequest, candidate: Candidate, graph: TrainingGraph, counts: Sequence[int]
) -> _Choice:
    """The fastest way to run the call. The first call also decides where stages and parameters are placed."""
    step = _step_on(request, graph)
    if request.trains and (candidate.cut is None or candidate.tunes_shard or len(counts) > 1):
        return _search(request, candidate, step)
    if candidate.cut is not None:
        return _Choice(candidate, step.cut_as_decided(candidate), counts[0])
    placement = candidate.policy.placements(counts[:1])[0]
    how = candidate.fastest_cut(placement, counts[0], split_sizes(request.batch, counts[0])[0])
    staged = step.cut(how, candidate.options)
    return _Choice(candidate.on_stages_of(staged, placement), staged, counts[0])


def _search(request: CompileRequest, candidate: Candidate, step: CapturedStep) -> _Choice:
    """The fastest candidate that trains on the call. Raises InfeasibleError if none fits into memory."""
    with request.compiler.stopwatch.timed("search"):
        found = search(step, candidate)
        best, chosen = found.best, found.candidate
        if candidate.cut is None:
            require_memory(best)
    decided = chosen.for_next_steps(best.schedule)
    if candidate.cut is None:
        decided = decided.on_stages_of(found.base, best.schedule.placement).gathering(best.plan)
    counts = chosen.counts(request.batch)
    count = best.plan.num_microbatches if len(counts) > 1 else counts[0]
    return _Choice(decided, found.base, count, found)


def _step_on(request: CompileRequest, graph: TrainingGraph) -> CapturedStep:
    """A step of the call on this graph, with the cut that an earlier call has made of it, if any."""
    known = next((each for each in request.known.graphs if each.captured is graph), None)
    return CapturedStep(graph, request.batch, (request.compiler.stopwatch.observe,), known)


# generate


def _generate(request: CompileRequest, choice: _Choice) -> CompiledCall:
    """Generate an artifact for each group of consecutive microbatches for which one graph is valid."""
    candidate, sizes = choice.candidate, split_sizes(request.batch, choice.count)
    graphs = list(dict.fromkeys([*request.known.graphs, choice.staged]))
    artifacts, groups, rest = dict(request.known.artifacts), MicrobatchGroups(), sizes
    while rest:
        staged = request.valid_graph(graphs, rest[0])
        if staged is None:
            graph = _capture(request, candidate, rest)
            candidate = _restricted_by(graph, candidate)
            staged = _step_on(request, graph).cut_as_decided(candidate)
            graphs.append(staged)
        _refuse_microbatches(request, candidate, staged.graph, sizes)
        checked = _check_new(request, staged, rest)
        _warn_of_microbatches(request, staged.graph, len(sizes), checked)
        group = list(takewhile(functools.partial(staged.graph.is_valid_for, values=request.values), rest))
        key = staged, len(group), rest[0]
        if key not in artifacts:
            found = choice.found
            if found is None or found.key != key:
                found = _evaluate(request, candidate, *key)
            if request.trains:
                candidate = candidate.for_next_steps(found.best.schedule)
            artifacts[key] = _artifact(request, candidate, found, str(checked or ""))
        groups.append((artifacts[key], group))
        rest = rest[len(group) :]
    if len(groups) > 1:
        require_independent_graphs(groups[0][0].plan, sizes)
    for staged in graphs:
        staged.clear_evaluated()
    return CompiledCall(groups, candidate, CompiledGraphs(tuple(graphs), artifacts))


def _options(candidate: Candidate) -> Mapping[str, Any]:
    """The options of the pipeline, with the replicas that follow from them."""
    return {**candidate.options.recorded, "replicas": candidate.policy.replicas}


def _refuse_microbatches(
    request: CompileRequest, candidate: Candidate, graph: TrainingGraph, sizes: Sequence[int]
) -> None:
    """Refuse microbatches that are proved not to be equivalent to the batch; warn of exceptions.

    Raises:
        InputError: they are not, or the model has collectives of replicas, and sizes differ.
    """
    count, compiler = len(sizes), request.compiler
    if has_model_collectives(graph):
        require_equal_rows(sizes)
    require_rows_for_norms(graph.findings, sizes)
    compiler.warn(several_rounds_warning(graph, candidate.policy.replicas, count))
    compiler.warn(single_row_warning(graph, request.batch))
    compiler.warn(changed_buffer_warning(graph, compiler.model, count))
    if count > 1:
        require_concatenable_outputs(graph)
        require_independent_rows(request.findings(graph), count, _options(candidate))


def _check_new(request: CompileRequest, staged: StagedGraph, sizes: Sequence[int]) -> CheckResult | None:
    """Compare a new graph with the model itself; None if it is not new. Raises as ``check_graph`` does."""
    if any(each.captured is staged.captured for each in request.known.graphs):
        return None
    checks = request.compiler.settings.checks
    result = check_graph(request, staged, sizes) if checks else CheckResult(reason='check is "off"')
    if len(sizes) > 1:
        refuse_unchecked_rows(result, request.example or request.call, staged.graph.findings)
    return result if checks else None


def check_graph(request: CompileRequest, staged: StagedGraph, sizes: Sequence[int]) -> CheckResult:
    """Compare a graph with the model itself on a few rows of the call.

    Raises:
        UnequalStepError: microbatches do not compute what the model computes of their rows.
        CaptureError: the graph computes something else than the model.
    """
    compiler, key = request.compiler, request.key
    call, settings = request.example or request.call, compiler.settings
    step = make_traced_step(
        CaptureRequest(
            compiler.model,
            settings.loss_fn,
            key.mode,
            call,
            outputs=key.outputs,
            loss_path=settings.loss_path,
        )
    )
    with compiler.stopwatch.timed("check"):
        result = check_call(
            CheckRequest(
                staged.graph,
                step,
                call,
                sizes,
                request.values,
                compiler.canonical,
                settings.device,
                settings.precision,
                request.unknown,
                settings.microbatch_weight,
            )
        )
    refuse_difference(result)
    log.debug("%s", result)
    return result


def _warn_of_microbatches(
    request: CompileRequest, graph: TrainingGraph, count: int, checked: CheckResult | None
) -> None:
    """Warn once of what differs from the unsplit model, and of what is neither proved nor checked."""
    if count > 1 and (checked is not None or not request.compiler.settings.checks):
        is_checked = checked is not None and checked.agreement is not None
        for warning in batch_warnings(graph.findings, is_checked):
            request.compiler.warn(warning)


def _evaluate(
    request: CompileRequest, candidate: Candidate, staged: StagedGraph, count: int, size: int
) -> SearchResult:
    """The fastest plan on a cut graph for ``count`` microbatches, the first of which has ``size`` rows."""
    if request.trains:
        with request.compiler.stopwatch.timed("search"):
            return evaluate_stages(staged, replace(candidate, num_microbatches=count), size * count)
    assert candidate.placement is not None
    schedule = candidate.policy.forward_schedule(count, candidate.placement)
    return SearchResult(candidate, staged.evaluate(schedule, size, candidate.options.sync_spec), staged)


def _artifact(request: CompileRequest, candidate: Candidate, found: SearchResult, checked: str) -> Artifact:
    """The artifact of an evaluated plan. Raises InfeasibleError if the plan does not fit into memory."""
    evaluated, compiler = found.best, request.compiler
    require_memory(evaluated, where=" on the stages that the first call has fixed")
    with compiler.stopwatch.timed("generate code"):
        artifact = evaluated.artifact()
        evaluated.staged.write_dumps()
    plan = replace(
        evaluated.plan,
        schedule="auto" if candidate.policy.source == "auto" else evaluated.plan.schedule,
        microbatch_weight=compiler.settings.microbatch_weight,
        checked=checked,
        alternatives=rejected_alternatives(found.alternatives, evaluated),
        sharding_costs=sharding_costs(evaluated),
    )
    graph = evaluated.staged.graph
    outputs = (role for role, _ in graph.returned)
    axes = {
        name: role.axis
        for name, role in zip(plan.outputs, outputs, strict=True)
        if role.axis and role.axis.has_outer
    }
    return replace(artifact, plan=plan, output_spec=graph.output_spec, axes=axes)
