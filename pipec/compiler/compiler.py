"""The compiler of one model: holds the decisions and the compiled artifacts that later calls use."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import traced_step_without_call
from pipec.compiler.candidate import Candidate
from pipec.compiler.capture_key import CaptureKey, CaptureSignature
from pipec.compiler.compile_cache import CompileCache
from pipec.compiler.compile_settings import CompileSettings
from pipec.compiler.microbatch_groups import MicrobatchGroups, require_one_graph
from pipec.compiler.stopwatch import Stopwatch
from pipec.console import warn
from pipec.ir import Mode, Sizes


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

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """The version of a capture key that is valid for the call; a new number if none is."""
        return self.cache.version(key, call)

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether the captured graphs are still valid for the model."""
        return self.cache.is_valid(signature)

    def compile(
        self, signature: CaptureSignature, call: ModelCall, change: str, refuses_mixed_rows: bool
    ) -> MicrobatchGroups:
        """Compile an artifact for each group of consecutive microbatches of ``call``.

        ``change`` says which variables of the call differ from before. With ``refuses_mixed_rows``,
        a batch whose rows depend on one another is refused.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        reason = self.cache.recompile_reason(signature, call, change)
        num_modules = len([*self.model.modules()])
        with self.stopwatch.reporting(f"compiling, {reason}", num_modules), without_garbage_collection():
            # It loads torch._dynamo, which takes seconds that ranks save for which another one compiles.
            from pipec.compiler.compile import CompileRequest, compile_call

            request = CompileRequest(
                settings=self.settings,
                model=self.model,
                canonical=self.canonical,
                key=signature.key,
                call=call,
                stopwatch=self.stopwatch,
                warn=self._warn_once,
                refuses_mixed_rows=refuses_mixed_rows,
                change=change,
                trained=tuple(self.cache.trained_graphs(signature.key)),
                trained_in_other_modes=tuple(self.cache.graphs_trained_in_other_modes(signature.key)),
            )
            compiled = compile_call(request, self.decided, self.cache.get(signature))
        self.decided = compiled.decided
        self.cache.put(signature, compiled.cached)
        return compiled.groups

    def require_one_graph_for(self, signature: CaptureSignature, sizes: Sequence[int], values: Sizes) -> None:
        """Refuse microbatches of several sizes unless one graph is valid for all of them.

        Raises:
            InputError: the model makes a constant of the batch size, or was captured for one size.
        """
        graphs = [staged.graph for staged in self.cache.get(signature).graphs]
        require_one_graph(graphs, sizes, values, self.decided.dynamic)

    def read(self, signature: CaptureSignature) -> dict[str, Any]:
        """The Python values that the model and the loss read in this signature's captures, by expression."""
        return self.cache.read(signature)

    def traced(self, mode: Mode) -> nn.Module:
        """A module with the model and the loss, from which the expressions of ``read`` are evaluated."""
        if mode not in self._traced:
            self._traced[mode] = traced_step_without_call(self.model, self.settings.loss_fn, mode)
        return self._traced[mode]

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned.add(warning)
            warn(warning)


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
