"""Cut for devices that differ, for links that differ, and for memory that is short: one stage on each device.

::

    h = mm(x, w0)     operator 3            h = mm(x, w0)     operator 3, stage 0, on rank 1
    g = mm(h, w1)     operator 7     ->     g = mm(h, w1)     operator 7, stage 1, on rank 0
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipec.cost.formulas import node_bytes
from pipec.graph import Parameter, TrainingGraph, is_constant, is_forward, is_tensor, memory_of
from pipec.hardware.topology import Topology
from pipec.passes.cut_stages import assign, before_free_operators, operator_seconds, transfers
from pipec.planner.cost_model import PIPEC
from pipec.planner.partition import Transfer
from pipec.planner.placement import place
from pipec.planner.workload import Workload


@dataclass(frozen=True)
class PlaceStages:
    """Cut so that the slowest stage is as fast as possible, under the model of ``planner.placement``.

    Device d of the topology is rank d, and the stages go to the ranks in the best order. Rank k of a
    schedule has ``in_flight[k]`` microbatches of so many rows at once, which matters where memory is limited.
    Raises InfeasibleError if no cut fits into it.
    """

    topology: Topology
    microbatch_size: int
    in_flight: tuple[int, ...] = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        seconds = operator_seconds(graph, self.microbatch_size)
        joined = before_free_operators(seconds)
        begins = (int(op not in joined) for op in range(1, len(seconds)))
        blocks = list(accumulate(begins, initial=0))
        model = replace(PIPEC, in_flight=self._in_flight)
        workload = _workload(graph, blocks, seconds, self.microbatch_size)
        placed = place(workload, self.topology, model, max_replicas=1, every_device=True).stages
        stage_of = {block: k for k, stage in enumerate(placed) for block in stage.operators}
        graph = assign(graph, [stage_of[block] for block in blocks], len(placed))
        return replace(graph, ranks=tuple(stage.devices[0] for stage in placed))

    def _in_flight(self, later_devices: int) -> int:
        """Of a rank that so many follow: no fewer than any of those, as the planner asks for."""
        return max(self.in_flight[-1 - later_devices :], default=0)


def _workload(graph: TrainingGraph, blocks: Sequence[int], seconds: Sequence[float], size: int) -> Workload:
    """What the planner distributes: ``blocks[op]`` are operators between which no stage may begin."""
    indices = range(blocks[-1] + 1)
    time = [0.0] * len(indices)
    for op, block in enumerate(blocks):
        time[block] += seconds[op]
    parameters, saved = [0.0] * len(indices), [0.0] * len(indices)
    for op, num_bytes in _parameter_bytes(graph, size):
        parameters[blocks[op]] += num_bytes
    for op, num_bytes in _saved_bytes(graph, size):
        saved[blocks[op]] += num_bytes
    firsts = [blocks.index(block) for block in indices]
    return Workload(
        names=[f"{graph.operators[op].name} of {graph.operators[op].module or 'the model'}" for op in firsts],
        seconds=time,
        parameter_bytes=parameters,
        resident_bytes=[2 * num_bytes for num_bytes in parameters],  # with gradients
        saved_bytes=saved,
        transfers=list(_between_blocks(transfers(graph, size), blocks)),
        before=[(block, block + 1) for block in indices[:-1]],
    )


def _between_blocks(values: Iterable[Transfer], blocks: Sequence[int]) -> Iterator[Transfer]:
    for value in values:
        maker = blocks[value.producer]
        readers = tuple(dict.fromkeys(blocks[op] for op in value.consumers if blocks[op] > maker))
        if readers:
            yield replace(value, producer=maker, consumers=readers)


def _parameter_bytes(graph: TrainingGraph, size: int) -> Iterator[tuple[int, int]]:
    """Each parameter's, at the first operator that reads it."""
    for node in graph.arguments:
        readers = [user.meta["operator"] for user in node.users if user.op == "call_function"]
        if isinstance(node.meta["role"], Parameter) and readers:
            yield min(readers), node_bytes(node, size)


def _saved_bytes(graph: TrainingGraph, size: int) -> Iterator[tuple[int, int]]:
    """What the backward reads of the forward, at the operator that makes it."""
    backward = (node for node in graph.nodes if not is_forward(node))
    read = {memory_of(source) for node in backward for source in filter(is_tensor, node.all_input_nodes)}
    for node in read:
        if node.op == "call_function" and is_forward(node) and not is_constant(node):
            yield node.meta["operator"], node_bytes(node, size)
