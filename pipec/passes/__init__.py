"""Compiler passes: functions from graph to graph.

The graph is verified after the last. If a rule is broken, or a pass fails, it is verified after each of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipec.errors import PipecError, VerifyError
from pipec.graph import TrainingGraph
from pipec.graph.invariants import verify_graph
from pipec.graph.training_graph import copy_graph


class Pass(Protocol):
    """A frozen dataclass whose fields are its options, so that passes can be printed and compared."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph: ...


Observer = Callable[[int, Pass, TrainingGraph, float], None]
"""Called after each pass with its position, the pass, the new graph and the seconds it took."""


def run_passes(
    graph: TrainingGraph, passes: Sequence[Pass], observers: Sequence[Observer] = (), first: int = 0
) -> TrainingGraph:
    """A copy of the graph after these passes, in order. They are those from ``first`` on of a list.

    Raises:
        VerifyError: a rule is broken; it names the first pass that breaks one.
    """
    result = copy_graph(graph)
    try:
        for position, transform in enumerate(passes, first):
            started = time.perf_counter()
            result = transform(result)
            seconds = time.perf_counter() - started
            for observer in observers:
                observer(position, transform, result, seconds)
        verify_graph(result)
    except Exception as error:
        if isinstance(error, VerifyError) or not isinstance(error, PipecError):
            _verify_each(copy_graph(graph), passes)
        raise
    return result


def _verify_each(graph: TrainingGraph, passes: Sequence[Pass]) -> None:
    """Run the passes once more, and verify the graph after each of them."""
    for transform in passes:
        graph = transform(graph)
        verify_graph(graph, after=transform)
