"""The rules for messages between stages: each is sent and received once, in time and in channel order."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from pipec.ir import Link, Op
from pipec.ir.columns import OP_CODE, stable_order, taken
from pipec.ir.text_format import format_link
from pipec.programs.program_index import ProgramIndex, Violation, transfer_ops
from pipec.programs.routes import DeliveredMessages
from pipec.programs.shared_receives import holding_stages, runs_stages_in_order


def each_message_delivered_once(step: ProgramIndex) -> Iterator[Violation]:
    """Each link is sent and received exactly once for each microbatch, or moved on one rank. Refused::

    rank 0: forward stage 0 mb 0, send mb 0 to rank 1, send mb 0 to rank 1
    rank 1: recv mb 0 from rank 0, forward stage 1 mb 0
    """
    nothing = np.empty(0, np.int32)
    for route in step.routes:
        link, named = route.link, step.microbatches(route.link)
        first, expected = named[0], np.bincount(route.microbatches - named[0], minlength=len(named))
        for op in transfer_ops(route):
            key = (op, route.number, route.source, route.target)
            carried, numbers = step.transfers.get(key, (nothing, nothing))
            counts = np.bincount(carried - first, minlength=expected.size)
            for wrong in np.flatnonzero(counts != expected).tolist():
                microbatch, sends = wrong + first, op is Op.SEND
                rank, stage = (route.source, link.source) if sends else (route.target, link.target)
                message = f"{op} of {_message_name(link, microbatch)} to rank {route.target}"
                site = step.probable_site(numbers[carried == microbatch].tolist(), rank, stage, microbatch)
                yield Violation(site, f"{message} is there {counts[wrong]} times; expected once")


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


def sent_after_made(step: ProgramIndex) -> Iterator[Violation]:
    """Nothing is sent before the compute that makes it. Refused::

    rank 0: send mb 0 to rank 1, forward stage 0 mb 0
    """
    for each in step.deliveries:
        for wrong in np.flatnonzero(each.sends < each.made).tolist():
            site = each.route.source, int(each.sends[wrong])
            yield Violation(site, f"{_name(each, wrong)} leaves before it is made at {each.made[wrong]}")


def received_before_read(step: ProgramIndex) -> Iterator[Violation]:
    """Every receive is posted, then awaited, and then read; a move is done before it is read. Refused::

    rank 1: recv mb 0 from rank 0, forward stage 1 mb 0, wait_recv mb 0 from rank 0
    """
    for each in step.deliveries:
        for wrong in np.flatnonzero(each.waits < each.receives).tolist():
            name, site = _name(each, wrong), (each.route.target, int(each.waits[wrong]))
            yield Violation(site, f"awaits {name}, which is received only at {each.receives[wrong]}")
        for wrong in np.flatnonzero((each.reads >= 0) & (each.reads < each.waits)).tolist():
            way = "awaited" if each.route.crosses_ranks else "moved"
            name, site = _name(each, wrong), (each.route.target, int(each.reads[wrong]))
            yield Violation(site, f"reads {name}, which is {way} only at {each.waits[wrong]}")


def live_slots_not_overwritten(step: ProgramIndex) -> Iterator[Violation]:
    """A slot is not received into again until its microbatch is freed.

    Values that are moved on to other stages of the rank stay until these have freed the microbatch as well.
    Refused::

        rank 1: recv mb 0 from rank 0 slot 0, forward stage 1 mb 0, recv mb 1 from rank 0 slot 0, ...
    """
    stages_of_link = holding_stages(step.plan.links)
    for rank, columns in enumerate(step.columns):
        used = columns.numbers_of(Op.RECV, Op.MOVE)
        used = used[taken(columns.slots, used) >= 0]
        order, begins = stable_order(taken(columns.link_numbers, used), taken(columns.slots, used))
        ends = np.append(begins[1:], order.size) - 1
        before, after = (used[np.delete(order, places)] for places in (ends[: begins.size], begins))
        until = np.empty_like(before)
        for number in np.unique(columns.link_numbers[before]).tolist():
            link = columns.links[number]
            own = np.flatnonzero(columns.link_numbers[before] == number)
            stages = np.array(stages_of_link.get(number, [link.target]))[:, None]
            held = stages, columns.microbatches[before[own]]
            released = step.numbers[OP_CODE[Op.FREE]][held]
            until[own] = np.where(step.ranks[held] == rank, released, -1).max(axis=0)
        live = until > after
        for number, holder in sorted(zip(after[live].tolist(), before[live].tolist(), strict=True)):
            link = columns.links[columns.link_numbers[number]]
            name = f"slot {columns.slots[number]} of {format_link(link)}"
            held = columns.microbatches[holder]
            yield Violation((rank, number), f"{name} still holds microbatch {held}, which is not freed yet")


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


def _message_name(link: Link, microbatch: int) -> str:
    return format_link(link) + (f", microbatch {microbatch}" if microbatch >= 0 else "")


def _name(messages: DeliveredMessages, number: int) -> str:
    return _message_name(messages.route.link, int(messages.route.microbatches[number]))
