"""The input of the planner: blocks of operators in order, their costs, and the values between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.errors import PlanError

COLUMNS = ("seconds", "parameter_bytes", "resident_bytes", "saved_bytes")
"""The figures that a chain has for each block."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that block ``first`` makes and that later blocks read, the last of them ``last``.

    If it crosses stages, ``forward_bytes`` of activation travel to the reader and ``backward_bytes`` of
    gradient travel back (0 for a value without gradient).
    """

    first: int
    last: int
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class OperatorChain:
    """A training step as numbers. Each column has one entry for each block.

    ``seconds`` is the forward and backward of one microbatch on a device of speed 1. ``parameter_bytes`` is
    what replicas all-reduce. A device holds ``resident_bytes`` once and ``saved_bytes`` for every microbatch
    in flight. ``names`` serve messages.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    parameter_bytes: Sequence[float]
    resident_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    transfers: Sequence[Transfer]


def check_operator_chain(chain: OperatorChain) -> None:
    """Raise PlanError if a figure is negative or not finite, or a value is not read by a later block."""
    if not chain.names:
        raise PlanError("there are no operators to plan for")
    for column in COLUMNS:
        for name, figure in zip(chain.names, getattr(chain, column), strict=True):
            if not 0 <= figure < math.inf:
                raise PlanError(f"{name} has {column} {figure}: expected a finite number, 0 or more")
    for value in chain.transfers:
        if not 0 <= value.first < value.last < len(chain.names):
            raise PlanError(
                f"block {value.last} reads a value of block {value.first}: expected a later one of "
                f"{len(chain.names)} blocks"
            )
        for figure in (value.forward_bytes, value.backward_bytes):
            if not 0 <= figure < math.inf:
                raise PlanError(
                    f"the value of {chain.names[value.first]} has {figure} bytes: expected a finite "
                    f"number, 0 or more"
                )
