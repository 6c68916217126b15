"""The costs of operators, and the blocks of operators that are never divided between stages."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import (
    Buffer,
    Gradient,
    Parameter,
    Precomputed,
    TailInput,
    TrainingGraph,
    UpdatedBuffer,
    depends_on_inputs_only,
    has_data_dependent_size,
    is_constant,
    is_forward,
    is_tensor,
    source_parameters,
    storage_owner,
)
from pipec.graph.module_cuts import undivided_ranges
from pipec.ir import VersionPolicy
from pipec.planner.chain import OperatorChain, Transfer


@dataclass(frozen=True)
class UpdateCost:
    """Costs of an asynchronous schedule: a stage updates after each mini-batch and holds weight versions.

    ``state_bytes`` has the bytes of optimizer state of each parameter. A device moves ``bytes_per_second``. A
    mini-batch has ``num_microbatches``. ``versions`` is None if the policy is not decided yet.
    """

    state_bytes: Mapping[str, int] = field(repr=False)
    bytes_per_second: float
    versions: VersionPolicy | None
    num_microbatches: int = 1

    def seconds(self, fqn: str, num_bytes: float) -> float:
        """The seconds of a parameter's update, divided by the microbatches of a mini-batch.

        An update reads the parameter, gradient and state, and writes the parameter and state.
        """
        moved = 3 * num_bytes + 2 * self.state_bytes.get(fqn, 0)
        return moved / self.bytes_per_second / self.num_microbatches

    def resident_bytes(self, fqn: str, num_bytes: float, num_stages: int) -> float:
        """The bytes of a parameter's state and versions on a stage, besides ``bytes_in_flight``."""
        match self.versions:
            case VersionPolicy.STASHED:
                others = -1.0  # the microbatch that began last uses the latest version
            case VersionPolicy.VERTICAL:
                others = num_stages - 1
            case VersionPolicy.DOUBLE:
                others = 1.0
            case None:
                others = 0.0
        return self.state_bytes.get(fqn, 0) + others * num_bytes

    def bytes_in_flight(self, num_bytes: float) -> float:
        """The bytes of a parameter for each microbatch in flight: one version, if versions are stashed."""
        return num_bytes if self.versions is VersionPolicy.STASHED else 0.0


@dataclass(frozen=True)
class Colocation:
    """The first and last of a range of operators that must be on one stage, why, and what would change it."""

    reason: str
    first: int
    last: int
    remedy: str = ""


def find_colocations(graph: TrainingGraph, between_modules: bool = False) -> list[Colocation]:
    """The colocations of more than one operator. Overlapping ones are merged, with the reason of the first.

    Operators that read or change a buffer that forward() changes are on one stage. Otherwise a microbatch
    would wait on an early stage for the microbatch before it to pass a later one. The operators that make and
    read a value of data-dependent size are on one stage too, because no other stage knows the size; values
    that depend on the model's inputs alone are excepted, because each stage computes them for itself. With
    ``between_modules`` the operators of a module are on one stage, if it has some of its own.
    """
    merged: list[Colocation] = []
    colocations = [*_colocations_of_buffers(graph), *_colocations_of_values(graph)]
    if between_modules:
        reason, remedy = "stages are cut between modules", "divide a module into several"
        ranges = undivided_ranges(graph.operators)
        colocations += [Colocation(reason, *each, remedy) for each in ranges if each[0] < each[1]]
    for each in sorted(colocations, key=lambda each: each.first):
        if merged and each.first <= merged[-1].last:
            merged[-1] = replace(merged[-1], last=max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return merged


def _colocations_of_values(graph: TrainingGraph) -> Iterator[Colocation]:
    for node in graph.nodes:
        if has_data_dependent_size(node) and not depends_on_inputs_only(node):
            operators = [_operator_of(each) for each in (node, *node.users) if each.op == "call_function"]
            if min(operators) < max(operators):
                reason, remedy = "a tensor has a data-dependent size", "pad to a fixed size"
                yield Colocation(reason, min(operators), max(operators), remedy)


def _colocations_of_buffers(graph: TrainingGraph) -> Iterator[Colocation]:
    readers = {
        node.meta["role"].fqn: [user for user in node.users if user.op == "call_function"]
        for node in graph.arguments
        if isinstance(node.meta["role"], Buffer)
    }
    for role, node in graph.outputs:
        if isinstance(role, UpdatedBuffer):
            changed_by = [node] if node.op == "call_function" else []
            operators = [_operator_of(user) for user in [*readers.get(role.fqn, ()), *changed_by]]
            if operators and min(operators) < max(operators):
                reason, remedy = f"forward() changes buffer {role.fqn}", "give each use a buffer of its own"
                yield Colocation(reason, min(operators), max(operators), remedy)


def _operator_of(node: fx.Node) -> int:
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return int(made_by.meta["operator"])


def operator_seconds(
    graph: TrainingGraph, microbatch_size: int, updates: UpdateCost | None = None
) -> list[float]:
    """The seconds of each operator: forward, backward, and updates of parameters that it reads first.

    The tail is left out: all ranks wait while it runs, so even stages are the fastest however long it takes.
    """
    seconds = [0.0] * len(graph.operators)
    if updates:
        for tensor in filter(lambda tensor: tensor.is_trained, _model_tensors(graph)):
            seconds[tensor.operator] += updates.seconds(tensor.fqn, tensor.num_bytes)
    for node in graph.nodes:
        if not is_constant(node):
            seconds[node.meta["operator"]] += node.meta["cost"].seconds(microbatch_size)
    return seconds


def operator_blocks(seconds: Sequence[float], colocations: Sequence[Colocation]) -> list[int]:
    """The block of each operator. Stages consist of whole blocks, and each colocation is within one.

    A block contains an operator that takes time, so that no stage is without work. For example, operators of
    0, 2, 0, 0 and 3 seconds are in blocks 0, 0, 0, 0 and 1.
    """
    busy = [op for op, time in enumerate(seconds) if time > 0]
    begins = set(busy[1:])
    for colocation in colocations:
        within = {op for op in begins if colocation.first <= op <= colocation.last}
        begins -= within
        if within and busy[0] < colocation.first:
            begins.add(colocation.first)
    return list(accumulate(int(op in begins) for op in range(len(seconds))))


def build_operator_chain(
    graph: TrainingGraph, blocks: Sequence[int], seconds: Sequence[float], size: int
) -> OperatorChain:
    """The chain of blocks that the planner distributes over stages."""
    num_blocks = blocks[-1] + 1 if blocks else 0

    def by_block(figures: Iterable[tuple[int, float]]) -> list[float]:
        sums = [0.0] * num_blocks
        for op, figure in figures:
            sums[blocks[op]] += figure
        return sums

    firsts = [op for op, block in enumerate(blocks) if op == 0 or blocks[op - 1] != block]
    return OperatorChain(
        names=[f"{graph.operators[op].name} of {graph.operators[op].module or 'the model'}" for op in firsts],
        seconds=by_block(enumerate(seconds)),
        parameter_bytes=by_block(_gradient_bytes(graph)),
        resident_bytes=by_block(_resident_bytes(graph)),
        saved_bytes=by_block(_saved_bytes(graph, size)),
        transfers=list(_between_blocks(_transfers(graph, size), blocks)),
    )


def _transfers(graph: TrainingGraph, size: int) -> Iterator[Transfer]:
    """Every value that owns memory, with the last operator that reads it or a view of it."""
    readers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for source in filter(is_tensor, node.all_input_nodes):
            owner = storage_owner(source)
            readers[owner] = max(readers.get(owner, -1), node.meta["operator"])
    differentiated = {node.meta["operator"] for node in graph.nodes if not is_forward(node)}
    for node, last in readers.items():
        if node.op == "call_function" and is_forward(node) and not is_constant(node):
            made_by = node.meta["operator"]
            if last > made_by and not depends_on_inputs_only(node):
                num_bytes = evaluate_cost(node.meta["cost"].output_bytes, size)
                returns = graph.mode.trains and made_by in differentiated
                trained = returns and node.meta["val"].is_floating_point()
                yield Transfer(made_by, last, num_bytes, num_bytes if trained else 0)


def _between_blocks(values: Iterable[Transfer], blocks: Sequence[int]) -> Iterator[Transfer]:
    for value in values:
        first, last = blocks[value.first], blocks[value.last]
        if first < last:
            yield replace(value, first=first, last=last)


def with_weight_versions(
    operators: OperatorChain,
    graph: TrainingGraph,
    blocks: Sequence[int],
    updates: UpdateCost,
    num_stages: int,
) -> OperatorChain:
    """The blocks with optimizer state and weight versions, for stages that update after each mini-batch."""
    resident, saved = list(operators.resident_bytes), list(operators.saved_bytes)
    for tensor in _model_tensors(graph):
        if tensor.is_trained:
            block = blocks[tensor.operator]
            resident[block] += updates.resident_bytes(tensor.fqn, tensor.num_bytes, num_stages)
            saved[block] += updates.bytes_in_flight(tensor.num_bytes)
    return replace(operators, resident_bytes=resident, saved_bytes=saved)


def _resident_bytes(graph: TrainingGraph) -> Iterator[tuple[int, int]]:
    """The bytes of each of the model's tensors, and of its gradient, at the first operator that reads it."""
    for tensor in _model_tensors(graph):
        yield tensor.operator, tensor.num_bytes * (2 if tensor.is_trained else 1)


def _gradient_bytes(graph: TrainingGraph) -> Iterator[tuple[int, int]]:
    """The bytes of each gradient that replicas sum, at the first operator that reads the parameter."""
    return ((tensor.operator, tensor.num_bytes) for tensor in _model_tensors(graph) if tensor.is_trained)


class _ModelTensor(NamedTuple):
    """A parameter, buffer or precomputed tensor, and the first operator that reads it."""

    operator: int
    fqn: str
    num_bytes: int
    is_trained: bool


def _model_tensors(graph: TrainingGraph) -> Iterator[_ModelTensor]:
    """The tensors that operators read. What the tail reads, its last operator does."""
    results = (*graph.results, *graph.tail_results)
    trained = {result.fqn for result in results if isinstance(result, Gradient)}
    first: dict[str, int] = {}
    of_tail = {node.meta["role"] for node in graph.tail.find_nodes(op="placeholder")} if graph.tail else set()
    tail = [node.meta["operator"] for role, node in graph.outputs if isinstance(role, TailInput)]
    for node in graph.arguments:
        readers = [user.meta["operator"] for user in node.users if user.op == "call_function"]
        readers += tail[:1] if node.meta["role"] in of_tail else []
        for fqn in source_parameters(node) if readers else ():
            first[fqn] = min(*readers, first.get(fqn, readers[0]))
        if isinstance(node.meta["role"], Precomputed | Buffer) and readers:
            yield _ModelTensor(min(readers), node.name, node_bytes(node, 1), is_trained=False)
    for node in graph.arguments:
        role = node.meta["role"]
        if isinstance(role, Parameter) and role.fqn in first:
            yield _ModelTensor(first[role.fqn], role.fqn, node_bytes(node, 1), role.fqn in trained)


def _saved_bytes(graph: TrainingGraph, size: int) -> Iterator[tuple[int, int]]:
    """The bytes of each forward value that the backward reads, at the operator that makes it."""
    backward = (node for node in graph.nodes if not is_forward(node))
    read = {storage_owner(source) for node in backward for source in filter(is_tensor, node.all_input_nodes)}
    for node in read:
        if node.op == "call_function" and is_forward(node) and not is_constant(node):
            yield node.meta["operator"], node_bytes(node, size)
