"""The rule that no rank waits forever."""

from collections.abc import Iterator, Mapping

import numpy as np

from pipec.ir.columns import COLLECTIVES, Ints, stable_order
from pipec.programs.messages import Transfers, collective_numbers
from pipec.programs.program_index import InstructionSite, ProgramIndex, Violation
from pipec.programs.task_times import AVAILABLE_AT_START, Deadlock, TaskInputs, run_tasks


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
    stalled = stalled_ranks(num_ranks + num_collectives, waits)
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

    A collective is modelled as a rank of its own, numbered after the ranks. Each of its instructions waits
    for a member to reach the collective, and all members wait until it is past the last.
    """
    started = Transfers.of(step.columns, *COLLECTIVES)
    ranks, sites, found = started.ranks, started.numbers, collective_numbers(started.columns, started.ranks)
    order, begins = stable_order(found)
    places, hubs = np.empty_like(order), len(step.columns) + found
    places[order] = np.arange(order.size)
    places -= begins[found] if found.size else 0
    counts = np.bincount(found) if found.size else found
    waits = np.stack([[hubs, places, ranks, sites], [ranks, sites, hubs, counts[found]]], axis=1)
    return waits.reshape(4, -1).astype(np.int32), counts.size


def stalled_ranks(num_ranks: int, waits: Ints) -> dict[int, tuple[InstructionSite, InstructionSite]]:
    """For each rank that cannot finish, its stalled instruction and the instruction that this waits for.

    Each column of ``waits`` has a rank, the number of an instruction, and the rank and number of the one that
    it waits for. An instruction passes when its rank has reached it, and the other ranks those that it waits
    for: when they are past their last wait before.
    """
    ranks, numbers, others, awaited = waits.astype(np.int64)
    size = max(int(numbers.max(initial=0)), int(awaited.max(initial=0))) + 1
    tasks, readers = np.unique(ranks * size + numbers, return_inverse=True)
    first_tasks = np.searchsorted(tasks, np.arange(num_ranks + 1) * size)
    before = np.searchsorted(tasks, others * size + awaited) - 1
    producers = np.where(before < first_tasks[others], AVAILABLE_AT_START, before)
    run = run_tasks(np.zeros(tasks.size), TaskInputs(readers, producers), first_tasks.tolist())
    found: dict[int, tuple[InstructionSite, InstructionSite]] = {}
    if isinstance(run, Deadlock):
        passed = first_tasks[1:].copy()
        passed[tasks[run.tasks] // size] = run.tasks
        unmet = np.isin(readers, run.tasks) & (producers >= passed[others])
        for rank, number, other, ahead in waits[:, unmet].T.tolist():
            found.setdefault(rank, ((rank, number), (other, ahead)))
    return found


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
