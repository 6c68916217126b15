"""Refuses models that draw random numbers of Python or numpy, which a capture would freeze."""

import linecache
import pickle
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from torch import nn

from pipec.capture.attributes import non_torch_generators
from pipec.capture.diagnosis import SourceLine, is_library_file
from pipec.errors import CaptureError

States = dict[str, bytes]

_MOMENT = 0.02
"""Seconds in which other threads that draw all the time will have drawn."""


class NonTorchGenerators:
    """The generators of Python and numpy that ``traced`` may use: global ones, and its own."""

    def __init__(self, traced: nn.Module) -> None:
        self._traced = traced
        self._held = non_torch_generators(traced)
        self._all = {"Python's random module": random, "numpy's random module": np.random, **self._held}
        self._before = self._states()

    def refuse_non_torch_draws(self, run: Callable[[], object], suspected: bool) -> None:
        """Raise CaptureError if ``run``, which calls the model, draws from a generator.

        It is called only if a generator moved during capture, if the model holds one, of which capture may
        use a copy, or if it is ``suspected``. A generator that another thread moves meanwhile is passed over.
        """
        if not (suspected or self._held or self._drawn()):
            return
        self._restore()
        time.sleep(_MOMENT)
        while moved_by_others := self._drawn():
            del self._all[moved_by_others], self._before[moved_by_others]
        watch = _LineFinder(self._drawn)
        watch.follow(run)
        drawn = self._drawn()
        self._restore()
        if watch.line:
            place = f"{watch.line}{self._module(watch.module)}"
            raise CaptureError(f"the model draws from {drawn}\n  at {place}\n{_REMEDY}")

    def _module(self, module: object) -> str:
        """``(h.0)`` after a space; nothing if it is no module."""
        paths = [path for path, each in self._traced.named_modules() if each is module]
        return f" ({paths[0].removeprefix('model.')})" if paths else ""

    def _drawn(self) -> str:
        """The name of a generator that has moved; empty if none has."""
        now = self._states()
        return next((name for name, state in self._before.items() if now[name] != state), "")

    def _states(self) -> States:
        return {name: pickle.dumps(_state(generator)) for name, generator in self._all.items()}

    def _restore(self) -> None:
        for name, state in self._before.items():
            _set_state(self._all[name], pickle.loads(state))


_REMEDY = (
    "A pipeline would repeat in every step what was drawn when it was captured. Draw with torch, and\n"
    "choose with torch.where: x = torch.where(torch.rand(()) < p, x, layer(x)). Or draw before the step,\n"
    "and pass a tensor."
)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)


class _LineFinder:
    """Finds the line of the model, and its module, on which a condition first holds."""

    def __init__(self, happened: Callable[[], object]) -> None:
        self.line: SourceLine | None = None
        self.module: object = None
        self._happened = happened
        self._last: tuple[SourceLine, object] | None = None

    def follow(self, run: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            run()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if is_library_file(file) or self.line is not None:
            return None
        self._look()
        text = linecache.getline(file, frame.f_lineno).strip()
        self._last = SourceLine(file, frame.f_lineno, text), frame.f_locals.get("self")
        return self._trace

    def _look(self) -> None:
        if self.line is None and self._last is not None and self._happened():
            self.line, self.module = self._last
