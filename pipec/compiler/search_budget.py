"""How long a search for the fastest plan may take, in counted work: the same on every machine."""

import math
from dataclasses import dataclass

from pipec.graph import TrainingGraph

_CAPTURE, _CUT, _PLAN = 22.0, 1.0, 0.45
"""The work to capture a graph, to cut it, and to plan its stages for one size, for each of its nodes.

The unit is the time in which all passes of a cut visit a node, 0.3 ms on a slow machine. Measured of Llamas
and of GPT-2."""

_COMPUTE = 0.33
"""The work to lower, verify and simulate one compute instruction of a step."""

_FIT = 4.0
"""The work for each node to choose what is recomputed or offloaded, and to cut and plan the stages again."""

_SHARE, _SHARE_WITHIN_MEMORY = 0.1, 0.5
"""The shares of the work to capture that a search may take, and where memory is short may take besides."""

_LEAST = 7000.0
"""The work that it may always take, about two seconds: not worth a word."""


@dataclass
class SearchBudget:
    """The work that a search may still do on a graph of ``num_nodes`` nodes, besides what it must try.

    ``left_within_memory`` is for plans that fit only if values are recomputed or offloaded, once one fits.
    Before, a search tries as much as ``left_until_fit``. ``num_skipped`` counts the plans and cuts that are
    not tried.
    """

    num_nodes: int
    left: float
    left_within_memory: float
    left_until_fit: float = math.inf
    num_skipped: int = 0

    @classmethod
    def of(cls, graph: TrainingGraph) -> "SearchBudget":
        """A tenth of the work to capture ``graph``, or two seconds if that is more."""
        work = _capture_work(graph)
        return cls(_num_nodes(graph), max(_SHARE * work, _LEAST), max(_SHARE_WITHIN_MEMORY * work, _LEAST))

    @classmethod
    def for_first_fit(cls, graph: TrainingGraph) -> "SearchBudget":
        """As long as it takes until a plan fits, but at most the work to capture ``graph``."""
        return cls(_num_nodes(graph), 0.0, 0.0, max(_capture_work(graph), _LEAST))

    def takes_cut(self) -> bool:
        """Whether the work for a cut and a plan on it is left, which is spent then."""
        return self._takes("left", (_CUT + _PLAN) * self.num_nodes)

    def takes_plan(self, num_computes: int, is_new: bool) -> bool:
        """Whether the work for a step of so many computes is left, which is spent then.

        ``is_new``: its stages were not planned for this size before.
        """
        return self._takes("left", _COMPUTE * num_computes + _PLAN * self.num_nodes * is_new)

    def takes_cut_within_memory(self) -> bool:
        """The same as ``takes_cut``, of a cut that needs less memory where another one fits."""
        return self._takes("left_within_memory", (_CUT + _PLAN) * self.num_nodes)

    def takes_fit(self, num_computes: int, fits: bool) -> bool:
        """Whether the work to fit a step of so many computes into memory is left, which is spent then.

        ``fits``: another plan fits.
        """
        account = "left_within_memory" if fits else "left_until_fit"
        return self._takes(account, _FIT * self.num_nodes + 2 * _COMPUTE * num_computes)

    def _takes(self, account: str, work: float) -> bool:
        is_left: bool = work <= getattr(self, account)
        setattr(self, account, getattr(self, account) - work * is_left)
        self.num_skipped += not is_left
        return is_left


def _num_nodes(graph: TrainingGraph) -> int:
    return len(graph.module.graph.nodes)


def _capture_work(graph: TrainingGraph) -> float:
    return _CAPTURE * _num_nodes(graph)
