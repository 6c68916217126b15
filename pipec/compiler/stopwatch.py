"""Measures the steps of a compilation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipec.graph import TrainingGraph
from pipec.passes import Pass


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
