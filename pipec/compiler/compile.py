"""Compiles a call: capture it, try every candidate, take the best, generate code.

These are functions over values and keep no state: decisions and artifacts of earlier calls come in as
arguments, and those of this call are returned.
"""

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import nn

from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.graph_symbols import SpecializedVariableError
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.capture.variable_history import symbolic_candidates
from pipec.compiler.alternatives import rejected_alternatives, sharding_costs
from pipec.compiler.batch_equivalence import (
    batch_warnings,
    changed_buffer_warning,
    has_model_collectives,
    require_independent_rows,
    require_proved_loss,
    require_rows_for_norms,
    several_rounds_warning,
    single_row_warning,
)
from pipec.compiler.calibration_cache import cached_calibration
from pipec.compiler.candidate import Candidate
from pipec.compiler.capture_key import CaptureKey
from pipec.compiler.compile_cache import CompiledGraphs
from pipec.compiler.compile_settings import CompileSettings
from pipec.compiler.infeasible import require_memory, require_memory_on_fixed_stages
from pipec.compiler.microbatch_groups import (
    CompiledArtifact,
    MicrobatchGroups,
    check_batch_counts,
    check_outputs,
)
from pipec.compiler.search import (
    CapturedStep,
    SearchResult,
    evaluate_stages,
    fitting_division,
    nearest_plan,
    search,
    search_within,
)
from pipec.compiler.search_budget import SearchBudget
from pipec.compiler.staged_graph import StagedGraph
from pipec.compiler.stopwatch import Stopwatch
from pipec.compiler.tail_costs import tail_costs
from pipec.graph import BatchFindings, TrainingGraph
from pipec.ir import Mode, Sizes, Variable
from pipec.ir.batch_split import require_equal_rows, split_sizes, variable_values

log = logging.getLogger("pipec")


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A call to compile, and the model in its present state.

    With ``refuses_mixed_rows``, a batch whose rows depend on one another is refused instead of run as one
    microbatch. ``warn`` issues each warning once. ``change`` says which
    variables differ from the call before, in words.
    """

    settings: CompileSettings
    model: nn.Module
    canonical: Mapping[str, str]
    key: CaptureKey
    call: ModelCall
    stopwatch: Stopwatch
    warn: Callable[[str], None]
    refuses_mixed_rows: bool = False
    change: str = ""

    @property
    def batch(self) -> int:
        return self.call.batch_size

    @functools.cached_property
    def values(self) -> Sizes:
        """The values of the call's variables."""
        return variable_values(self.key.variables, self.call.leaves)

    def step_of(self, graph: TrainingGraph, known: Sequence[StagedGraph] = ()) -> CapturedStep:
        """A step of the call's rows on ``graph``, with the cut that ``known`` has of it, if any."""
        staged = next((each for each in known if each.captured is graph), None)
        return CapturedStep(graph, self.batch, (self.stopwatch.observe,), staged)


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """The artifacts that run a call, the decisions for later calls, and the new cache of its signature."""

    groups: MicrobatchGroups
    decided: Candidate
    cached: CompiledGraphs


def compile_call(request: CompileRequest, candidate: Candidate, cached: CompiledGraphs) -> CompiledCall:
    """Compile an artifact for each group of consecutive microbatches of a call.

    There is one group unless the model specialises on the number of rows. ``candidate`` holds the decisions
    of the user and of earlier calls.

    Raises:
        CaptureError, InputError, PlanError, InfeasibleError: the call cannot be compiled.
    """
    if request.settings.calibrates_cpu and candidate.cut is None:
        with request.stopwatch.timed("calibrate the CPU"):
            candidate = candidate.on_device_model(cached_calibration())
    graph, candidate = _capture_call(request, candidate, cached.graphs)
    choice = _choose(request, candidate, graph, cached.graphs)
    _warn_of_batch(request, choice)
    compiled = _generate_groups(request, choice, cached)
    _check_microbatches(request, compiled)
    return compiled


# capture


def _capture_call(
    request: CompileRequest, candidate: Candidate, known: Sequence[StagedGraph]
) -> tuple[TrainingGraph, Candidate]:
    """The graph of the first microbatch, and the candidate: model collectives may fix its microbatches."""
    sizes = split_sizes(request.batch, candidate.counts(request.batch)[0])
    if staged := _valid_graph(request, known, sizes[0]):
        return staged.captured, candidate
    graph, candidate = _capture(request, candidate, sizes, known[-1].captured if known else None)
    sizes = split_sizes(request.batch, candidate.counts(request.batch)[0])
    return (graph, candidate) if graph.is_valid_for(sizes[0]) else _capture(request, candidate, sizes, graph)


def _valid_graph(request: CompileRequest, known: Sequence[StagedGraph], size: int) -> StagedGraph | None:
    """The first cut graph that is valid for a microbatch of ``size`` rows of the call, if any."""
    return next((staged for staged in known if _is_valid_for(request, staged.graph, [size])), None)


def _capture(
    request: CompileRequest, candidate: Candidate, sizes: Sequence[int], like: TrainingGraph | None
) -> tuple[TrainingGraph, Candidate]:
    """The graph of one microbatch, and the candidate with the number of microbatches if the graph decides it.

    ``sizes`` are the rows of the last microbatches of the call; the first of these is captured. The number of
    rows is symbolic if sizes differ or may change between calls. Variables are symbolic too, except where
    this was found to be impossible, for example in the graph of a similar call (``like``).
    """
    start, settings, replicas = request.batch - sum(sizes), request.settings, candidate.policy.replicas
    count, sizes = len(sizes), [size for size in sizes if size]
    one = CaptureRequest(
        request.model,
        settings.loss_fn,
        request.key.mode,
        request.call.rows(start, start + sizes[0]),
        request.canonical,
        settings.device,
        symbolic=candidate.dynamic or len(set(sizes)) > 1,
        batch=request.call,
        rewrite_loss=not settings.microbatch_weight,
        may_have_tail=candidate.num_microbatches != 1 and not candidate.policy.is_asynchronous,
        outputs=request.key.outputs,
        num_replicas=None if candidate.tunes_replicas or isinstance(replicas, tuple) else replicas,
        timed=request.stopwatch.timed,
    )
    refuse_float16_weights(settings.precision, request.model)
    autocasts = autocast(settings.precision, settings.device)
    with request.stopwatch.timed("capture"), autocasts:
        graph = _trace_variables(request, one, like) if candidate.dynamic else None
        graph = graph or capture(one)
    graph = replace(graph, variables=request.key.variables, planned_sizes=request.values)
    if graph.first_collective and candidate.num_microbatches is None:
        log.info(
            "%s is a collective of replicas: a step is one round, of %s microbatches",
            graph.first_collective,
            replicas,
        )
        assert isinstance(replicas, int), "model collectives of unequal replicas are refused"
        candidate = replace(candidate, num_microbatches=replicas)
        count = replicas
    if graph.findings.tail:
        candidate = replace(candidate, policy=replace(candidate.policy, is_synchronous_only=True))
    if _takes_whole_batch(request, candidate, graph):
        if request.key.mode is Mode.TRAIN:
            candidate = replace(candidate, num_microbatches=1)
    elif count > 1:
        require_independent_rows(_findings(request, graph), count)
    return graph, candidate


def _is_valid_for(request: CompileRequest, graph: TrainingGraph, sizes: Collection[int]) -> bool:
    has_repeated = graph.repeated in (None, request.call.repeated)
    return has_repeated and all(graph.is_valid_for(size, request.values) for size in sizes)


def _trace_variables(
    request: CompileRequest, one: CaptureRequest, like: TrainingGraph | None
) -> TrainingGraph | None:
    """A graph with symbolic variables: all that can be, or the sizes alone, or the numbers alone.

    Those that could not be in the graph of a similar call (``like``) are not tried, unless one has changed
    since. None if none can be.
    """
    variables: Sequence[Variable] = request.key.variables
    if like is not None and not request.change:
        possible = {*like.variable_symbols.values()}
        variables = [variable for variable in variables if variable.name in possible]
    attempts = symbolic_candidates(variables)
    while attempts:
        attempt = attempts.pop(0)
        try:
            return capture(replace(one, variables=attempt))
        except SpecializedVariableError as error:
            fixed = [variable for variable in attempt if variable.name == error.name] or attempt
            names = ", ".join(dict.fromkeys(variable.path for variable in fixed))
            if request.change or request.call.marked:
                log.warning("each value of %s is compiled on its own: %s", names, error)
            if error.name:
                left = [tuple(x for x in each if x.name != error.name) for each in (attempt, *attempts)]
                attempts = [each for each in dict.fromkeys(left) if each]
    return None


def _findings(request: CompileRequest, graph: TrainingGraph) -> BatchFindings:
    """The findings about the batch; with a microbatch weight, each microbatch is a batch of its own."""
    if request.settings.microbatch_weight:
        return graph.findings
    return graph.findings_for(request.batch, request.values)


def _takes_whole_batch(request: CompileRequest, candidate: Candidate, graph: TrainingGraph) -> bool:
    """Whether the batch must be one microbatch, because its rows depend on one another; warns if so.

    False if the user asked for several microbatches or replicas: ``require_independent_rows`` refuses then.
    """
    if request.refuses_mixed_rows or candidate.num_microbatches is not None or candidate.policy.replicas != 1:
        return False
    findings = _findings(request, graph)
    if dependence := findings.mixed_rows or findings.output:
        request.warn(
            f"a step has one microbatch, the whole batch, for rows depend on other rows: {dependence}"
        )
    return bool(dependence)


# choose


@dataclass(frozen=True, eq=False)
class _Choice:
    """The cut and the number of microbatches of a call, and the search that found them, if any."""

    decided: Candidate
    staged: StagedGraph
    num_microbatches: int
    found: SearchResult | None = None


def _choose(
    request: CompileRequest, candidate: Candidate, graph: TrainingGraph, known: Sequence[StagedGraph]
) -> _Choice:
    """The fastest way to run the call. The first call also decides where stages and parameters are placed."""
    step = request.step_of(graph, known)
    counts = [1] if _takes_whole_batch(request, candidate, graph) else candidate.counts(request.batch)
    trains = request.key.mode is Mode.TRAIN
    if trains and (candidate.cut is None or candidate.tunes_shard or len(counts) > 1):
        return _search(request, candidate, step)
    if candidate.cut is not None:
        return _Choice(candidate, step.cut_as_decided(candidate), counts[0])
    placement = candidate.policy.placements(counts[:1])[0]
    how = candidate.fastest_cut(placement, counts[0], split_sizes(request.batch, counts[0])[0])
    staged = step.cut(how, candidate.options)
    return _Choice(candidate.on_stages_of(staged, placement), staged, counts[0])


def _search(request: CompileRequest, candidate: Candidate, step: CapturedStep) -> _Choice:
    """The fastest candidate that trains on the call. Raises InfeasibleError if none fits into memory."""
    with request.stopwatch.timed("search"):
        found = search(step, candidate)
        best, chosen = found.best, found.candidate
        if candidate.cut is None and any(best.excess_bytes):
            budget = SearchBudget.for_first_fit(step.graph)
            require_memory(
                nearest_plan(best),
                lambda devices: search_within(budget, step, chosen.on_topology(devices)).best,
                instead=functools.partial(fitting_division, step, chosen),
            )
    decided = chosen.for_next_steps(best.schedule)
    if candidate.cut is None:
        decided = decided.on_stages_of(found.base, best.schedule.placement).gathering(best.plan)
    counts = chosen.counts(request.batch)
    count = best.plan.num_microbatches if len(counts) > 1 else counts[0]
    return _Choice(decided, found.base, count, found)


def _warn_of_batch(request: CompileRequest, choice: _Choice) -> None:
    """Warn where microbatches behave differently from the whole batch.

    Raises:
        InputError: the model has collectives of replicas, and microbatches have different numbers of rows.
    """
    graph, count = choice.staged.graph, choice.num_microbatches
    if has_model_collectives(graph):
        require_equal_rows(split_sizes(request.batch, count))
    request.warn(several_rounds_warning(graph, choice.decided.policy.replicas, count))
    request.warn(single_row_warning(graph, request.batch))
    request.warn(changed_buffer_warning(graph, request.model, count))


# generate


def _generate_groups(request: CompileRequest, choice: _Choice, cached: CompiledGraphs) -> CompiledCall:
    """Generate an artifact for each group of consecutive microbatches for which one graph is valid."""
    decided, rest, groups = choice.decided, split_sizes(request.batch, choice.num_microbatches), []
    graphs, artifacts = list(dict.fromkeys([*cached.graphs, choice.staged])), dict(cached.artifacts)
    if choice.found is not None and choice.found.key not in artifacts:
        artifacts[choice.found.key] = _generate(request, decided, choice.found)
    while rest:
        staged = _valid_graph(request, graphs, rest[0])
        if staged is None:
            graph, decided = _capture(request, decided, rest, graphs[-1].captured)
            staged = request.step_of(graph).cut_as_decided(decided)
            graphs.append(staged)
        group = list(takewhile(functools.partial(staged.graph.is_valid_for, values=request.values), rest))
        key = staged, len(group), rest[0]
        if key not in artifacts:
            found = _evaluate_group(request, decided, *key)
            decided = found.candidate
            artifacts[key] = _generate(request, decided, found)
        groups.append((artifacts[key], group))
        rest = rest[len(group) :]
    for staged in graphs:
        staged.clear_evaluated()
    return CompiledCall(groups, decided, CompiledGraphs(tuple(graphs), artifacts))


def _evaluate_group(
    request: CompileRequest, decided: Candidate, staged: StagedGraph, count: int, size: int
) -> SearchResult:
    """The fastest plan on a cut graph for ``count`` microbatches, the first of which has ``size`` rows."""
    if request.key.mode is Mode.TRAIN:
        with request.stopwatch.timed("search"):
            found = evaluate_stages(staged, decided, size * count, [count])
        return replace(found, candidate=decided.for_next_steps(found.best.schedule))
    assert decided.placement is not None
    schedule = decided.policy.forward_schedule(count, decided.placement)
    return SearchResult(decided, staged.evaluate(schedule, size, decided.options.sync_spec), staged, ())


def _generate(request: CompileRequest, decided: Candidate, found: SearchResult) -> CompiledArtifact:
    """The artifact of an evaluated plan. Raises InfeasibleError if the plan does not fit into memory."""
    evaluated = found.best
    count, size = evaluated.plan.num_microbatches, evaluated.plan.microbatch_size
    require_memory_on_fixed_stages(
        evaluated, found.base, lambda staged: _evaluate_group(request, decided, staged, count, size).best
    )
    with request.stopwatch.timed("generate code"):
        artifact = evaluated.artifact()
        evaluated.staged.write_dumps()
    plan = replace(
        evaluated.plan,
        schedule="auto" if decided.policy.source == "auto" else evaluated.plan.schedule,
        microbatch_weight=request.settings.microbatch_weight,
        alternatives=rejected_alternatives(found.alternatives, evaluated),
        sharding_costs=sharding_costs(evaluated),
        tail_costs=tail_costs(evaluated, found.base),
    )
    graph = evaluated.staged.graph
    outputs = (role for role, _ in graph.returned)
    axes = {
        name: role.axis
        for name, role in zip(plan.outputs, outputs, strict=True)
        if role.axis and role.axis.has_outer
    }
    return CompiledArtifact(replace(artifact, plan=plan), graph.output_spec, axes)


def _check_microbatches(request: CompileRequest, compiled: CompiledCall) -> None:
    """Refuse microbatches that are not equivalent to the batch; warn where equivalence is not proved."""
    sizes = [size for _, group in compiled.groups for size in group]
    staged = _valid_graph(request, compiled.cached.graphs, sizes[0])
    assert staged is not None
    require_rows_for_norms(staged.graph.findings, sizes)
    if len(sizes) > 1:
        check_outputs(staged.graph)
        require_independent_rows(_findings(request, staged.graph), len(sizes))
        if request.settings.requires_proof:
            require_proved_loss(staged.graph.findings)
        for warning in batch_warnings(staged.graph.findings):
            request.warn(warning)
    check_batch_counts(compiled.groups)
