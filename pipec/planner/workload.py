"""What a plan distributes: operators with their costs, and the values that pass between them."""

import graphlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.errors import PlanError
from pipec.planner.partition import Transfer

COLUMNS = ("seconds", "parameter_bytes", "resident_bytes", "saved_bytes")
"""The figures that a workload has for each operator."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step as numbers, one entry an operator in each sequence.

    ``seconds`` is forward and backward of one microbatch on a device of speed 1. ``parameter_bytes`` is
    what replicas all-reduce. A device holds ``resident_bytes`` once and ``saved_bytes`` for every
    microbatch in flight. ``before`` lists pairs (u, v): u is not on a later stage than v. A transfer may
    also go against that order, as a gradient does. ``names`` serve messages.

    A published graph also has ``forward_seconds``, the forward's part of ``seconds``, and
    ``activation_bytes``, what is saved for a microbatch's backward: with them its placement is a plan.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    parameter_bytes: Sequence[float]
    resident_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    transfers: Sequence[Transfer]
    before: Sequence[tuple[int, int]]
    forward_seconds: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()


def program_order(workload: Workload) -> list[int]:
    """The operators in an order that ``before`` permits: the given one, if it does. PlanError if none is."""
    if all(u < v for u, v in workload.before):
        return list(range(len(workload.names)))
    return _sorted(workload)


def _sorted(workload: Workload) -> list[int]:
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter(
        dict.fromkeys(range(len(workload.names)), ())
    )
    for u, v in workload.before:
        sorter.add(v, u)
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        cycle = " -> ".join(workload.names[op] for op in error.args[1])
        raise PlanError(
            f"the operators form a cycle, {cycle}: no order of stages can run them. Remove one of these edges"
        ) from error


def check(workload: Workload) -> None:
    """PlanError if a figure is negative or not finite, or an operator is unknown."""
    if not workload.names:
        raise PlanError("there are no operators to plan for")
    num_operators = len(workload.names)
    for column in COLUMNS:
        for name, figure in zip(workload.names, getattr(workload, column), strict=True):
            if not 0 <= figure < math.inf:
                raise PlanError(f"{name} has {column} {figure}: expected a finite number, 0 or more")
    for transfer in workload.transfers:
        _check_transfer(workload, transfer)
    for u, v in workload.before:
        if not (0 <= u < num_operators and 0 <= v < num_operators):
            raise PlanError(f"operator {max(u, v)} is ordered, but there are {num_operators} operators")


def _check_transfer(workload: Workload, transfer: Transfer) -> None:
    num_operators = len(workload.names)
    last = max((transfer.producer, *transfer.consumers))
    if last >= num_operators:
        raise PlanError(f"operator {last} reads or makes a value, but there are {num_operators} operators")
    for figure in (transfer.forward_bytes, transfer.backward_bytes):
        if not 0 <= figure < math.inf:
            raise PlanError(
                f"the value of {workload.names[transfer.producer]} has {figure} bytes: expected a finite "
                f"number, 0 or more"
            )
