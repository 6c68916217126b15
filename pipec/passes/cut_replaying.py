"""Give every node the stage that runs it, where stages compute again what their memory does not hold.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1

A stage is a range of forward operators in program order, with all they caused, forward and backward.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import fx

from pipec.graph import TrainingGraph
from pipec.hardware.topology import Topology
from pipec.passes.cut_stages import assign, blocks_of, operator_graph, operator_seconds, spans_of
from pipec.passes.mark_recompute import forward_values
from pipec.planner.cost_model import PIPEC
from pipec.planner.operator_graph import OperatorGraph
from pipec.planner.placement import TOLERANCE
from pipec.planner.recompute import saved_values
from pipec.planner.replay_curve import curve
from pipec.planner.replaying_cut import Chain, Vector, cut_chain

_MOST_PRICES = 16
"""At so many prices of memory the operators are asked what they replay."""


@dataclass(frozen=True)
class CutReplaying:
    """Cut so that the slowest stage is as fast as possible, with what its memory forces it to replay.

    There is one stage on each device of the topology, in order, and stage k has ``in_flight[k]`` microbatches
    of ``microbatch_size`` rows at once. The devices are equally fast, and joined by equal links.
    ``MarkRecompute`` decides later what exactly is replayed.

    Raises:
        InfeasibleError: no cut fits into the memory of the devices.
    """

    topology: Topology
    microbatch_size: int
    in_flight: tuple[int, ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        seconds = operator_seconds(graph, self.microbatch_size)
        blocks = blocks_of(seconds, spans_of(graph))
        operators = operator_graph(graph, blocks, seconds, self.microbatch_size)
        chain = self._chain(graph, blocks, operators)
        limits = [device.memory_bytes for device in self.topology.devices]
        firsts = cut_chain(chain, self.in_flight, limits, TOLERANCE)
        return assign(graph, [bisect_right(firsts, block) - 1 for block in blocks], len(firsts))

    def _chain(self, graph: TrainingGraph, blocks: list[int], operators: OperatorGraph) -> Chain:
        values = forward_values(graph, self.microbatch_size)
        numbers, block = tuple(values.values()), [blocks[_operator_of(node)] for node in values]
        choices = curve(numbers, _MOST_PRICES)
        count, speed = len(operators.seconds), self.topology.devices[0].speed

        def by_block(figures: Iterable[Iterable[tuple[int, float]]]) -> Vector:
            sums = np.zeros((len(choices), count))
            for row, figures_of_choice in zip(sums, figures, strict=True):
                for value, figure in figures_of_choice:
                    row[block[value]] += figure
            return sums

        entry_seconds, entry_bytes = self._entries(operators)
        return Chain(
            seconds=np.array(operators.seconds) / speed,
            resident_bytes=np.array(operators.resident_bytes),
            entry_seconds=entry_seconds,
            entry_bytes=entry_bytes,
            replay_seconds=by_block([(v, numbers[v].seconds / speed) for v in again] for again in choices),
            saved_bytes=by_block(
                [(v, numbers[v].num_bytes) for v in saved_values(numbers, again)] for again in choices
            ),
            replayed_bytes=by_block(
                [(v, numbers[v].num_bytes) for v in again if numbers[v].is_needed] for again in choices
            ),
        )

    def _entries(self, operators: OperatorGraph) -> tuple[Vector, Vector]:
        """For each block the seconds and bytes of what crosses the chain before it."""
        count, level = (
            len(operators.seconds),
            min(self.topology.levels, key=lambda each: each.bytes_per_second),
        )
        seconds, sizes = np.zeros(count), np.zeros(count)
        for value in operators.transfers:
            crossed = slice(value.producer + 1, max(value.consumers) + 1)
            seconds[crossed] += PIPEC.value_seconds(value, level)
            sizes[crossed] += value.forward_bytes
        return seconds, sizes


def _operator_of(node: fx.Node) -> int:
    """The operator that makes a value; of a buffer that is changed, the first that reads it."""
    if node.op == "placeholder":
        return min(int(user.meta["operator"]) for user in node.users if user.op == "call_function")
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return int(made_by.meta["operator"])
