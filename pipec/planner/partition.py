"""Cut a sequence of operators into contiguous stages so that the slowest stage is as fast as possible.

**The model.** A stage holds operators ``[i, j)`` of the forward, in program order, and runs their forward
and backward. Its seconds per microbatch are the sum of

* the seconds of its operators,
* the transfer of every value it receives (made before i, read by one of its operators), once each,
* the transfer of every value it sends (made by one of its operators, read at or after j), once each.

A value's transfer takes its activation forward and its gradient backward over one link. Values go straight
from the stage that makes them to each stage that reads them. A value read by several later stages charges
each reader, but its maker once: how often it is sent depends on where later cuts fall, and only without
that do the seconds of a stage depend on i and j alone. The same load is minimised in Tarnawski et al.,
Efficient Algorithms for Device Placement of DNN Graph Operators (NeurIPS 2020).

**What is optimal.** Of all ways to choose ``num_stages - 1`` cuts among the allowed boundaries, the result
has the least bottleneck; among those the least communication, summed over stages; among those the earliest
cuts, compared in order. Any skip connections are allowed. Times are first rounded to a common grid, finer
than 1e-15 of their sum, on which every sum is exact: stages of equal operators tie, wherever they stand.

**How.** Operators between allowed boundaries merge into m blocks. The communication of all m * m ranges
comes from a two-dimensional difference array, with one rectangle for each reader of a value. Dynamic
programming over boundaries, from the last stage to the first, does the rest in numpy.
Time O(m * m * num_stages + reads), memory O(m * m).
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipec.errors import PlanError

Matrix = NDArray[np.float64]

_ROWS = 64


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value made by forward operator ``producer`` and read by later forward operators ``consumers``.

    If it crosses stages, ``forward_bytes`` of activation travel to the reader and ``backward_bytes`` of
    gradient travel back (0 for a value without gradient).
    """

    producer: int
    consumers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """What to cut.

    ``seconds[k]`` is operator k's forward and backward, per microbatch. A message of n bytes takes
    ``latency_seconds + n / bytes_per_second``. ``forbidden_cuts`` holds boundaries k, between operators k-1
    and k, where no stage may begin. ``names`` of operators, if given, serve error messages.
    """

    seconds: Sequence[float]
    transfers: Sequence[Transfer]
    num_stages: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    forbidden_cuts: frozenset[int] = frozenset()
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """``cuts[s]`` is the first operator of stage s + 1. Seconds are per stage, communication included."""

    cuts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    communication_seconds: tuple[float, ...]

    @property
    def bottleneck_seconds(self) -> float:
        return max(self.stage_seconds)


def partition(problem: PartitionProblem) -> Partition:
    """The best cuts. PlanError if the problem is malformed or has fewer blocks than stages."""
    _check(problem)
    boundaries = _boundaries(problem)
    seconds, communication = _range_seconds(problem, boundaries)
    bottleneck = _least_bottleneck(seconds, problem.num_stages)
    communication[seconds > bottleneck] = math.inf
    ends = _cheapest(communication, problem.num_stages)
    ranges = (np.array([0, *ends[:-1]]), np.array(ends))
    return Partition(
        cuts=tuple(boundaries[ends[:-1]].tolist()),
        stage_seconds=tuple(seconds[ranges].tolist()),
        communication_seconds=tuple(communication[ranges].tolist()),
    )


def _boundaries(problem: PartitionProblem) -> NDArray[np.intp]:
    """Where a stage may begin or end, as operator indices: 0, the allowed cuts, the number of operators."""
    num_operators = len(problem.seconds)
    allowed = [k for k in range(1, num_operators) if k not in problem.forbidden_cuts]
    return np.array([0, *allowed, num_operators], dtype=np.intp)


def _range_seconds(problem: PartitionProblem, boundaries: NDArray[np.intp]) -> tuple[Matrix, Matrix]:
    """Seconds, and of these communication, of a stage from boundary i to boundary j, at [i, j].

    Infinite unless i < j. Rounded to the grid on which every sum that follows is exact.
    """
    rectangles = list(_rectangles(problem, boundaries))
    weights = np.array([rectangle.seconds for rectangle in rectangles])
    compute = np.asarray(problem.seconds, dtype=np.float64)
    grid = exact_grid(compute.sum() + 4 * weights.sum())
    communication = _stack(rectangles, np.rint(weights / grid) * grid, len(boundaries))
    communication[np.tri(len(boundaries), dtype=bool)] = math.inf
    until = np.concatenate([[0.0], np.cumsum(np.rint(compute / grid) * grid)])[boundaries]
    return communication + (until[None, :] - until[:, None]), communication


def exact_grid(largest_sum: float) -> float:
    """A spacing whose multiples add up exactly in float64, as far as ``largest_sum``."""
    return max(math.ldexp(1.0, math.frexp(largest_sum)[1] - 51), sys.float_info.min)


class _Rectangle(NamedTuple):
    """Stages that begin at a boundary of ``begins`` and end at one of ``ends`` pay ``seconds``."""

    begins: range
    ends: range
    seconds: float


def _rectangles(problem: PartitionProblem, boundaries: NDArray[np.intp]) -> Iterator[_Rectangle]:
    """Every charge for sending or receiving a value. Blocks are numbered as the boundaries they begin at."""
    block_of = (np.searchsorted(boundaries, np.arange(len(problem.seconds)), side="right") - 1).tolist()
    last_boundary = len(boundaries) - 1
    for transfer in problem.transfers:
        blocks = sorted({block_of[op] for op in (transfer.producer, *transfer.consumers)})
        yield from _charges(blocks, _transfer_seconds(problem, transfer), last_boundary)


def _charges(blocks: Sequence[int], seconds: float, last_boundary: int) -> Iterator[_Rectangle]:
    """What a value costs that the operators of ``blocks``, in order, make or read."""
    maker = previous = blocks[0]
    for reader in blocks[1:]:
        # Received by the stage whose first reader this is: it begins after the block before.
        yield _Rectangle(range(previous + 1, reader + 1), range(reader + 1, last_boundary + 1), seconds)
        previous = reader
    # Sent by the stage that holds the maker and ends before the last reader.
    yield _Rectangle(range(maker + 1), range(maker + 1, previous + 1), seconds)


def exchanged_seconds(values: Iterable[tuple[Sequence[int], float]], num_boundaries: int) -> Matrix:
    """At [i, j], the seconds of the values that a stage from boundary i to boundary j shares with others.

    ``values`` are pairs of the blocks, in order, whose operators make or read a value, and its seconds.
    """
    rectangles = [
        each for blocks, seconds in values for each in _charges(blocks, seconds, num_boundaries - 1)
    ]
    return _stack(rectangles, np.array([each.seconds for each in rectangles]), num_boundaries)


def _transfer_seconds(problem: PartitionProblem, transfer: Transfer) -> float:
    return transfer_seconds(transfer, problem.bytes_per_second, problem.latency_seconds)


def transfer_seconds(transfer: Transfer, bytes_per_second: float, latency_seconds: float) -> float:
    """Time on the link of the activation and of its gradient, whichever there are."""
    messages = [size for size in (transfer.forward_bytes, transfer.backward_bytes) if size]
    return sum(latency_seconds + size / bytes_per_second for size in messages)


def _stack(rectangles: Sequence[_Rectangle], weights: Matrix, num_boundaries: int) -> Matrix:
    """The sum of the rectangles, as a matrix: mark their corners, then accumulate along both axes."""
    total = np.zeros((num_boundaries + 1, num_boundaries + 1))
    begins = np.array([(r.begins.start, r.begins.stop) for r in rectangles], dtype=np.intp).reshape(-1, 2)
    ends = np.array([(r.ends.start, r.ends.stop) for r in rectangles], dtype=np.intp).reshape(-1, 2)
    for corner, sign in (((0, 0), 1), ((0, 1), -1), ((1, 0), -1), ((1, 1), 1)):
        np.add.at(total, (begins[:, corner[0]], ends[:, corner[1]]), sign * weights)
    np.cumsum(total, axis=0, out=total)
    np.cumsum(total, axis=1, out=total)
    return total[:-1, :-1]


def _least_bottleneck(seconds: Matrix, num_stages: int) -> float:
    """The least possible maximum of ``seconds`` over consecutive ranges that cover everything."""
    from_boundary = seconds[:, -1]
    for _ in range(num_stages - 1):
        from_boundary = _best_first_stage(np.maximum, seconds, from_boundary)
    return float(from_boundary[0])


def _best_first_stage(join: np.ufunc, first: Matrix, rest: Matrix) -> Matrix:
    """For each i, the least ``join(first[i, j], rest[j])``, a few rows at a time to stay in the cache."""
    best = np.empty(len(rest))
    for row in range(0, len(rest), _ROWS):
        rows = slice(row, row + _ROWS)
        best[rows] = join(first[rows, row:], rest[row:]).min(axis=1)
    return best


def _cheapest(communication: Matrix, num_stages: int) -> list[int]:
    """Where each stage ends: the earliest boundaries among those with the least sum of ``communication``."""
    remaining = [communication[:, -1]]
    for _ in range(num_stages - 2):
        remaining.append(_best_first_stage(np.add, communication, remaining[-1]))
    ends = [0]
    for rest in remaining[num_stages - 2 :: -1] if num_stages > 1 else []:
        ends.append(int(np.argmin(communication[ends[-1]] + rest)))
    return [*ends[1:], len(communication) - 1]


def _check(problem: PartitionProblem) -> None:
    _check_link(problem)
    for operator, seconds in enumerate(problem.seconds):
        if not 0 <= seconds < math.inf:
            raise PlanError(
                f"{_name(problem, operator)} costs {seconds} seconds: expected a finite number, 0 or more. "
                f"Correct the profile or the device model the costs come from"
            )
    for transfer in problem.transfers:
        _check_transfer(problem, transfer)
    num_operators = len(problem.seconds)
    num_blocks = num_operators - len(problem.forbidden_cuts.intersection(range(1, num_operators)))
    if not 1 <= problem.num_stages <= num_blocks:
        raise PlanError(
            f"cannot cut {num_operators} operators into {problem.num_stages} stages: every stage needs an "
            f"operator, and {num_operators - num_blocks} boundaries between operators are not allowed as "
            f"cuts. Ask for 1 to {num_blocks} stages"
        )


def _check_link(problem: PartitionProblem) -> None:
    if not (problem.bytes_per_second > 0 and 0 <= problem.latency_seconds < math.inf):
        raise PlanError(
            f"the link carries {problem.bytes_per_second} bytes per second after "
            f"{problem.latency_seconds} seconds: expected a bandwidth above 0 and a finite latency, 0 or more"
        )


def _check_transfer(problem: PartitionProblem, transfer: Transfer) -> None:
    maker = _name(problem, transfer.producer)
    if min(transfer.forward_bytes, transfer.backward_bytes) < 0:
        raise PlanError(
            f"the value of {maker} has {transfer.forward_bytes} bytes forward and {transfer.backward_bytes} "
            f"backward: expected 0 or more of each"
        )
    for consumer in transfer.consumers:
        if not 0 <= transfer.producer < consumer < len(problem.seconds):
            raise PlanError(
                f"{_name(problem, consumer)} reads the value of {maker}: expected two of the "
                f"{len(problem.seconds)} operators, the reader after the maker. "
                f"Number operators in program order"
            )


def _name(problem: PartitionProblem, operator: int) -> str:
    known = 0 <= operator < len(problem.names)
    return f"operator {operator} ({problem.names[operator]})" if known else f"operator {operator}"
