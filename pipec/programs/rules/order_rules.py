"""The rules of order that no single cell has: of segments, accumulations, channels and collectives."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from pipec.ir import Link, Op
from pipec.ir.columns import COLLECTIVES, OPS, InstructionColumns, Ints, one_of, taken
from pipec.ir.text_format import format_link
from pipec.programs.program_index import BACKWARDS, ProgramIndex, Violation, transfer_ops
from pipec.programs.routes import DeliveredMessages
from pipec.programs.rules.field_rules import SyncKey, expected_sync
from pipec.programs.shared_receives import runs_stages_in_order

_MAKES_GRADIENTS = one_of(*BACKWARDS)
_READ_SUMS = (Op.REDUCE_GRAD, Op.GRAD_NORM, Op.UPDATE)


def segments_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """The segments of a compute run once each, in order. Refused::

    backward stage 0 mb 0 segment 1, backward stage 0 mb 0 segment 0
    """
    for rank, columns in enumerate(step.columns):
        for own in _split_computes(columns):
            op, stage = OPS[columns.ops[own[0]]], int(columns.stages[own[0]])
            found, expected = columns.segments[own].tolist(), list(range(step.num_segments(op, stage)))
            if found != expected:
                wrong = next((k for k, segment in enumerate(found) if expected[k : k + 1] != [segment]), -1)
                where = f"of stage {stage}, microbatch {columns.microbatches[own[0]]}"
                message = f"{op} {where} runs its segments in the order {found}; expected {expected}"
                yield Violation((rank, int(own[wrong])), message)
        yield from _undivided_forwards(rank, columns)


def _split_computes(columns: InstructionColumns) -> list[Ints]:
    """The instruction numbers of each compute that runs segment by segment."""
    own = columns.compute_numbers
    own = own[taken(columns.segments, own) >= 0]
    fields = (columns.microbatches, columns.stages, columns.ops)
    computes = np.stack([taken(column, own) for column in fields])
    order = np.lexsort(computes)
    bounds = np.flatnonzero(np.diff(computes[:, order], axis=1).any(axis=0)) + 1
    return np.split(own[order], bounds) if own.size else []


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


def accumulated_in_time(step: ProgramIndex) -> Iterator[Violation]:
    """Gradients are accumulated before their rank computes again or reads the sums. Refused::

    backward stage 0 mb 0, forward stage 0 mb 1, accumulate stage 0 mb 0
    """
    for rank, columns in enumerate(step.columns):
        made, added = columns.numbers_of(*BACKWARDS), columns.numbers_of(Op.ACCUMULATE)
        added = added[taken(columns.link_numbers, added) < 0]
        sums_read = columns.numbers_of(*_READ_SUMS), step.tied_transfers(rank)
        readers = np.sort(np.concatenate([columns.compute_numbers, *sums_read]), kind="stable")
        before = np.append(readers, -1)[np.searchsorted(readers, added) - 1]
        right = (before >= 0) & _MAKES_GRADIENTS[taken(columns.ops, before)]
        for column in (columns.stages, columns.microbatches, columns.segments):
            right &= taken(column, before) == taken(column, added)
        right &= np.append(True, before[1:] != before[:-1])[: added.size]
        for number in added[~right].tolist():
            message = "accumulates what the compute before it did not make, or what is accumulated already"
            yield Violation((rank, number), message)
        if added.size < made.size:
            number = int(np.setdiff1d(made, before)[0])
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            message = f"the gradients of {where} are not accumulated before the rank goes on"
            yield Violation((rank, number), message)


def sync_complete(step: ProgramIndex) -> Iterator[Violation]:
    """Every gradient is reduced once, and every stage updates once. Refused::

    reduce_grad stage 0 bucket 0, wait_reduce_grad stage 0 bucket 0, update stage 0, update stage 0
    """
    for rank, columns in enumerate(step.columns):
        for key, times in expected_sync(step, rank).items():
            own = columns.numbers_of(key.op)
            own = own[(columns.stages[own] == key.stage) & (columns.buckets[own] == key.bucket)]
            if times not in (own.size, -1):
                site = step.probable_site(own.tolist(), rank)
                often = "once" if times == 1 else f"{times} times"
                yield Violation(site, f"{key} is there {own.size} times on rank {rank}; expected {often}")


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
        yield from _compared(sequences, one, other, stages[one] & stages[other])


_Sequence = Sequence[tuple[SyncKey, int]]


def _compared(sequences: Sequence[_Sequence], one: int, other: int, common: set[int]) -> Iterator[Violation]:
    """Two ranks that start the collectives of the stages that they have in ``common`` in another order."""
    mine, theirs = (
        [(key, number) for key, number in sequences[rank] if key.op is Op.GRAD_NORM or key.stage in common]
        for rank in (one, other)
    )
    for (key, number), (another, at) in zip(mine, theirs, strict=False):
        if key != another:
            message = f"{key} meets {another} of rank {other}; ranks start collectives in one order"
            yield Violation((one, number), message, ((other, at),))
    if len(mine) != len(theirs):
        longer, rank = (mine, one) if len(mine) > len(theirs) else (theirs, other)
        key, number = longer[min(len(mine), len(theirs))]
        yield Violation((rank, number), f"{key} waits for rank {one + other - rank}, which has no such")


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
    return [(SyncKey(OPS[op], *row), at) for (op, *row), at in zip(rows, numbers.tolist(), strict=True)]


def each_message_on_its_way(step: ProgramIndex) -> Iterator[Violation]:
    """Each message goes from the rank that makes it to the rank that reads it. Refused, of three replicas::

    rank 3: send mb 0 to rank 1, send mb 1 to rank 0
    """
    nothing = np.empty(0, np.int32)
    for route in step.routes:
        for op in transfer_ops(route):
            key = op, route.number, route.source, route.target
            carried, numbers = step.transfers.get(key, (nothing, nothing))
            if np.array_equal(np.sort(carried), route.microbatches):
                continue
            for microbatch in np.setxor1d(carried, route.microbatches)[:1].tolist():
                rank, stage = (route.source, route.link.source)
                if op is not Op.SEND:
                    rank, stage = route.target, route.link.target
                site = step.probable_site(numbers[carried == microbatch].tolist(), rank, stage, microbatch)
                way = f"from rank {route.source} to rank {route.target}"
                count = int(np.count_nonzero(carried == microbatch))
                message = f"{op} of {format_link(route.link)}, microbatch {microbatch} {way}"
                yield Violation(site, f"{message} is there {count} times; expected {1 - count}")


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
        for each in step.deliveries_between_ranks:
            if each.route.number in again:
                name, before = again[each.route.number]
                both = f"{format_link(each.route.link)} and {format_link(before)}"
                site = each.route.target, int(each.receives[0])
                yield Violation(site, f"{both} bring {name} twice; expected the first stage to hand it on")


def channels_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """From one rank to another, receives are posted in the order of the sends. Refused::

    rank 0: ... send mb 0 to rank 1, ... send mb 1 to rank 1
    rank 1: recv mb 1 from rank 0, recv mb 0 from rank 0
    """
    channels: dict[tuple[int, int], list[DeliveredMessages]] = defaultdict(list)
    for each in step.deliveries_between_ranks:
        channels[each.route.source, each.route.target].append(each)
    for (source, target), deliveries in channels.items():
        sends, receives = (
            np.concatenate([getattr(each, way) for each in deliveries]) for way in ("sends", "receives")
        )
        order = np.argsort(sends)
        for place in np.flatnonzero(np.diff(receives[order]) < 0).tolist():
            late, early = order[place], order[place + 1]
            names = [_name(each, number) for each in deliveries for number in range(each.sends.size)]
            sent = f"rank {source} sends them at {sends[early]} and {sends[late]}"
            message = f"{names[early]} is received before {names[late]}, but {sent}"
            yield Violation((target, int(receives[early])), message)


def receives_after_dependencies(step: ProgramIndex) -> Iterator[Violation]:
    """No receive is posted before a compute that its message depends on, since on a GPU it may block it.

    Refused, because the gradient of microbatch 0 depends on the forward of microbatch 0::

        rank 0: recv gradient mb 0 from rank 1, forward stage 0 mb 0, send mb 0 to rank 1
    """
    assert step.computes, "these programs do not finish"
    messages = step.deliveries_between_ranks
    for each, of_route in zip(messages, step.computes.depend_on_next_compute(messages), strict=True):
        for wrong in np.flatnonzero(of_route).tolist():
            message = f"{_name(each, wrong)} is received before the next compute, which it depends on"
            yield Violation((each.route.target, int(each.receives[wrong])), message)


def _name(messages: DeliveredMessages, number: int) -> str:
    microbatch = int(messages.route.microbatches[number])
    return format_link(messages.route.link) + (f", microbatch {microbatch}" if microbatch >= 0 else "")
