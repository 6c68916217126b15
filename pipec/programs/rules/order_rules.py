"""The rules of order that no single cell has: of segments, channels and collectives."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import COLLECTIVES, OPS, InstructionColumns, equal_groups, stable_order, taken
from pipec.ir.text_format import format_link
from pipec.programs.messages import Transfers, collective_numbers
from pipec.programs.program_index import ProgramIndex, Violation, describe


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


def collectives_meet(step: ProgramIndex) -> Iterator[Violation]:
    """All ranks of a collective start it, in the same round; deadlocks show whether in one order. Refused::

    rank 0: ... unshard stage 0 bucket 0, ... unshard stage 0 bucket 0
    rank 1: ... unshard stage 0 bucket 0
    """
    started, placement = Transfers.of(step.columns, *COLLECTIVES), step.plan.placement
    columns, found = started.columns, collective_numbers(started.columns, started.ranks)
    counts = np.array([*map(len, placement), len(step.columns)])[columns.stages]
    is_of_model = columns.model_collectives >= 0
    rounds = np.where(is_of_model, columns.microbatches // counts, columns.microbatches)
    order, begins = stable_order(found)
    firsts = order[begins]
    for place in np.flatnonzero(np.bincount(found) != counts[firsts]).tolist():
        first, members = int(firsts[place]), {*started.ranks[found == place].tolist()}
        stage = int(columns.stages[first])
        absent = min({*(placement[stage] if stage >= 0 else range(len(step.columns)))} - members)
        site = int(started.ranks[first]), int(started.numbers[first])
        message = f"{describe(columns[first])} waits for rank {absent}, which has no such"
        yield Violation(site, message)
    for other in np.flatnonzero(rounds != rounds[firsts][found]).tolist():
        sites = [
            (int(started.ranks[each]), int(started.numbers[each])) for each in (firsts[found[other]], other)
        ]
        both = " meets ".join(describe(step.columns[rank][number]) for rank, number in sites)
        yield Violation(sites[0], f"{both} of rank {sites[1][0]}; expected the same round", (sites[1],))


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
