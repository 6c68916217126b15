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
    """

    names: Sequence[str]
    seconds: Sequence[float]
    parameter_bytes: Sequence[float]
    resident_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    transfers: Sequence[Transfer]
    before: Sequence[tuple[int, int]]


def program_order(workload: Workload) -> list[int]:
    """The operators in an order that ``before`` permits: the given one, if it does.

    PlanError if a figure is negative or not finite, an operator is unknown, or ``before`` has a cycle.
    """
    _check_figures(workload)
    given = range(len(workload.names))
    for u, v in workload.before:
        if u not in given or v not in given:
            raise PlanError(f"operator {max(u, v)} is ordered, but there are {len(given)} operators")
    if all(u < v for u, v in workload.before):
        return list(given)
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


def _check_figures(workload: Workload) -> None:
    if not workload.names:
        raise PlanError("there are no operators to plan for")
    for column in COLUMNS:
        for name, figure in zip(workload.names, getattr(workload, column), strict=True):
            if not 0 <= figure < math.inf:
                raise PlanError(f"{name} has {column} {figure}: expected a finite number, 0 or more")
    for transfer in workload.transfers:
        last = max((transfer.producer, *transfer.consumers))
        if last >= len(workload.names):
            raise PlanError(
                f"operator {last} reads or makes a value, but there are {len(workload.names)} operators"
            )
        for figure in (transfer.forward_bytes, transfer.backward_bytes):
            if not 0 <= figure < math.inf:
                raise PlanError(
                    f"the value of {workload.names[transfer.producer]} has {figure} bytes: expected a finite "
                    f"number, 0 or more"
                )
