"""Let stages be cut between the steps of a recurrent layer, where whole operators make no even stages.

::

    y = recurrence(x, h, w)     9 s of 12            a = recurrence(x[:6], h, w)     stage 0
                                              ->     c = recurrence(x[6:], a, w)     stage 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy
from torch import fx

from pipec.cost.symbolic_sizes import evaluate_cost, substitute_symbols, symbol_substitutions
from pipec.graph import TrainingGraph
from pipec.passes import Pass
from pipec.passes.cut_for_replicas import balanced_starts
from pipec.passes.cut_stages import find_colocations, operator_seconds
from pipec.passes.recurrent_splitting import (
    SplitPoints,
    backward_of,
    num_steps,
    recurrent_layers,
    split_layers_in_time,
)

EVEN = 5 / 4
"""So many times the mean the slowest of even stages takes at most."""

WORTHWHILE = 9 / 10
"""Of the time of the slowest stage: if more is left, weights are not tied for it."""

MOST_PIECES = 16
"""A layer is cut at multiples of one in so many of its steps."""


@dataclass(frozen=True)
class CutRecurrentLayers:
    """The cut ``cut``, of a graph in which layers are taken apart where ``num_stages`` even stages begin."""

    cut: Pass
    num_stages: int
    microbatch_size: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return self.cut(split_layers_in_time(graph, self._ends(graph)))

    def _ends(self, graph: TrainingGraph) -> dict[int, SplitPoints]:
        """By operator, where parts of its layer end."""
        together = {op for span in find_colocations(graph) for op in range(span.first, span.last + 1)}
        layers = {op: layer for op, layer in recurrent_layers(graph).items() if op not in together}
        seconds = operator_seconds(graph, self.microbatch_size)
        if not layers or len(seconds) < self.num_stages:
            return {}
        work, pieces = list[float](), list[tuple[int, Fraction]]()
        for op, time in enumerate(seconds):
            count = _num_pieces(graph, layers[op]) if op in layers else 1
            own = self._seconds(layers[op]) if op in layers else time
            work += [own / count + (time - own), *[own / count] * (count - 1)]
            pieces += [(op, Fraction(piece, count)) for piece in range(count)]
        whole = _slowest(seconds, balanced_starts(seconds, [1] * self.num_stages))
        firsts = balanced_starts(work, [1] * self.num_stages)
        if whole <= EVEN * sum(seconds) / self.num_stages or _slowest(work, firsts) > WORTHWHILE * whole:
            return {}
        ends: dict[int, SplitPoints] = {}
        for op, begin in (pieces[first] for first in firsts):
            if begin:
                ends[op] = (*ends.get(op, ()), begin)
        return ends

    def _seconds(self, layer: fx.Node) -> float:
        """What the steps take, forward and backward."""
        back = backward_of(layer)
        nodes = [layer] if back is None else [layer, back]
        return sum(float(node.meta["cost"].seconds(self.microbatch_size)) for node in nodes)


def _num_pieces(graph: TrainingGraph, layer: fx.Node) -> int:
    length = substitute_symbols(sympy.sympify(num_steps(layer)), symbol_substitutions(graph))
    return max(1, min(MOST_PIECES, evaluate_cost(length, 1)))


def _slowest(work: Sequence[float], firsts: Sequence[int]) -> float:
    ends = [*firsts[1:], len(work)]
    return max(sum(work[first:end]) for first, end in zip(firsts, ends, strict=True))
