"""Measures the steps of a compilation, and shows its progress if it takes long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipec.console import delayed_status
from pipec.graph import TrainingGraph
from pipec.passes import Pass

_BEGINS = {
    "capture": 0.0,
    "analyse the batch": 0.45,
    "differentiate": 0.5,
    "calibrate the CPU": 0.85,
    "search": 0.88,
    "generate code": 0.95,
    "check": 0.97,
}
"""The share of a compilation that is over when a step begins, in order: of GPT-2 with 12 layers."""

SECONDS_PER_MODULE = 0.05
"""The time to compile a model, for each of its modules, until the first step is measured."""


@dataclass
class Progress:
    """Estimates how far a compilation is from the time that its steps took so far.

    Each step that begins tells how much is done. Between two of them, time passes at the rate until then. The
    share never falls, and does not reach that of the next step before it begins.
    """

    expected_seconds: float
    started: float = field(default_factory=time.perf_counter)
    step: str = "capture"
    _seconds: float = 0.0
    _done: float = 0.0

    def begin(self, step: str) -> None:
        """Note that a step begins, of any name."""
        self.step = step
        if _BEGINS.get(step, 0.0) > self._done:
            self._seconds, self._done = time.perf_counter() - self.started, _BEGINS[step]
            self.expected_seconds = self._seconds / self._done

    def __str__(self) -> str:
        """``differentiate, 60%, about 8 s left``."""
        now = time.perf_counter() - self.started
        following = min((share for share in _BEGINS.values() if share > self._done), default=0.99)
        done = min(self._done + (now - self._seconds) / self.expected_seconds, following)
        left = max(self.expected_seconds, now / done if done else 0.0) * (1 - done)
        return f"{self.step}, {done:.0%}, about {max(left, 1):.0f} s left"


@dataclass
class Stopwatch:
    """Sums the ``seconds`` of each compilation step, by its name, over all compilations."""

    seconds: dict[str, float] = field(default_factory=dict)
    _progress: Progress = field(default_factory=lambda: Progress(1.0))

    @contextmanager
    def reporting(self, what: str, num_modules: int) -> Iterator[None]:
        """Show the progress of a block that takes long: the compilation of a model of so many modules."""
        self._progress = Progress(SECONDS_PER_MODULE * num_modules + 1.0)
        with delayed_status(what, self._progress):
            yield

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the time of a block, without the time of steps that are timed within it."""
        started, noted = time.perf_counter(), sum(self.seconds.values())
        self._progress.begin(step)
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
