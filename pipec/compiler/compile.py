"""Compiles a call: capture it, try every candidate, take the best, generate code.

These are functions over values and keep no state: decisions and artifacts of earlier calls come in as
arguments, and those of this call are returned.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import nn

from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.extract_forward import extract_forward
from pipec.capture.graph_symbols import SpecializedVariableError
from pipec.capture.model_call import ModelCall
from pipec.capture.trace_text import TraceText, describe, model_text
from pipec.capture.tracer import capture
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
from pipec.compiler.disk_cache import disk_cache
from pipec.compiler.infeasible import require_memory
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
    search,
)
from pipec.compiler.staged_graph import StagedGraph
from pipec.compiler.stopwatch import Stopwatch
from pipec.compiler.stored_call import Lookup, RestoredGraph, RestoredStages, StoredCall, process_text
from pipec.compiler.tail_costs import tail_costs
from pipec.graph import BatchFindings, TrainingGraph
from pipec.ir import Mode, Sizes, Variable
from pipec.ir.batch_split import require_equal_rows, split_sizes, variable_values

log = logging.getLogger("pipec")


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A call to compile, and the model in its present state.

    With ``refuses_mixed_rows``, a batch whose rows depend on one another is refused instead of run as one
    microbatch. ``warn`` issues each warning once. ``trained`` are the graphs of steps on such calls, from
    which an evaluation may be cut. ``trained_in_other_modes`` are those of a model with other modules in
    training mode; an evaluation is cut from one if its own trace is the same. ``change`` says which variables
    differ from the call before, in words. ``lookup`` finds what an earlier process compiled.
    """

    settings: CompileSettings
    model: nn.Module
    canonical: Mapping[str, str]
    key: CaptureKey
    call: ModelCall
    stopwatch: Stopwatch
    warn: Callable[[str], None]
    refuses_mixed_rows: bool = False
    trained: Sequence[TrainingGraph] = ()
    trained_in_other_modes: Sequence[TrainingGraph] = ()
    change: str = ""
    lookup: Lookup | None = None

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
    cache = disk_cache()
    if cache is None:
        return _compile(request, candidate, cached)
    process = functools.partial(process_text, request.settings.device.type == "cuda")
    lookup = Lookup(cache, process, functools.partial(_request_text, request), request.warn)
    with lookup.listening():
        return _compile(replace(request, lookup=lookup, warn=lookup.warn), candidate, cached)


def _compile(request: CompileRequest, candidate: Candidate, cached: CompiledGraphs) -> CompiledCall:
    if request.lookup and (found := _find_on_known_graph(request, request.lookup, candidate, cached)):
        return _restored(request, candidate, cached, *found)
    cached = _recaptured(request, cached)
    graph, candidate = _capture_call(request, candidate, cached.graphs)
    if isinstance(graph, RestoredGraph):
        return _restored(request, candidate, cached, RestoredStages(graph, candidate.options), graph.kept)
    choice = _choose(request, candidate, graph, cached.graphs)
    _warn_of_batch(request, choice)
    compiled = _generate_groups(replace(request, lookup=None), choice, cached)
    _check_microbatches(request, compiled)
    (artifact, sizes), *others = compiled.groups
    is_whole = sizes == split_sizes(request.batch, artifact.artifact.plan.num_microbatches) and not others
    if (
        request.lookup
        and is_whole
        and compiled.cached.artifacts.get((choice.staged, len(sizes), sizes[0])) is artifact
    ):
        request.lookup.keep(candidate, compiled.decided, choice.staged, artifact)
    return compiled


# kept for later processes


def _request_text(request: CompileRequest) -> str:
    """All that a compilation reads, besides the process, the graph and the candidate."""
    settings, key, call = request.settings, request.key, request.call
    parts = (
        *(settings.loss_fn is None, settings.device, settings.precision, settings.microbatch_weight),
        *(settings.requires_proof, settings.calibrates_cpu, request.refuses_mixed_rows),
        *(key.mode, key.call_signature, key.outputs, key.variables, request.values),
        *(call.batch_size, call.axes, call.paths, call.ambiguous_leaves, call.repeated),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(log.isEnabledFor(level) for level in (logging.INFO, logging.WARNING, logging.ERROR)),
    )
    return "\n".join([*map(describe, parts), *model_text(request.model, request.canonical)])


def _find_on_known_graph(
    request: CompileRequest, lookup: Lookup, candidate: Candidate, cached: CompiledGraphs
) -> tuple[StagedGraph, StoredCall] | None:
    """What was kept for the call on a graph that is known, or on the forward of one, and its stages."""
    sizes = split_sizes(request.batch, candidate.counts(request.batch)[0])
    if staged := _valid_graph(request, cached.graphs, sizes[0]):
        kept = lookup.find(candidate, _whole_text(staged.graph), staged)
        return (staged, kept) if kept else None
    graph = next((each for each in request.trained if _may_extract(request, each, sizes)), None)
    text = _text_of_forward(graph) if graph else ""
    kept = lookup.find(candidate, text)
    if graph is None or kept is None:
        return None
    forward = kept.graph(request.key.mode, text, graph.output_spec, graph.constants)
    return RestoredStages(replace(forward, model_guards=graph.model_guards), candidate.options), kept


def _restored(
    request: CompileRequest,
    candidate: Candidate,
    cached: CompiledGraphs,
    staged: StagedGraph,
    kept: StoredCall,
) -> CompiledCall:
    """What compiling the call would return, of what was kept."""
    assert request.lookup is not None
    request.lookup.repeat(kept)
    constants = {name: x if x.is_meta else x.cpu() for name, x in staged.graph.constants.items()}
    artifact = replace(kept.artifact, constants=constants, options=candidate.options.recorded)
    compiled = CompiledArtifact(artifact, staged.graph.output_spec, kept.axes)
    sizes = split_sizes(request.batch, artifact.plan.num_microbatches)
    artifacts = {**cached.artifacts, (staged, len(sizes), sizes[0]): compiled}
    graphs = CompiledGraphs(tuple(dict.fromkeys((*cached.graphs, staged))), artifacts)
    return CompiledCall([(compiled, sizes)], kept.decisions.applied(candidate), graphs)


def _recaptured(request: CompileRequest, cached: CompiledGraphs) -> CompiledGraphs:
    """The same with graphs in the place of restored ones, except of those that would be other graphs now."""
    graphs = {
        staged: staged.recaptured(request.lookup) if isinstance(staged, RestoredStages) else staged
        for staged in cached.graphs
    }
    artifacts = {
        (graph, count, size): compiled
        for (staged, count, size), compiled in cached.artifacts.items()
        if (graph := graphs[staged]) is not None
    }
    return CompiledGraphs(tuple(graph for graph in graphs.values() if graph is not None), artifacts)


def _recapture(request: CompileRequest, candidate: Candidate, sizes: Sequence[int]) -> TrainingGraph:
    """The graph of a call that was restored; its tensors are on meta."""
    return _capture(request, candidate, sizes, None)[0]


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
    is_valid = isinstance(graph, RestoredGraph) or graph.is_valid_for(sizes[0])
    return (graph, candidate) if is_valid else _capture(request, candidate, sizes, graph)


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
    given = tuple(sizes)
    start, settings, replicas = request.batch - sum(sizes), request.settings, candidate.policy.replicas
    count, sizes = len(sizes), [size for size in sizes if size]
    traced = functools.partial(
        capture,
        request.model,
        settings.loss_fn,
        request.key.mode,
        request.call.rows(start, start + sizes[0]),
        request.canonical,
        settings.device,
        batch=request.call,
        rewrite_loss=not settings.microbatch_weight,
        may_have_tail=candidate.num_microbatches != 1 and not candidate.policy.is_asynchronous,
        outputs=request.key.outputs,
        num_replicas=None if candidate.tunes_replicas or isinstance(replicas, tuple) else replicas,
        timed=request.stopwatch.timed,
        find=functools.partial(request.lookup.find_traced, candidate, request.key.mode)
        if request.lookup
        else functools.partial(_find_traced, request, sizes),
    )
    refuse_float16_weights(settings.precision, request.model)
    autocasts = autocast(settings.precision, settings.device)
    with request.stopwatch.timed("capture"), autocasts:
        graph = _extract_forward(request, sizes)
        if graph is None and candidate.dynamic:
            graph = _trace_variables(request, traced, like)
        graph = graph or traced(symbolic=candidate.dynamic or len(set(sizes)) > 1)
    graph = replace(graph, variables=request.key.variables, planned_sizes=request.values)
    if isinstance(graph, RestoredGraph):
        call = request.call.sample(request.batch, torch.device("meta"))
        assert request.lookup is not None
        again = replace(request, call=call, trained=(), lookup=request.lookup.without_cache())
        return replace(graph, recapture=functools.partial(_recapture, again, candidate, given)), candidate
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


def _extract_forward(request: CompileRequest, sizes: Collection[int]) -> TrainingGraph | None:
    """The forward of a training graph that is valid for microbatches of all ``sizes``, if there is one."""
    for each in request.trained:
        if _may_extract(request, each, sizes):
            graph = each.recaptured(request.lookup) if isinstance(each, RestoredGraph) else each
            extracted = extract_forward(graph) if graph else None
            if graph and extracted:
                return replace(extracted, batch_size=next(iter(sizes)), text=_text_of_forward(graph))
    return None


def _find_traced(
    request: CompileRequest, sizes: Sequence[int], trace: Callable[..., TraceText]
) -> tuple[str, TrainingGraph | None]:
    """A digest of a trace, and the forward of a graph that was trained on the same trace, if there is one."""
    if request.key.mode is not Mode.TRAIN and not request.trained_in_other_modes:
        return "", None
    try:
        text = _DIGEST + hashlib.sha256(trace(computed=False).text.encode()).hexdigest()
    except Exception as error:  # whatever fails, the call is compiled
        log.debug("a trace cannot be compared: %s", error)
        return "", None
    for each in request.trained_in_other_modes:
        same = each.text == text and _is_valid_for(request, each, {*sizes, request.batch})
        if same and (extracted := extract_forward(each)):
            return text, replace(
                extracted, batch_size=sizes[0], training=request.model.training, text=_text_of_forward(each)
            )
    return text, None


def _may_extract(request: CompileRequest, graph: TrainingGraph, sizes: Collection[int]) -> bool:
    """Whether a training graph is valid for the model as it is, and for microbatches of all ``sizes``."""
    return _is_valid_for(request, graph, {*sizes, request.batch}) and not graph.model_guards.violation()


def _is_valid_for(request: CompileRequest, graph: TrainingGraph, sizes: Collection[int]) -> bool:
    has_repeated = graph.repeated in (None, request.call.repeated)
    return has_repeated and all(graph.is_valid_for(size, request.values) for size in sizes)


_DIGEST = "digest "
"""Begins a text that tells traces of one process apart, and must not be a key for other processes."""


def _whole_text(graph: TrainingGraph) -> str:
    return "" if graph.text.startswith(_DIGEST) else graph.text


def _text_of_forward(graph: TrainingGraph) -> str:
    text = _whole_text(graph)
    return f"the forward of\n{text}" if text else ""


def _trace_variables(
    request: CompileRequest, traced: Callable[..., TrainingGraph], like: TrainingGraph | None
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
            return traced(variables=attempt)
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
        if candidate.cut is None:
            require_memory(best, lambda devices: search(step, chosen.on_topology(devices)).best)
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
            found = evaluate_stages(staged, replace(decided, num_microbatches=count), size * count)
        return replace(found, candidate=decided.for_next_steps(found.best.schedule))
    assert decided.placement is not None
    schedule = decided.policy.forward_schedule(count, decided.placement)
    return SearchResult(decided, staged.evaluate(schedule, size, decided.options.sync_spec), staged)


def _generate(request: CompileRequest, decided: Candidate, found: SearchResult) -> CompiledArtifact:
    """The artifact of an evaluated plan. Raises InfeasibleError if the plan does not fit into memory."""
    evaluated = found.best
    require_memory(evaluated, where=" on the stages that the first call has fixed")
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
