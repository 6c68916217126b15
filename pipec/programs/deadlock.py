"""Deadlocks: which ranks never finish if every send waits until its receive is posted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir.columns import Ints

InstructionSite = tuple[int, int]
"""A rank and the number of an instruction in its program."""


@dataclass(frozen=True)
class WaitEdges:
    """Pairs of instructions of which one waits for the other: a column entry for each wait.

    Instruction ``numbers[i]`` of rank ``ranks[i]`` passes only after instruction ``other_numbers[i]`` of rank
    ``other_ranks[i]`` has been reached.
    """

    ranks: Ints
    numbers: Ints
    other_ranks: Ints
    other_numbers: Ints

    @classmethod
    def concatenated(cls, parts: Sequence["WaitEdges"]) -> "WaitEdges":
        """The pairs of one or more ``parts``, one after the other."""
        columns = [(each.ranks, each.numbers, each.other_ranks, each.other_numbers) for each in parts]
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


def stalled_ranks(
    lengths: Sequence[int], waits: WaitEdges
) -> dict[int, tuple[InstructionSite, InstructionSite]]:
    """For each rank that cannot finish, its stalled instruction and the instruction that this waits for.

    ``lengths`` are the numbers of instructions of the programs. An instruction passes when its rank has
    reached it and everything that it waits for has passed. The result does not depend on the order in which
    ranks run. The loop moves every rank past one wait at a time.
    """
    order = np.argsort(waits.ranks.astype(np.int64) * max(lengths, default=0) + waits.numbers, kind="stable")
    numbers, others = waits.numbers[order], waits.other_ranks[order]
    awaited = waits.other_numbers[order]
    bounds = np.searchsorted(waits.ranks[order], np.arange(len(lengths) + 1))
    entry, last = bounds[:-1].copy(), bounds[1:]
    reached = np.array(lengths, np.int64)
    unfinished = np.flatnonzero(entry < last)
    reached[unfinished] = numbers[entry[unfinished]]
    while unfinished.size:
        at = entry[unfinished]
        passing = unfinished[reached[others[at]] >= awaited[at]]
        if not passing.size:
            break
        entry[passing] += 1
        finishing = entry[passing] == last[passing]
        advancing = passing[~finishing]
        reached[advancing] = numbers[entry[advancing]]
        if finishing.any():
            done = passing[finishing]
            reached[done] = np.array(lengths)[done]
            unfinished = unfinished[entry[unfinished] < last[unfinished]]
    return {
        rank: ((rank, int(numbers[at])), (int(others[at]), int(awaited[at])))
        for rank, at in zip(unfinished.tolist(), entry[unfinished].tolist(), strict=True)
    }


def wait_cycle(
    stalled: Mapping[int, tuple[InstructionSite, InstructionSite]],
) -> list[tuple[InstructionSite, InstructionSite]]:
    """A cycle of ``stalled_ranks``: each rank waits for the next one."""
    rank = min(stalled)
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        rank = stalled[rank][1][0]
    return [stalled[rank] for rank in visited[visited.index(rank) :]]
