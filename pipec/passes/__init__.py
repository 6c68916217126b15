"""Compiler passes: frozen dataclasses from graph to graph, with ``verify`` after every one."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipec.graph import TrainingGraph
from pipec.graph.invariants import verify_graph


class Pass(Protocol):
    """Options are the fields of a frozen dataclass, so that a pass prints and compares."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph: ...


Observer = Callable[[int, Pass, TrainingGraph, float], None]
"""Called after each pass with its position, the pass, the new graph and the seconds it took."""


def run_passes(
    graph: TrainingGraph, passes: Sequence[Pass], observers: Sequence[Observer] = ()
) -> TrainingGraph:
    """Run the passes in order, verifying after each. Raises VerifyError naming the pass at fault."""
    for position, transform in enumerate(passes):
        started = time.perf_counter()
        graph = transform(graph)
        verify_graph(graph, after=transform)
        seconds = time.perf_counter() - started
        for observer in observers:
            observer(position, transform, graph, seconds)
    return graph
