"""How long a search for the fastest plan may take, in counted work: the same on every machine."""

from dataclasses import dataclass

from pipec.graph import TrainingGraph

_CAPTURE, _CUT, _PLAN = 22.0, 1.0, 0.45
"""The work to capture a graph, to cut it, and to plan its stages for one size, for each of its nodes.

The unit is the time in which all passes of a cut visit a node, 0.3 ms on a slow machine. Measured of Llamas
and of GPT-2."""

_COMPUTE = 0.33
"""The work to lower, verify and simulate one compute instruction of a step."""

_SHARE = 0.1
"""The share of the work to capture that a search may take."""

_LEAST = 7000.0
"""The work that it may always take, about two seconds: not worth a word."""


@dataclass
class SearchBudget:
    """The work that a search may still do on a graph of ``num_nodes`` nodes, besides what it must try.

    ``num_skipped`` counts the plans and cuts that are not tried.
    """

    num_nodes: int
    left: float
    num_skipped: int = 0

    @classmethod
    def of(cls, graph: TrainingGraph) -> "SearchBudget":
        """A tenth of the work to capture ``graph``, or two seconds if that is more."""
        num_nodes = len(graph.module.graph.nodes)
        return cls(num_nodes, max(_SHARE * _CAPTURE * num_nodes, _LEAST))

    def takes_cut(self) -> bool:
        """Whether the work for a cut and a plan on it is left, which is spent then."""
        return self._takes((_CUT + _PLAN) * self.num_nodes)

    def takes_plan(self, num_computes: int, is_new: bool) -> bool:
        """Whether the work for a step of so many computes is left, which is spent then.

        ``is_new``: its stages were not planned for this size before.
        """
        return self._takes(_COMPUTE * num_computes + _PLAN * self.num_nodes * is_new)

    def _takes(self, work: float) -> bool:
        is_left = work <= self.left
        self.left -= work * is_left
        self.num_skipped += not is_left
        return is_left
