"""The rules of order that no single cell has: of segments, channels and collectives."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from pipec.ir import Link, Op
from pipec.ir.columns import COLLECTIVES, OPS, InstructionColumns, equal_groups, stable_order, taken
from pipec.ir.text_format import format_link
from pipec.programs.program_index import ProgramIndex, Violation, describe
from pipec.programs.shared_receives import runs_stages_in_order


def segments_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """The segments of a compute run once each, in order. Refused::

    backward stage 0 mb 0 segment 1, backward stage 0 mb 0 segment 0
    """
    for rank, columns in enumerate(step.columns):
        split = columns.compute_numbers
        split = split[taken(columns.segments, split) >= 0]
        fields = (columns.ops, columns.stages, columns.microbatches)
        for group in equal_groups(*(taken(column, split) for column in fields)):
            own = split[group]
            op, stage = OPS[columns.ops[own[0]]], int(columns.stages[own[0]])
            found, expected = columns.segments[own].tolist(), list(range(step.num_segments(op, stage)))
            if found != expected:
                wrong = next((k for k, segment in enumerate(found) if expected[k : k + 1] != [segment]), -1)
                where = f"of stage {stage}, microbatch {columns.microbatches[own[0]]}"
                message = f"{op} {where} runs its segments in the order {found}; expected {expected}"
                yield Violation((rank, int(own[wrong])), message)
        yield from _undivided_forwards(rank, columns)


def _undivided_forwards(rank: int, columns: InstructionColumns) -> Iterator[Violation]:
    """Forwards of a stage do not interleave, because one reads the buffers that the previous one changed.

    Refused::

        forward mb 0 segment 0, forward mb 1 segment 0, forward mb 0 segment 1, forward mb 1 segment 1
    """
    forwards = columns.numbers_of(Op.FORWARD)
    for stage in np.unique(columns.stages[forwards[columns.segments[forwards] > 0]]).tolist():
        own = forwards[columns.stages[forwards] == stage]
        later = np.flatnonzero(columns.segments[own] > 0)
        mixed = later[columns.microbatches[own[later]] != columns.microbatches[own[later - 1]]]
        for place in mixed.tolist():
            one, other = columns.microbatches[own[[place, place - 1]]].tolist()
            message = (
                f"the forward of stage {stage}, microbatch {one} goes on behind that of microbatch {other}"
            )
            yield Violation((rank, int(own[place])), message)


def collectives_in_one_order(step: ProgramIndex) -> Iterator[Violation]:
    """The ranks of a collective start it in the same order as all that they have in common. Refused::

    rank 0: ... reduce_grad stage 0 bucket 0, reduce_grad stage 0 bucket 1
    rank 1: ... reduce_grad stage 0 bucket 1, reduce_grad stage 0 bucket 0

    Ranks with the same stages have all collectives in common, and are compared with the first of them. Of
    others, those of one stage are compared pair by pair, each pair of lists of stages once.
    """
    stages = [set[int]() for _ in step.columns]
    for stage, ranks in enumerate(step.plan.placement):
        for rank in ranks:
            stages[rank].add(stage)
    groups = defaultdict[frozenset[int], list[int]](list)
    for rank, own in enumerate(stages):
        groups[frozenset(own)].append(rank)
    pairs = [(alike[0], other) for alike in groups.values() for other in alike[1:]]
    neighbours = {
        pair
        for ranks in step.plan.placement
        for pair in combinations(sorted({groups[frozenset(stages[rank])][0] for rank in ranks}), 2)
    }
    sequences = [_collectives(step, rank) for rank in range(len(step.columns))]
    for one, other in sorted([*pairs, *neighbours]):
        yield from _compared(step, sequences, (one, other), stages[one] & stages[other])


_Sequence = Sequence[tuple[tuple[int, ...], int]]
"""Collectives in order: op, stage, bucket, model collective and round, and the number of the instruction."""


def _compared(
    step: ProgramIndex, sequences: Sequence[_Sequence], pair: tuple[int, int], common: set[int]
) -> Iterator[Violation]:
    """Two ranks that start the collectives of the stages that they have in ``common`` in another order."""

    def name(rank: int, number: int) -> str:
        return describe(step.columns[rank][number])

    one, other = pair
    mine, theirs = (
        [(key, number) for key, number in sequences[rank] if key[1] < 0 or key[1] in common] for rank in pair
    )
    for (key, number), (another, at) in zip(mine, theirs, strict=False):
        if key != another:
            both = f"{name(one, number)} meets {name(other, at)} of rank {other}"
            yield Violation((one, number), f"{both}; ranks start collectives in one order", ((other, at),))
    if len(mine) != len(theirs):
        longer, rank = (mine, one) if len(mine) > len(theirs) else (theirs, other)
        _, number = longer[min(len(mine), len(theirs))]
        message = f"{name(rank, number)} waits for rank {one + other - rank}, which has no such"
        yield Violation((rank, number), message)


def _collectives(step: ProgramIndex, rank: int) -> _Sequence:
    """The collectives of a rank in order, each with its number."""
    columns = step.columns[rank]
    numbers = columns.numbers_of(*COLLECTIVES)
    if not numbers.size:
        return []
    replicas = np.array([len(ranks) for ranks in step.plan.placement])[columns.stages[numbers]]
    microbatches = columns.microbatches[numbers]
    rounds = np.where(columns.model_collectives[numbers] < 0, microbatches, microbatches // replicas)
    fields = columns.ops, columns.stages, columns.buckets, columns.model_collectives
    rows = np.stack([*(each[numbers] for each in fields), rounds]).T.tolist()
    return [(tuple(row), at) for row, at in zip(rows, numbers.tolist(), strict=True)]


def each_value_received_once(step: ProgramIndex) -> Iterator[Violation]:
    """No rank receives a value twice for a microbatch, if the first stage that reads it can move it on.

    Refused, where stages 1 and 2 are both on rank 1 and read the value x of stage 0::

        rank 1: recv x (0 -> 1) mb 0 from rank 0, recv x (0 -> 2) mb 0 from rank 0, forward stage 1 mb 0, ...
    """
    first: dict[object, Link] = {}
    again: dict[int, tuple[str, Link]] = {}
    for number, link in enumerate(step.plan.links):
        ends = step.plan.placement[link.source], step.plan.placement[link.target]
        for value in link.values if link.payload.feeds_compute and ends[0] != ends[1] else ():
            before = first.setdefault((link.payload, value.name, *ends), link)
            if before is not link:
                again[number] = value.name, before
    if again and runs_stages_in_order(columns.computes for columns in step.columns):
        each = step.delivered
        for place in np.flatnonzero(np.isin(each.links, [*again])).tolist():
            number = int(each.links[place])
            name, before = again[number]
            both = f"{format_link(step.plan.links[number])} and {format_link(before)}"
            site = int(each.targets[place]), int(each.receives[place])
            yield Violation(site, f"{both} bring {name} twice; expected the first stage to hand it on")


def channels_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """From one rank to another, receives are posted in the order of the sends. Refused::

    rank 0: ... send mb 0 to rank 1, ... send mb 1 to rank 1
    rank 1: recv mb 1 from rank 0, recv mb 0 from rank 0
    """
    each = step.delivered
    for own in np.split(
        np.arange(each.sends.size), np.searchsorted(each.sources, range(1, len(step.columns)))
    ):
        order = own[stable_order(each.targets[own])[0]]
        swapped = (np.diff(each.receives[order]) < 0) & (np.diff(each.targets[order]) == 0)
        for place in np.flatnonzero(swapped).tolist():
            late, early = order[place], order[place + 1]
            sent = f"rank {each.sources[late]} sends them at {each.sends[early]} and {each.sends[late]}"
            message = f"{_name(step, early)} is received before {_name(step, late)}, but {sent}"
            yield Violation((int(each.targets[late]), int(each.receives[early])), message)


def receives_after_dependencies(step: ProgramIndex) -> Iterator[Violation]:
    """No receive is posted before a compute that its message depends on, since on a GPU it may block it.

    Refused, because the gradient of microbatch 0 depends on the forward of microbatch 0::

        rank 0: recv gradient mb 0 from rank 1, forward stage 0 mb 0, send mb 0 to rank 1
    """
    assert step.computes, "these programs do not finish"
    for place in np.flatnonzero(step.computes.depend_on_next_compute()).tolist():
        message = f"{_name(step, place)} is received before the next compute, which it depends on"
        site = int(step.delivered.targets[place]), int(step.delivered.receives[place])
        yield Violation(site, message)


def _name(step: ProgramIndex, place: int) -> str:
    """A message between ranks, such as ``hidden_1 (0 -> 1), microbatch 3``."""
    microbatch = int(step.delivered.microbatches[place])
    link = step.plan.links[int(step.delivered.links[place])]
    return format_link(link) + (f", microbatch {microbatch}" if microbatch >= 0 else "")
