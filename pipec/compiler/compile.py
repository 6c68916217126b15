"""Compiles a call: capture it, try every candidate, take the best, generate code.

These are functions over values and keep no state: decisions and artifacts of earlier calls come in with the
request, and those of this call are returned. A number of microbatches is a *count*, and the rows of a
microbatch are its *size*.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from torch import Tensor

from pipec.artifact.artifact import Artifact
from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture_with_variables
from pipec.compiler.batch_equivalence import (
    batch_warnings,
    changed_buffer_warning,
    check_given_microbatches,
    require_concatenable_outputs,
    require_independent_graphs,
    require_independent_rows,
    require_rows_for_norms,
    several_rounds_warning,
    single_row_warning,
)
from pipec.compiler.candidate import Candidate
from pipec.compiler.check import CheckResult, check_call, refuse_difference, refuse_unchecked_rows
from pipec.compiler.compile_cache import CompiledGraphs, MicrobatchGroups
from pipec.compiler.compiler import CompiledCall, CompileRequest
from pipec.compiler.search import CapturedStep, SearchResult, evaluate_stages, search
from pipec.compiler.staged_graph import StagedGraph
from pipec.compiler.tried_plans import rejected_alternatives, require_memory, sharding_costs
from pipec.console import notice
from pipec.errors import CaptureError, FailingModelError, InputError, MixedRowsError
from pipec.ir import Mode
from pipec.ir.batch_split import require_equal_rows, split_sizes

log = logging.getLogger("pipec")


def compile_call(request: CompileRequest) -> CompiledCall:
    """Compile an artifact for each group of consecutive microbatches of a call.

    There is one group unless the model specialises on the number of rows. If microbatches cannot be computed
    by themselves, the whole batch is one microbatch, unless the user has asked for several, or for replicas.

    Raises:
        CaptureError, InputError, PlanError, InfeasibleError: the call cannot be compiled.
    """
    candidate = request.compiler.decided
    if request.call.given:
        return _compile_given(request, candidate)
    try:
        return _compile(request, candidate)
    except (FailingModelError, MixedRowsError) as error:
        mixes = isinstance(error, MixedRowsError)
        is_open = candidate.num_microbatches is None and candidate.policy.replicas == 1
        if not is_open or (mixes and request.refuses_mixed_rows):
            raise
        try:
            compiled = _compile(request, replace(candidate, num_microbatches=1))
        except (CaptureError, InputError):
            if mixes:
                raise
            raise error from None
        if isinstance(error, FailingModelError):
            why = f"with fewer rows, {error.what}"
        else:
            why = str(error).splitlines()[1].strip()
        request.compiler.warn(f"a step has one microbatch, the whole batch: {why}")
        if not request.trains:
            return replace(compiled, decided=replace(compiled.decided, num_microbatches=None))
        return compiled


def _compile_given(request: CompileRequest, candidate: Candidate) -> CompiledCall:
    """Compile given microbatches. Where the schedule needs more for a graph, the last ones have no rows."""
    count = candidate.policy.least_count(request.batch)
    compiled = _compile(request, replace(candidate, num_microbatches=count))
    if why := compiled.known.guard_failure(request.key, request.call):
        raise InputError(
            f"microbatches lead to different branches of the model's code: {why}. Pass those that lead to "
            "other branches in a step of their own"
        )
    decided = replace(compiled.decided, num_microbatches=candidate.num_microbatches)
    return replace(compiled, decided=decided)


def _compile(request: CompileRequest, candidate: Candidate) -> CompiledCall:
    if request.key.mode is Mode.OUTPUTS and candidate.policy.is_asynchronous:
        raise InputError(
            "the schedule is asynchronous: a step begins before the script has the loss of the one before. "
            'Compute the loss in the model or in loss_fn=..., or pass a synchronous schedule such as "1f1b"'
        )
    step, candidate, counts = _capture_first(request, candidate)
    return _generate(request, *_choose(request, candidate, step, counts))


# capture


def _capture_first(
    request: CompileRequest, candidate: Candidate
) -> tuple[CapturedStep, Candidate, Sequence[int]]:
    """The graph of the first microbatch, the candidate that it allows, and the counts to try."""
    sizes = split_sizes(request.batch, candidate.counts(request.batch)[0])
    step = _step_for(request, candidate, sizes[request.largest :])
    candidate = candidate.restricted_by(step.graph)
    counts = candidate.counts(request.batch)
    if [*counts] != [1]:
        require_independent_rows(request.findings(step.graph), counts[0], candidate.recorded_options)
    sizes = split_sizes(request.batch, counts[0])
    if not request.call.given and not step.graph.is_valid_for(sizes[0], request.values):
        step = _step_for(request, candidate, sizes)
    return step, candidate, counts


def _step_for(request: CompileRequest, candidate: Candidate, sizes: Sequence[int]) -> CapturedStep:
    """The graph of an earlier call if it is valid for the first of these microbatches, or else a new one.

    ``sizes`` are the rows of the last microbatches of the call. The number of rows is symbolic if sizes
    differ or may change between calls. Variables are symbolic too where possible.
    """
    compiler, settings = request.compiler, request.compiler.settings
    observers = (compiler.stopwatch.observe,)
    if staged := request.valid_graph(request.known.graphs, sizes):
        return CapturedStep(staged.captured, request.batch, observers, staged)
    start, replicas = request.batch - sum(sizes), candidate.policy.replicas

    one = CaptureRequest(
        compiler.model,
        settings.loss_fn,
        request.key.mode,
        request.call.rows(start, start + sizes[0]),
        compiler.canonical,
        settings.device,
        batch=None if request.call.given else request.call,
        rewrite_loss=not request.has_own_batches,
        may_have_tail=candidate.num_microbatches != 1
        and not candidate.policy.is_asynchronous
        and request.key.mode is not Mode.OUTPUTS,
        loss_path=settings.loss_path,
        outputs=request.key.outputs,
        num_replicas=None if candidate.tunes_replicas or isinstance(replicas, tuple) else replicas,
        timed=compiler.stopwatch.timed,
    )
    refuse_float16_weights(settings.precision, compiler.model)
    with compiler.stopwatch.timed("capture"), autocast(settings.precision, settings.device):
        report = log.warning if request.change else log.debug
        with _naming_microbatch(one.call, start):
            graph = capture_with_variables(one, request.key.variables, report)
    graph = replace(graph, variables=request.key.variables, planned_sizes=request.values_of(sizes))
    check_given_microbatches(graph, request.call)
    return CapturedStep(graph, request.batch, observers)


@contextlib.contextmanager
def _naming_microbatch(call: ModelCall, number: int) -> Iterator[None]:
    """Let an error of a given microbatch name it, if the model fails on it or a tensor is empty."""
    leaves = zip(call.paths, call.leaves, strict=True)
    empty = [path for path, leaf in leaves if isinstance(leaf, Tensor) and not leaf.numel()]
    try:
        yield
    except (CaptureError, InputError) as error:
        if not call.is_whole or not (empty or isinstance(error, FailingModelError)):
            raise
        what = f"{empty[0]} is empty, which the model cannot take: " if empty else ""
        raise InputError(f"microbatches[{number}]: {what}{error}") from error


# choose


def _choose(
    request: CompileRequest, candidate: Candidate, step: CapturedStep, counts: Sequence[int]
) -> tuple[Candidate, StagedGraph, int, SearchResult | None]:
    """The decisions of a call, its cut graph and its count, and the search that found them, if any.

    The first call also decides where stages and parameters are placed. Raises InfeasibleError if nothing that
    trains on the call fits into memory.
    """
    is_first = candidate.cut is None
    if request.trains and (is_first or candidate.tunes_shard or len(counts) > 1):
        with request.compiler.stopwatch.timed("search"):
            found = search(step, candidate)
        best, counts = found.best, found.candidate.counts(request.batch)
        decided = found.candidate.for_next_steps(best.schedule)
        if is_first:
            require_memory(best)
            if decided.loads_weights and not candidate.loads_weights:
                notice(
                    "nothing else fits into the memory of the devices: weights, gradients and optimizer "
                    "state are kept in host memory, as with offload='weights'"
                )
            decided = decided.on_stages_of(found.base, best.schedule.placement).gathering(best.plan)
        count = best.plan.num_microbatches if len(counts) > 1 else counts[0]
        return decided, found.base, count, found
    if not is_first:
        return candidate, step.cut_as_decided(candidate), counts[0], None
    placement, size = candidate.policy.placements(counts[0])[0], split_sizes(request.batch, counts[0])[0]
    staged = step.cut(candidate.fastest_cut(placement, counts[0], size), candidate.options)
    return candidate.on_stages_of(staged, placement), staged, counts[0], None


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


# generate


def _generate(
    request: CompileRequest,
    candidate: Candidate,
    chosen: StagedGraph,
    count: int,
    found: SearchResult | None,
) -> CompiledCall:
    """Generate an artifact for each group of consecutive microbatches for which one graph is valid."""
    sizes = [1] * request.batch if request.call.given else split_sizes(request.batch, count)
    graphs = list(dict.fromkeys([*request.known.graphs, chosen]))
    artifacts, groups, rest = dict(request.known.artifacts), MicrobatchGroups(), sizes
    while rest:
        staged = request.valid_graph(graphs, rest)
        if staged is None:
            step = _step_for(request, candidate, rest)
            candidate = candidate.restricted_by(step.graph)
            staged = step.cut_as_decided(candidate)
            graphs.append(staged)
        checked = _check_microbatches(request, candidate, staged, sizes, rest)
        suffixes = (rest[k:] for k in range(len(rest)))
        valid = takewhile(functools.partial(request.is_valid_for, staged.graph), suffixes)
        group = [each[0] for each in valid]
        rest = rest[len(group) :]
        if request.call.given:
            group += [0] * (candidate.policy.least_count(len(group)) - len(group))
        key = staged, len(group), group[0]
        if key not in artifacts:
            own = found if found and found.key == key else _evaluate(request, candidate, *key)
            if request.trains:
                candidate = candidate.for_next_steps(own.best.schedule)
            artifacts[key] = _artifact(request, candidate, own, checked)
        groups.append((artifacts[key], group))
    if len(groups) > 1:
        require_independent_graphs(groups[0][0].plan, sizes)
    for staged in graphs:
        staged.clear_evaluated()
    return CompiledCall(groups, candidate, CompiledGraphs(tuple(graphs), artifacts))


def _check_microbatches(
    request: CompileRequest,
    candidate: Candidate,
    staged: StagedGraph,
    sizes: Sequence[int],
    rest: Sequence[int],
) -> str:
    """Refuse microbatches that do not make up the batch; warn of exceptions, and of what is not known.

    A graph that is new is compared with the model itself on rows of the ``rest`` of the microbatches. Returns
    the result of that for the plan.
    """
    graph, count, compiler = staged.graph, len(sizes), request.compiler
    if graph.first_collective:
        require_equal_rows(sizes)
    require_rows_for_norms(graph.findings, sizes)
    compiler.warn(several_rounds_warning(graph, candidate.policy.replicas, count))
    compiler.warn(single_row_warning(graph, request.batch))
    compiler.warn(changed_buffer_warning(graph, compiler.model, count, candidate.policy.replicas))
    if count > 1:
        require_concatenable_outputs(graph)
        require_independent_rows(request.findings(graph), count, candidate.recorded_options)
    is_known = any(each.captured is staged.captured for each in request.known.graphs)
    if is_known and compiler.settings.checks:
        return ""
    result = CheckResult(reason='check is "off"')
    if compiler.settings.checks:
        result = check_graph(request, staged, rest)
    if len(rest) > 1 and not is_known:
        refuse_unchecked_rows(result, request.example or request.call, graph.findings)
    for warning in batch_warnings(graph.findings, result.agreement is not None) if count > 1 else ():
        compiler.warn(warning)
    return str(result) if compiler.settings.checks else ""


def check_graph(request: CompileRequest, staged: StagedGraph, sizes: Sequence[int]) -> CheckResult:
    """Compare a graph with the model itself on a few rows of the call.

    Raises:
        UnequalStepError: microbatches do not compute what the model computes of their rows.
        CaptureError: the graph computes something else than the model.
    """
    with request.compiler.stopwatch.timed("check"):
        result = check_call(request, staged.graph, sizes)
    refuse_difference(result)
    log.debug("%s", result)
    return result


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
