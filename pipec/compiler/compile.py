"""Compiles a call: capture it, try every candidate, take the best, generate code.

These are functions over values and keep no state: decisions and artifacts of earlier calls come in with the
request, and those of this call are returned. A number of microbatches is a *count*, and the rows of a
microbatch are its *size*.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from pipec.artifact.artifact import Artifact
from pipec.compiler.batch_equivalence import require_independent_graphs
from pipec.compiler.candidate import Candidate
from pipec.compiler.captured_step import CapturedStep, capture_first, capture_step
from pipec.compiler.check import check_microbatches
from pipec.compiler.compile_cache import CompiledGraphs, MicrobatchGroups
from pipec.compiler.compiler import CompiledCall, CompileRequest
from pipec.compiler.search import SearchResult, evaluate_stages, search
from pipec.compiler.staged_graph import StagedGraph
from pipec.compiler.tried_plans import rejected_alternatives, require_memory, sharding_costs
from pipec.console import notice
from pipec.errors import CaptureError, FailingModelError, InputError, MixedRowsError
from pipec.ir import Mode
from pipec.ir.batch_split import split_sizes


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
    step, candidate, counts = capture_first(request, candidate)
    candidate, staged, count, found = _choose(request, candidate, step, counts)
    return _generate(request, candidate, staged, count, found)


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
            step = capture_step(request, candidate, rest)
            candidate = candidate.restricted_by(step.graph)
            staged = step.cut_as_decided(candidate)
            graphs.append(staged)
        checked = check_microbatches(request, candidate, staged, sizes, rest)
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
