"""One stage for each device. Stages recompute the values that their memory cannot hold."""

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

_MAX_PRICES = 16
"""The largest number of prices of memory for which the recomputed values are chosen."""

_SEGMENTS = 4
"""Segments, about, in which a stage may recompute instead, holding one of them at a time."""


@dataclass(frozen=True)
class CutWithRecompute:
    """Cut so that the slowest stage, with the recompute that its memory requires, is as fast as possible.

    Each device of the topology has one stage, in order, and stage k has ``in_flight[k]`` microbatches of
    ``microbatch_size`` rows in flight. Devices are equally fast, and links equal. Which values are recomputed
    is decided later, for ``MarkRecompute``.

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
        choices = recompute_curve(numbers, _MAX_PRICES)
        saved = values_across(numbers, segment_boundaries(numbers, _SEGMENTS * len(self.in_flight)))
        in_segments = [needed_recomputes(numbers, recomputed - saved) for recomputed in choices]
        count, speed = len(operators.seconds), self.topology.devices[0].speed
        entry_seconds, entry_bytes = self._entries(operators)
        gradient_bytes, working_bytes = _backward_bytes(graph, blocks, count, self.microbatch_size)
        return OperatorChain(
            seconds=np.array(operators.seconds) / speed,
            resident_bytes=np.array(operators.resident_bytes),
            gradient_bytes=gradient_bytes,
            working_bytes=working_bytes,
            entry_seconds=entry_seconds,
            entry_bytes=entry_bytes,
            curves=(
                _curve_by_block(numbers, choices, block, count, speed),
                _curve_by_block(numbers, in_segments, block, count, speed, _SEGMENTS),
            ),
        )

    def _entries(self, operators: OperatorGraph) -> tuple[Vector, Vector]:
        """For each block, the seconds and bytes of the values that cross the chain in front of it."""
        level = self.topology.slowest_level
        seconds, sizes = np.zeros_like(operators.seconds), np.zeros_like(operators.seconds)
        for value in operators.transfers:
            crossed = slice(value.producer + 1, max(value.consumers) + 1)
            seconds[crossed] += PIPEC.value_seconds(value, level)
            sizes[crossed] += value.forward_bytes
        return seconds, sizes


def _backward_bytes(
    graph: TrainingGraph, blocks: Sequence[int], count: int, size: int
) -> tuple[Vector, Vector]:
    """For the backward of each of ``count`` blocks, bytes of parameter gradients and peak of other values."""
    nodes = [node for node in graph.nodes if not is_forward(node) and node.op == "call_function"]
    last_use = {storage_owner(each): node for node in nodes for each in (*node.all_input_nodes, node)}
    results = {storage_owner(node) for result, node in graph.outputs if isinstance(result, Gradient)}
    freed_after: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last_use.items():
        freed_after.setdefault(node, []).append(owner)
    gradients, working, live_bytes, live = np.zeros(count), np.zeros(count), 0, set[fx.Node]()
    for node in nodes:
        own = blocks[_operator_of(node)]
        if owns_new_storage(node) and storage_owner(node) is node and is_tensor(node):
            gradients[own] += node_bytes(node, size) * (node in results)
            live.add(node)
            live_bytes += node_bytes(node, size) * (node not in results)
        working[own] = max(working[own], live_bytes)
        for owner in live.intersection(freed_after.get(node, ())):
            live_bytes -= node_bytes(owner, size) * (owner not in results)
    return gradients, working


def _curve_by_block(
    values: StageValues,
    choices: Sequence[frozenset[int]],
    block: Sequence[int],
    count: int,
    speed: float,
    segments: int = 1,
) -> RecomputeCurve:
    """The seconds recomputed and the bytes saved and recomputed: a column a block, a row a choice."""
    seconds, saved, recomputed = (np.zeros((len(choices), count)) for _ in range(3))
    for row, choice in enumerate(choices):
        for v in sorted(choice):
            seconds[row, block[v]] += values[v].seconds / speed
            recomputed[row, block[v]] += values[v].num_bytes * values[v].is_needed
        for v in sorted(saved_values(values, choice)):
            saved[row, block[v]] += values[v].num_bytes
    return RecomputeCurve(seconds, saved, recomputed, segments)


def _operator_of(node: fx.Node) -> int:
    """The operator that makes a value; for a buffer, the first operator that reads it."""
    if node.op == "placeholder":
        return min(int(user.meta["operator"]) for user in node.users if user.op == "call_function")
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return int(made_by.meta["operator"])
