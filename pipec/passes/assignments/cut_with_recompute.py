"""As many stages as devices, which compute again what their memory does not hold."""

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.graph import Assignment, Gradient, TrainingGraph, is_forward, is_tensor, storage_owner
from pipec.graph.lifetimes import owns_new_storage
from pipec.hardware.topology import Topology
from pipec.passes.assignments.operator_blocks import (
    build_operator_graph,
    find_colocations,
    operator_blocks,
    operator_seconds,
)
from pipec.passes.mark_recompute import forward_values
from pipec.planner.chain_cut import OperatorChain, RecomputeCurve, Vector, cut_chain
from pipec.planner.cost_model import PIPEC
from pipec.planner.operator_graph import OperatorGraph
from pipec.planner.recompute_curve import recompute_curve
from pipec.planner.recompute_segments import segment_boundaries, values_across
from pipec.planner.recompute_solver import GAP, StageValues, needed_recomputes, saved_values

_MOST_PRICES = 16
"""At so many prices of memory the operators are asked what they replay."""

_SEGMENTS = 4
"""A stage may also replay in about so many segments, and hold one of them at a time."""


@dataclass(frozen=True)
class CutWithRecompute:
    """Cut so that the slowest stage is as fast as possible, with what its memory forces it to replay.

    There is one stage on each device of the topology, in order, and stage k has ``in_flight[k]`` microbatches
    of ``microbatch_size`` rows at once. The devices are equally fast, and joined by equal links.
    ``MarkRecompute`` decides later what exactly is recomputed.

    Raises:
        InfeasibleError: no cut fits into the memory of the devices.
    """

    topology: Topology
    microbatch_size: int
    in_flight: tuple[int, ...]

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size)
        blocks = operator_blocks(seconds, find_colocations(graph))
        operators = build_operator_graph(graph, blocks, seconds, self.microbatch_size)
        chain = self._chain(graph, blocks, operators)
        limits = [device.memory_bytes for device in self.topology.devices]
        firsts = cut_chain(chain, self.in_flight, limits, GAP)
        return Assignment(tuple(bisect_right(firsts, block) - 1 for block in blocks), len(firsts))

    def _chain(self, graph: TrainingGraph, blocks: list[int], operators: OperatorGraph) -> OperatorChain:
        values = forward_values(graph, self.microbatch_size)
        numbers, block = tuple(values.values()), [blocks[_operator_of(node)] for node in values]
        choices = recompute_curve(numbers, _MOST_PRICES)
        kept = values_across(numbers, segment_boundaries(numbers, _SEGMENTS * len(self.in_flight)))
        in_segments = [needed_recomputes(numbers, again - kept) for again in choices]
        count, speed = len(operators.seconds), self.topology.devices[0].speed
        entry_seconds, entry_bytes = self._entries(operators)
        gradient_bytes, working_bytes = _made(graph, blocks, count, self.microbatch_size)
        return OperatorChain(
            seconds=np.array(operators.seconds) / speed,
            resident_bytes=np.array(operators.resident_bytes),
            gradient_bytes=gradient_bytes,
            working_bytes=working_bytes,
            entry_seconds=entry_seconds,
            entry_bytes=entry_bytes,
            curves=(
                _replays(numbers, choices, block, count, speed),
                _replays(numbers, in_segments, block, count, speed, _SEGMENTS),
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


def _made(graph: TrainingGraph, blocks: Sequence[int], count: int, size: int) -> tuple[Vector, Vector]:
    """What the backward of each of ``count`` blocks makes of gradients, and the most it holds of all else."""
    nodes = [node for node in graph.nodes if not is_forward(node) and node.op == "call_function"]
    last = {storage_owner(each): node for node in nodes for each in (*node.all_input_nodes, node)}
    kept = {storage_owner(node) for result, node in graph.outputs if isinstance(result, Gradient)}
    gone: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last.items():
        gone.setdefault(node, []).append(owner)
    gradients, working, held, live = np.zeros(count), np.zeros(count), 0, set[fx.Node]()
    for node in nodes:
        own = blocks[_operator_of(node)]
        if owns_new_storage(node) and storage_owner(node) is node and is_tensor(node):
            gradients[own] += node_bytes(node, size) * (node in kept)
            live.add(node)
            held += node_bytes(node, size) * (node not in kept)
        working[own] = max(working[own], held)
        for owner in live.intersection(gone.get(node, ())):
            held -= node_bytes(owner, size) * (owner not in kept)
    return gradients, working


def _replays(
    values: StageValues,
    choices: Sequence[frozenset[int]],
    block: Sequence[int],
    count: int,
    speed: float,
    segments: int = 1,
) -> RecomputeCurve:
    """What each of ``count`` blocks replays and saves, with a row for each choice."""
    seconds, saved, recomputed = (np.zeros((len(choices), count)) for _ in range(3))
    for row, again in enumerate(choices):
        for v in sorted(again):
            seconds[row, block[v]] += values[v].seconds / speed
            recomputed[row, block[v]] += values[v].num_bytes * values[v].is_needed
        for v in sorted(saved_values(values, again)):
            saved[row, block[v]] += values[v].num_bytes
    return RecomputeCurve(seconds, saved, recomputed, segments)


def _operator_of(node: fx.Node) -> int:
    """The operator that makes a value; of a buffer that is changed, the first that reads it."""
    if node.op == "placeholder":
        return min(int(user.meta["operator"]) for user in node.users if user.op == "call_function")
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return int(made_by.meta["operator"])
