"""Loads the functions of a rank's stages: as generated source, or compiled by torch.

``torch.compile`` takes generated functions unchanged. Compiled random operators take their seed as a tensor
and draw the same numbers as the source. Other values may differ from the source's in their last bits, because
sums are computed in another order.
"""

import contextlib
import functools
import inspect
import re
import time
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import getitem
from typing import Any

import torch

from pipec.console import delayed_status, warn
from pipec.errors import InputError
from pipec.ir import Plan
from pipec.runtime.random_operators import call_with_generator
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.direct_calls import CallRecorder, DirectCall, call_key

_TIMED_CALLS = 3
"""The calls of a function that ``auto`` times, after the one that compiles."""

_MAX_RECORDED = 16
"""The most direct calls recorded for a function. Calls with other keys go through ``torch.compile``."""

Function = Callable[..., Any]


def require_source(kernels: str, plan: Plan | None = None) -> None:
    """Raise InputError if functions that accumulate gradients in place might run more than once.

    Without a ``plan``, functions are assumed to accumulate.
    """
    adds = plan is None or any(stage.cost.memory.accumulated_in_place for stage in plan.stages)
    if adds and kernels != "source":
        raise InputError(
            "with fused_gradients, stage functions accumulate gradients in place, but "
            f"kernels={kernels!r} may run a function twice; pass kernels='source', or compile without "
            "fused_gradients"
        )


def load_kernels(code: types.ModuleType, functions: Iterable[str], kernels: str) -> types.ModuleType:
    """The code of a stage with its phase ``functions`` loaded as ``kernels`` says."""
    if kernels in ("source", "cudagraphs"):
        return code
    loaded = types.ModuleType(code.__name__)
    vars(loaded).update(vars(code))
    for name in functions:
        if function := getattr(code, name, None):
            setattr(loaded, name, _compiled(function, f"{name} of {code.__name__}", kernels == "auto"))
    return loaded


def _compiled(function: Function, name: str, chooses: bool) -> Function:
    compiled = _Compiled(function, name)
    run = _Chosen(compiled, function) if chooses else compiled

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return run(args)

    return call


class _Compiled:
    """A phase function under ``torch.compile``. If that fails, the source runs from then on.

    Calls with a known key are direct.
    """

    def __init__(self, function: Function, name: str) -> None:
        self._source, self._name = function, name
        self._call_recorder = CallRecorder()
        torch.compiler.allow_in_graph(call_with_generator)  # it takes a lock, which Dynamo cannot trace
        self._compiled: Function = torch.compile(
            function, fullgraph=True, backend=self._call_recorder.compile
        )
        self._direct: dict[Hashable, DirectCall | None] = {None: None}
        self._draws = [int(number) for number in re.findall(r"\brng\((\d+)\)", inspect.getsource(function))]
        self._num_recorded = 0
        self.is_ready = self.has_failed = False

    def __call__(self, args: Sequence[Any]) -> Any:
        if self.has_failed:
            return self._source(*args)
        saved = [each for each in args if isinstance(each, list)]
        copies = [list(each) for each in saved]
        try:
            return self._call(args)
        except Exception as error:  # torch.compile raises many kinds
            for each, values in zip(saved, copies, strict=True):
                each[:] = values
            returned = self._source(*args)  # raises if the call itself is wrong
            self._warn(error)
            return returned

    def _call(self, args: Sequence[Any]) -> Any:
        seeds = [value.seeds(self._draws) for value in args if isinstance(value, OperatorGenerators)]
        plain = [
            tuple(seeds[0].values()) if isinstance(value, OperatorGenerators) else value for value in args
        ]
        key = call_key(plain)
        if direct := self._direct.get(key):
            matches, returned = direct(plain)
            if matches:
                return returned
            del self._direct[key]
        passed = [
            functools.partial(getitem, seeds[0]) if isinstance(x, OperatorGenerators) else x for x in args
        ]
        with contextlib.nullcontext() if self.is_ready else delayed_status(f"compiling {self._name}"):
            if key in self._direct or self._num_recorded == _MAX_RECORDED:
                returned = self._compiled(*passed)
            else:
                self._num_recorded += 1
                self._direct[key], returned = self._call_recorder.record(
                    plain, lambda: self._compiled(*passed)
                )
        self.is_ready = True
        return returned

    def _warn(self, error: Exception) -> None:
        self.has_failed = True
        first, second, *_ = [line.strip() for line in str(error).strip().splitlines()] + ["", ""]
        warn(
            f"torch.compile cannot compile {self._name}, which runs as its source: "
            f"{type(error).__name__}: {first} {second}".rstrip()
        )


class _Chosen:
    """A phase function as its source or compiled, whichever takes less time in the first calls."""

    def __init__(self, compiled: _Compiled, source: Function) -> None:
        self._compiled, self._source = compiled, source
        self._seconds: list[tuple[float, float]] = []
        self._choice: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, args: Sequence[Any]) -> Any:
        if self._choice is not None:
            return self._choice(args)
        was_ready = self._compiled.is_ready
        own = [list(value) if isinstance(value, list) else value for value in args]
        returned = list[Any]()
        compiled = _timed(lambda: returned.append(self._compiled(own)))
        if self._compiled.has_failed:  # the source has run already, and may have modified saved values
            self._choice = lambda args: self._source(*args)
            return returned[0]
        source = _timed(lambda: returned.append(self._source(*args)))
        if was_ready:
            self._seconds.append((compiled, source))
        if len(self._seconds) == _TIMED_CALLS:
            is_faster = min(c for c, _ in self._seconds) < min(s for _, s in self._seconds)
            self._choice = self._compiled if is_faster else lambda args: self._source(*args)
        return returned[1]


def _timed(call: Callable[[], object]) -> float:
    """The seconds a call takes, with what it launches on a GPU."""
    started = _now()
    call()
    return _now() - started


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
