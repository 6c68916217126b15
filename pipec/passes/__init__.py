"""Compiler passes: functions from graph to graph. The graph is verified after each of them."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipec.graph import TrainingGraph
from pipec.graph.invariants import verify_graph


class Pass(Protocol):
    """A frozen dataclass whose fields are its options, so that passes can be printed and compared."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph: ...


Observer = Callable[[int, Pass, TrainingGraph, float], None]
"""Called after each pass with its position, the pass, the new graph and the seconds it took."""


def run_passes(
    graph: TrainingGraph, passes: Sequence[Pass], observers: Sequence[Observer] = (), first: int = 0
) -> TrainingGraph:
    """Run the passes in order and verify the graph after each. Raises VerifyError that names the pass.

    The passes are those from the position ``first`` of a list.
    """
    for position, transform in enumerate(passes, first):
        started = time.perf_counter()
        graph = transform(graph)
        verify_graph(graph, after=transform)
        seconds = time.perf_counter() - started
        for observer in observers:
            observer(position, transform, graph, seconds)
    return graph
