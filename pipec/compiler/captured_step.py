"""The graph of microbatches of a call, captured now or for an earlier call, before it is cut into stages."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pipec.capture.autocast import autocast, refuse_float16_weights
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture_with_variables
from pipec.compiler.batch_equivalence import check_given_microbatches, require_independent_rows
from pipec.compiler.candidate import Candidate
from pipec.compiler.compiler import CompileRequest
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged_graph import StagedGraph
from pipec.cost.formulas import node_bytes
from pipec.errors import CaptureError, FailingModelError, InputError
from pipec.graph import TrainingGraph
from pipec.graph.nodes import Parameter
from pipec.ir import Mode
from pipec.ir.batch_split import split_sizes
from pipec.passes import Observer, Pass
from pipec.passes.assign_stages import AssignStages

log = logging.getLogger("pipec")


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step of ``batch`` rows on a captured graph. ``observers`` are called after every pass.

    ``known`` is the graph cut as decided, if an earlier call was compiled on it.
    """

    graph: TrainingGraph
    batch: int
    observers: Sequence[Observer] = ()
    known: StagedGraph | None = None

    def cut(self, how: Pass, options: CompilerOptions) -> StagedGraph:
        """The graph after all passes; ``how`` is the pass that assigns stages. Placements may share it."""
        prepared = None
        for known, staged in self._cuts:
            if replace(staged.options, sync_spec=options.sync_spec) == options:
                prepared = staged.prepared
            if known == how and staged.options == options:
                return staged
        staged = StagedGraph(self.graph, how, options, observers=self.observers, prepared=prepared)
        self._cuts.append((how, staged))
        return staged

    @functools.cached_property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        arguments = (node for node in self.graph.arguments if isinstance(node.meta["role"], Parameter))
        return sum(node_bytes(node, 1) for node in arguments)

    @functools.cached_property
    def _cuts(self) -> list[tuple[Pass, StagedGraph]]:
        return []

    def cut_as_decided(self, candidate: Candidate) -> StagedGraph:
        """The graph with the stages of an earlier call. A profile would be of that call's graph: unused."""
        assert candidate.cut is not None
        return self.known or self.cut(AssignStages(candidate.cut), replace(candidate.options, profile=None))


def capture_first(
    request: CompileRequest, candidate: Candidate
) -> tuple[CapturedStep, Candidate, Sequence[int]]:
    """The graph of the first microbatch, the candidate that it allows, and the counts to try."""
    sizes = split_sizes(request.batch, candidate.counts(request.batch)[0])
    step = capture_step(request, candidate, sizes[request.largest :])
    candidate = candidate.restricted_by(step.graph)
    counts = candidate.counts(request.batch)
    if [*counts] != [1]:
        require_independent_rows(request.findings(step.graph), counts[0], candidate.recorded_options)
    sizes = split_sizes(request.batch, counts[0])
    if not request.call.given and not step.graph.is_valid_for(sizes[0], request.values):
        step = capture_step(request, candidate, sizes)
    return step, candidate, counts


def capture_step(request: CompileRequest, candidate: Candidate, sizes: Sequence[int]) -> CapturedStep:
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
