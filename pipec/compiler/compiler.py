"""The compiler of one model: holds the decisions and the compiled artifacts that later calls use."""

import functools
import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipec import console
from pipec.artifact.artifact import MicrobatchGroups
from pipec.capture.model_call import ModelCall
from pipec.capture.model_loss import LossPath
from pipec.capture.traced_step import TracedStep
from pipec.compiler.candidate import Candidate
from pipec.compiler.compile_cache import CaptureKey, CaptureSignature, CompileCache, CompiledGraphs
from pipec.compiler.staged_graph import StagedGraph
from pipec.errors import InputError
from pipec.graph import BatchFindings, TrainingGraph
from pipec.ir import Mode, Precision, Sizes
from pipec.ir.batch_split import variable_values
from pipec.passes import Pass
from pipec.torch_compat.private_symbols import require


@dataclass(frozen=True)
class CompileSettings:
    """The settings that all calls of a pipeline share.

    ``device`` is one of the devices that will run the code; a model on another kind of device is captured as
    if it were on this one. Operators compute in ``precision``, or in the model's own types if it is None.
    ``loss_path`` says where the loss is in the model's results, if that is not found by itself.
    ``microbatch_weight`` is recorded in the plan. With ``checks``, a few rows of a new kind of call are
    compared with the model itself, and of every ``check_every`` steps one; 0 for none.
    """

    loss_fn: Callable[..., Any] | None
    device: torch.device
    precision: Precision | None = None
    microbatch_weight: str = ""
    checks: bool = False
    check_every: int = 0
    loss_path: LossPath | None = None


@dataclass
class Stopwatch:
    """Sums the ``seconds`` of each compilation step, by its name, over all compilations."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the time of a block, without the time of steps that are timed within it."""
        started, noted = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - noted
            self._note(step, time.perf_counter() - started - within)

    def observe(self, position: int, transform: Pass, graph: TrainingGraph, seconds: float) -> None:
        """Add the time of a pass."""
        self._note(type(transform).__name__, seconds)

    def _note(self, step: str, seconds: float) -> None:
        self.seconds[step] = self.seconds.get(step, 0.0) + seconds


@dataclass
class Compiler:
    """Compiles the calls of one model. The first call decides where stages are placed and what they own.

    ``decided`` holds the decisions of the user and of earlier calls: besides the cache, a call leaves nothing
    else to the next one. ``stopwatch`` sums the seconds of each compilation step over all compilations.
    """

    model: nn.Module
    canonical: Mapping[str, str]
    settings: CompileSettings
    decided: Candidate
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    cache: CompileCache = field(default_factory=CompileCache)
    _traced: dict[Mode, nn.Module] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def of(self, model: nn.Module) -> "Compiler":
        """A compiler for a copy of the model, with the same decisions and an empty cache."""
        return Compiler(model, self.canonical, self.settings, self.decided)

    def compile(self, request: "CompileRequest") -> MicrobatchGroups:
        """Compile an artifact for each group of consecutive microbatches of a call.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        reason = self.cache.recompile_reason(request.signature, request.call, request.change)
        with console.delayed_status(f"compiling, {reason}"), without_garbage_collection():
            require("capture")
            # It loads torch._dynamo, which takes seconds that ranks save for which another one compiles.
            from pipec.compiler.compile import compile_call

            compiled = compile_call(request)
        self.decided = compiled.decided
        self.cache.put(request.signature, compiled.known)
        return compiled.groups

    def check(self, request: "CompileRequest", sizes: Sequence[int]) -> None:
        """Compare a call that was compiled before with the model itself, for microbatches of these sizes.

        Raises:
            UnequalStepError, CaptureError: they do not compute what the model computes.
        """
        from pipec.compiler.check import check_graph

        staged = request.valid_graph(request.known.graphs, sizes)
        if staged is not None:
            check_graph(request, staged, sizes)

    def require_one_graph_for(self, signature: CaptureSignature, sizes: Sequence[int], values: Sizes) -> None:
        """Refuse microbatches of several sizes unless one graph is valid for all of them.

        Raises:
            InputError: the model makes a constant of the batch size, or was captured for one size.
        """
        graphs = [staged.graph for staged in self.cache.get(signature).graphs]
        graph = next((each for each in graphs if each.is_valid_for(max(sizes), values)), graphs[0])
        if invalid := [size for size in sizes if not graph.is_valid_for(size, values)]:
            raise InputError(
                "replicas that pass their own parts of a batch run one graph, which cannot take microbatches "
                f"of {invalid[0]} and {max(sizes)} rows: the model makes a constant of the batch. Pass as "
                "many rows on every replica, which its microbatches divide, as drop_last=True does"
            )

    def traced(self, mode: Mode) -> nn.Module:
        """A module with the model and the loss, from which the expressions of ``read`` are evaluated."""
        if mode not in self._traced:
            self._traced[mode] = TracedStep(self.model, self.settings.loss_fn, mode)
        return self._traced[mode]

    def warn(self, warning: str) -> None:
        """Issue a warning, unless it is empty or was issued before."""
        if warning and warning not in self._warned:
            self._warned.add(warning)
            console.warn(warning)


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A call to compile, of the compiler's model in its present state.

    ``change`` says which variables differ from the call before. With ``refuses_mixed_rows``, a batch whose
    rows depend on one another is refused instead of run as one microbatch. ``example`` is the part of the
    call whose values this process has, if that is not all of it. ``unknown`` names the tensors of the model
    whose values this process does not have.
    """

    compiler: Compiler
    signature: CaptureSignature
    call: ModelCall
    change: str = ""
    refuses_mixed_rows: bool = False
    example: ModelCall | None = None
    unknown: Collection[str] = ()

    @property
    def key(self) -> CaptureKey:
        return self.signature.key

    @functools.cached_property
    def known(self) -> CompiledGraphs:
        """The graphs and artifacts of earlier calls with this signature."""
        return self.compiler.cache.get(self.signature)

    @property
    def batch(self) -> int:
        return self.call.batch_size

    @property
    def has_own_batches(self) -> bool:
        """Whether each microbatch is a batch of its own, and what the model makes of each adds up."""
        is_weighted = self.compiler.settings.microbatch_weight and self.key.mode is not Mode.OUTPUTS
        return bool(is_weighted or self.call.given)

    @property
    def largest(self) -> int:
        """The microbatch to capture first: the largest of given ones."""
        parts = self.call.parts
        return max(range(len(parts)), key=lambda k: parts[k].num_elements)

    @property
    def trains(self) -> bool:
        return self.key.mode.trains

    @functools.cached_property
    def values(self) -> Sizes:
        """The values of the call's variables."""
        return variable_values(self.key.variables, self.call.leaves)

    def values_of(self, sizes: Sequence[int]) -> Sizes:
        """The values of the first of the last microbatches of the call, whose rows are ``sizes``."""
        if not self.call.given:
            return self.values
        part = self.call.given[min(self.batch - sum(sizes), self.batch - 1)]
        return variable_values(self.key.variables, part.leaves)

    def is_valid_for(self, graph: TrainingGraph, sizes: Sequence[int]) -> bool:
        """Whether a graph is valid for the first of the last microbatches, whose rows are ``sizes``."""
        return graph.is_valid_for(sizes[0], self.values_of(sizes))

    def valid_graph(self, graphs: Iterable[StagedGraph], sizes: Sequence[int]) -> StagedGraph | None:
        """The first of these graphs that is valid for the first of the last microbatches, if any."""
        return next((each for each in graphs if self.is_valid_for(each.graph, sizes)), None)

    def findings(self, graph: TrainingGraph) -> BatchFindings:
        """The findings about the batch; with a microbatch weight, each microbatch is a batch of its own."""
        return graph.findings if self.has_own_batches else graph.findings_for(self.batch, self.values)


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """The artifacts that run a call, the decisions for later calls, and what these may use again."""

    groups: MicrobatchGroups
    decided: Candidate
    known: CompiledGraphs


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside a ``with``.

    Most of what a compilation allocates stays until its end, and each collection would visit all of it: a
    seventh of the processor time, for 15 MB less at the peak.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
