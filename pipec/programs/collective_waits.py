"""Waits of collectives: no rank passes a collective before all its ranks have reached it.

A collective is modelled as a rank of its own with one instruction. This instruction passes when every member
has reached the collective, and all members wait for it. So there are twice as many waits as instructions of
collectives.
"""

import numpy as np

from pipec.ir.columns import COLLECTIVES, InstructionColumns, Ints, concatenate_instructions
from pipec.programs.deadlock import WaitEdges
from pipec.programs.program_index import ProgramIndex


def collective_waits(step: ProgramIndex) -> tuple[WaitEdges, int]:
    """Each collective waits for all its ranks, and all of them wait for it; and the number of collectives.

    Collectives are numbered after the ranks.
    """
    own = [columns.numbers_of(*COLLECTIVES) for columns in step.columns]
    started = concatenate_instructions(
        [columns.taken(numbers) for columns, numbers in zip(step.columns, own, strict=True)]
    )
    ranks = np.repeat(np.arange(len(own)), [numbers.size for numbers in own])
    sites, found = np.concatenate(own), collective_numbers(started, ranks)
    first = np.zeros_like(sites)
    reached, passed = (len(own) + found, first, ranks, sites), (ranks, sites, len(own) + found, first + 1)
    waits = WaitEdges(*(np.concatenate(pair).astype(np.int32) for pair in zip(reached, passed, strict=True)))
    return waits, int(found.max(initial=-1)) + 1


def collective_numbers(started: InstructionColumns, ranks: Ints) -> Ints:
    """For each of these instructions, by rank in order, the number of its collective.

    Of several equal ones on a rank, the k-th belongs to the k-th on every other rank.
    """
    keys = np.stack([started.ops, started.stages, started.buckets, started.model_collectives])
    kinds = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((kinds, ranks))
    is_first = np.append(True, (np.diff(kinds[order]) != 0) | (np.diff(ranks[order]) != 0))[: kinds.size]
    places = np.arange(kinds.size)
    occurrences = np.empty_like(places)
    occurrences[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    found: Ints = np.unique(np.stack([kinds, occurrences]), axis=1, return_inverse=True)[1].reshape(-1)
    return found
