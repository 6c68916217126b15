"""The input of the planner: operators with their costs, and the values that pass between them."""

import graphlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.errors import PlanError

COLUMNS = ("seconds", "parameter_bytes", "resident_bytes", "saved_bytes")
"""The figures that a graph has for each operator."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that operator ``producer`` makes and operators ``consumers`` read.

    If it crosses stages, ``forward_bytes`` of activation travel to the reader and ``backward_bytes`` of
    gradient travel back (0 for a value without gradient).
    """

    producer: int
    consumers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """A training step as numbers. Each column has one entry for each operator.

    ``seconds`` is the forward and backward of one microbatch on a device of speed 1. ``parameter_bytes`` is
    what replicas all-reduce. A device holds ``resident_bytes`` once and ``saved_bytes`` for every microbatch
    in flight. ``before`` lists pairs (u, v): operator u is never on a later stage than operator v. A transfer
    may also go against that order, as a gradient does. ``names`` serve messages.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    parameter_bytes: Sequence[float]
    resident_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    transfers: Sequence[Transfer]
    before: Sequence[tuple[int, int]]


def topological_order(graph: OperatorGraph) -> list[int]:
    """The operators in an order that ``before`` permits, which is the given one if possible.

    Raises PlanError if there is no such order.
    """
    if all(u < v for u, v in graph.before):
        return list(range(len(graph.names)))
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter(
        dict.fromkeys(range(len(graph.names)), ())
    )
    for u, v in graph.before:
        sorter.add(v, u)
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        cycle = " -> ".join(graph.names[op] for op in error.args[1])
        raise PlanError(
            f"the operators form a cycle, {cycle}: no order of stages can run them. Remove one of these edges"
        ) from error


def check_operator_graph(graph: OperatorGraph) -> None:
    """Raise PlanError if a figure is negative or not finite, or an operator is unknown."""
    if not graph.names:
        raise PlanError("there are no operators to plan for")
    num_operators = len(graph.names)
    for column in COLUMNS:
        for name, figure in zip(graph.names, getattr(graph, column), strict=True):
            if not 0 <= figure < math.inf:
                raise PlanError(f"{name} has {column} {figure}: expected a finite number, 0 or more")
    for transfer in graph.transfers:
        _check_transfer(graph, transfer)
    for u, v in graph.before:
        if not (0 <= u < num_operators and 0 <= v < num_operators):
            raise PlanError(f"operator {max(u, v)} is ordered, but there are {num_operators} operators")


def _check_transfer(graph: OperatorGraph, transfer: Transfer) -> None:
    num_operators = len(graph.names)
    last = max((transfer.producer, *transfer.consumers))
    if last >= num_operators:
        raise PlanError(f"operator {last} reads or makes a value, but there are {num_operators} operators")
    for figure in (transfer.forward_bytes, transfer.backward_bytes):
        if not 0 <= figure < math.inf:
            raise PlanError(
                f"the value of {graph.names[transfer.producer]} has {figure} bytes: expected a finite "
                f"number, 0 or more"
            )
