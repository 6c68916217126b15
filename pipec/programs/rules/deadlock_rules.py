"""The rule that no rank waits forever."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipec.ir.columns import COLLECTIVES, Ints
from pipec.programs.messages import Transfers, collective_numbers
from pipec.programs.program_index import InstructionSite, ProgramIndex, Violation


def finishes(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits forever, even if every send waits until its receive is posted. Refused::

    rank 0: ... send a to rank 1, recv b from rank 1
    rank 1: ... send b to rank 0, recv a from rank 0
    """
    each, num_ranks = step.delivered, len(step.columns)
    if _certainly_finish(step):
        return
    of_sends = np.stack([each.sources, each.sends, each.targets, each.receives])
    of_waits = np.stack([each.targets, each.waits, each.sources, each.sends])
    of_collectives, num_collectives = _collective_waits(step)
    waits = np.concatenate([of_sends, of_waits, of_collectives], axis=1)
    stalled = stalled_ranks([*map(len, step.columns), *[1] * num_collectives], waits)
    if stalled:  # a rank that waits for a collective waits for a member that has not reached it
        ring = wait_cycle(
            {
                rank: (site, stalled[ahead[0]][1] if ahead[0] >= num_ranks else ahead)
                for rank, (site, ahead) in stalled.items()
                if rank < num_ranks
            }
        )
        lines = [
            f"  rank {site[0]} at '{step.show(site)}' waits for rank {ahead[0]} to reach '{step.show(ahead)}'"
            for site, ahead in ring
        ]
        among = all(step.columns[rank].is_collective[number] for (rank, number), _ in ring)
        heading = "if sends wait for their receives" if not among else "in the order of collectives"
        message = "\n".join([f"deadlock {heading}:", *lines])
        yield Violation(ring[0][0], message, tuple(site for site, _ in ring[1:]))


def _certainly_finish(step: ProgramIndex) -> bool:
    """Whether no search is needed: without collectives, if each receive is posted before its send."""
    collectives = any(columns.numbers_of(*COLLECTIVES).size for columns in step.columns)
    return step.computes is not None and step.computes.receives_precede_sends and not collectives


def _collective_waits(step: ProgramIndex) -> tuple[Ints, int]:
    """Each collective waits for all its ranks, and all of them wait for it; and the number of collectives.

    A collective is modelled as a rank of its own with one instruction, numbered after the ranks. It passes
    when every member has reached the collective, and all members wait for it.
    """
    started = Transfers.of(step.columns, *COLLECTIVES)
    ranks, sites, found = started.ranks, started.numbers, collective_numbers(started.columns, started.ranks)
    first, hubs = np.zeros_like(sites), len(step.columns) + found
    waits = np.stack([[hubs, first, ranks, sites], [ranks, sites, hubs, first + 1]], axis=1)
    return waits.reshape(4, -1).astype(np.int32), int(found.max(initial=-1)) + 1


def stalled_ranks(lengths: Sequence[int], waits: Ints) -> dict[int, tuple[InstructionSite, InstructionSite]]:
    """For each rank that cannot finish, its stalled instruction and the instruction that this waits for.

    ``lengths`` are the numbers of instructions of the programs. Each column of ``waits`` has a rank, the
    number of an instruction, and the rank and number of the one that it waits for. An instruction passes
    when its rank has reached it and everything that it waits for has passed. The result does not depend on
    the order in which ranks run. The loop moves every rank past one wait at a time.
    """
    order = np.argsort(waits[0].astype(np.int64) * max(lengths, default=0) + waits[1], kind="stable")
    ranks, numbers, others, awaited = waits[:, order]
    bounds = np.searchsorted(ranks, np.arange(len(lengths) + 1))
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
