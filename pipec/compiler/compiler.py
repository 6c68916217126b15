"""The compiler of one model: what its calls decided and what was compiled for them, for the calls to come."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import traced_step_without_call
from pipec.compiler.candidate import Candidate
from pipec.compiler.capture_key import CaptureKey, CaptureSignature
from pipec.compiler.compile import CompileRequest, CompileSettings, compile_call
from pipec.compiler.compile_cache import CompileCache
from pipec.compiler.microbatch_groups import MicrobatchGroups, require_one_graph
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import SchedulePolicy
from pipec.compiler.stopwatch import Stopwatch
from pipec.ir import Mode, Precision, Sizes
from pipec.torch_compat import ValuePath

log = logging.getLogger("pipec")


@dataclass
class Compiler:
    """Compiles the calls of one model. The first call decides where stages are, and what they own.

    ``decided`` is what the user and the calls so far decided: this is all that one call leaves to the next,
    besides what the cache holds. While the pipeline ``refuses_mixed_rows``, a batch whose rows depend on one
    another is refused. ``stopwatch`` says how long each step of all compilations took together.
    """

    model: nn.Module
    canonical: Mapping[str, str]
    settings: CompileSettings
    decided: Candidate
    refuses_mixed_rows: bool = False
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    cache: CompileCache = field(default_factory=CompileCache)
    _traced: dict[Mode, nn.Module] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        return self.settings.loss_fn

    @property
    def device(self) -> torch.device:
        return self.settings.device

    @property
    def precision(self) -> Precision | None:
        return self.settings.precision

    @property
    def options(self) -> CompilerOptions:
        return self.decided.options

    @property
    def policy(self) -> SchedulePolicy:
        return self.decided.policy

    @property
    def microbatches(self) -> int | None:
        return self.decided.num_microbatches

    def of(self, model: nn.Module) -> "Compiler":
        """One for a copy of the model, that knows where stages are and has compiled nothing."""
        return Compiler(model, self.canonical, self.settings, self.decided)

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """Which capture of a capture key is still right; a new number if none is."""
        return self.cache.version(key, call)

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether what was captured is still right for the model."""
        return self.cache.is_valid(signature)

    def compile(self, signature: CaptureSignature, call: ModelCall, variables: str = "") -> MicrobatchGroups:
        """What runs the microbatches of ``call``: groups of consecutive ones, with the rows of each.

        ``variables`` is what about the variables of the call is new.

        Raises:
            CaptureError, InputError, PlanError, InfeasibleError: nothing has run or been sent by then.
        """
        request = CompileRequest(
            self.settings,
            self.model,
            self.canonical,
            signature.key,
            call,
            self.stopwatch,
            self._warn_once,
            self.refuses_mixed_rows,
        )
        reason = self.cache.recompile_reason(signature, call, self.model, variables)
        with self.stopwatch.reporting(f"pipec: compiling, {reason}"):
            compiled = compile_call(request, self.decided, self.cache.get(signature))
        self.decided = compiled.decided
        self.cache.put(signature, compiled.cached)
        return compiled.groups

    def require_one_graph_for(self, signature: CaptureSignature, sizes: Sequence[int], values: Sizes) -> None:
        """Refuse microbatches of several sizes that one graph is not right for, whoever runs which of them.

        Raises:
            InputError: the model makes a constant of the batch, or was captured for one size.
        """
        graphs = [staged.graph for staged in self.cache.get(signature).graphs]
        require_one_graph(graphs, sizes, values, self.decided.dynamic)

    def read(self, signature: CaptureSignature) -> dict[ValuePath, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        return self.cache.read(signature)

    def traced(self, mode: Mode) -> nn.Module:
        """A module that has model and loss where ``read`` finds values."""
        if mode not in self._traced:
            self._traced[mode] = traced_step_without_call(self.model, self.loss_fn, mode)
        return self._traced[mode]

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)
