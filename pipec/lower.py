"""Lowering: from a compute-only schedule to the program of each rank, with communication, buffers and frees.

The positions of all ranks are put into one linear order: that in which their cells end when forward,
input gradient and weight gradient take one unit of time each and messages take none. A message is sent
right after the cell that makes it, and its receive is posted no later in that order. Whatever an
instruction waits for thus comes before it in one order over all ranks, so the programs cannot deadlock,
not even if every send waited for its receive.

Receives are posted one compute earlier where that rule alone would post them directly before their
reader, because a transfer runs beside a compute only if its receive was posted before the compute began.
On each directed channel between two ranks receives are posted in the order of the sends.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipec.errors import VerifyError
from pipec.ir import Compute, Instruction, Link, Op, Payload, Phase, Program, Schedule, Value

Site = tuple[int, int]
"""A rank and a position on it. Position 0 is the start of the program, 1 the first cell of its order, and
the position after the last cell is the end of the program, where once-per-step messages leave."""


def chain_links(num_stages: int, training: bool = True) -> tuple[Link, ...]:
    """A plain chain of stages: ``hidden_k`` goes into stage k; in training ``grad_hidden_k`` comes back."""

    def value(name: str) -> tuple[Value, ...]:
        return (Value(name, "float32", ("b",)),)

    forward = [Link(k - 1, k, Payload.ACTIVATION, value(f"hidden_{k}")) for k in range(1, num_stages)]
    backward = [Link(k, k - 1, Payload.GRADIENT, value(f"grad_hidden_{k}")) for k in range(1, num_stages)]
    return (*forward, *backward) if training else tuple(forward)


def lower(schedule: Schedule, links: Sequence[Link], recompute: Collection[int] = ()) -> tuple[Program, ...]:
    """One program per rank: ``schedule`` with the communication that ``links`` ask for.

    Weights are lent first, then comes the work of the microbatches; weight gradients and results leave
    when their rank has computed its last cell. Stages in ``recompute`` replay their forward directly
    before the backward, or its input half, of each microbatch.

    Raises:
        VerifyError: the schedule leaves out a cell that a link needs, or its cells wait for each other.
    """
    messages = list(_messages(schedule, links))
    order = _linear_order(schedule, messages)
    receives, sends = _place(schedule, messages, order)
    return tuple(
        Program(rank, _with_slots(_emit(schedule, rank, receives, sends, recompute)))
        for rank in range(schedule.num_ranks)
    )


@dataclass(frozen=True, slots=True)
class _Message:
    """What one link carries once: where it is made, and the first position that reads it."""

    link: Link
    microbatch: int
    producer: Site
    reader: Site

    @property
    def crosses_ranks(self) -> bool:
        return self.producer[0] != self.reader[0]

    def send(self) -> Instruction:
        """The instruction of the producing rank."""
        if self.crosses_ranks:
            return Instruction(Op.SEND, self.link.source, self.microbatch, self.link, self.reader[0])
        return Instruction(Op.MOVE, self.link.target, self.microbatch, self.link)

    def receive(self) -> Instruction:
        """The instruction of the reading rank, if that is another."""
        return Instruction(Op.RECV, self.link.target, self.microbatch, self.link, self.producer[0])


def _messages(schedule: Schedule, links: Iterable[Link]) -> Iterator[_Message]:
    sites = {
        (cell.phase, cell.stage, cell.microbatch): (rank, position)
        for rank, order in enumerate(schedule.orders)
        for position, cell in enumerate(order, 1)
    }

    def find(link: Link, phases: tuple[Phase, ...], stage: int, microbatch: int) -> Site:
        for phase in phases:
            if site := sites.get((phase, stage, microbatch)):
                return site
        raise VerifyError(
            f"schedule {schedule.name!r} never runs {' or '.join(phases)} of stage {stage}, microbatch "
            f"{microbatch}, but {', '.join(value.name for value in link.values)} from stage {link.source} "
            f"to stage {link.target} needs it; add the cell or leave out the link"
        )

    for link in links:
        producers, readers = link.payload.producers, link.payload.readers
        if link.payload.per_microbatch:
            for mb in range(schedule.num_microbatches):
                producer = find(link, producers, link.source, mb)
                yield _Message(link, mb, producer, find(link, readers, link.target, mb))
        elif link.payload is Payload.WEIGHT:
            first = min(find(link, readers, link.target, mb) for mb in range(schedule.num_microbatches))
            yield _Message(link, -1, (schedule.placement[link.source], 0), first)
        else:
            yield from _closing_messages(schedule, link)


def _closing_messages(schedule: Schedule, link: Link) -> Iterator[_Message]:
    """A weight gradient goes home, a result to every other rank; both are read when the program is over."""
    source = schedule.placement[link.source]
    everyone_else = [rank for rank in range(schedule.num_ranks) if rank != source]
    targets = everyone_else if link.payload is Payload.RESULT else [schedule.placement[link.target]]
    for target in targets:
        yield _Message(link, -1, (source, _end(schedule, source)), (target, _end(schedule, target) + 1))


def _end(schedule: Schedule, rank: int) -> int:
    return len(schedule.orders[rank]) + 1


def _linear_order(schedule: Schedule, messages: Iterable[_Message]) -> list[Site]:
    """Every position of every rank, sorted by the time at which it ends."""
    readers: dict[Site, list[Site]] = defaultdict(list)
    waits: Counter[Site] = Counter()
    for message in messages:
        readers[message.producer].append(message.reader)
        waits[message.reader] += 1

    ready: dict[Site, int] = defaultdict(int)
    clock = [0] * schedule.num_ranks
    position = [0] * schedule.num_ranks
    ended: list[tuple[int, Site]] = []
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        while position[rank] <= _end(schedule, rank) and not waits[site := (rank, position[rank])]:
            clock[rank] = max(clock[rank], ready[site]) + _units(schedule, site)
            position[rank] += 1
            ended.append((clock[rank], site))
            for reader in readers[site]:
                waits[reader] -= 1
                ready[reader] = max(ready[reader], clock[rank])
                runnable.append(reader[0])
    _check_finished(schedule, position)
    return [site for _, site in sorted(ended)]


def _units(schedule: Schedule, site: Site) -> int:
    """Time of a position: a fused backward is twice a forward; start and end take none."""
    rank, position = site
    if not 0 < position < _end(schedule, rank):
        return 0
    return 2 if schedule.orders[rank][position - 1].phase is Phase.BACKWARD else 1


def _check_finished(schedule: Schedule, position: Sequence[int]) -> None:
    cells = [
        (rank, schedule.orders[rank][position[rank] - 1])
        for rank in range(schedule.num_ranks)
        if position[rank] <= _end(schedule, rank)
    ]
    stuck = [f"rank {rank} at {cell.phase} {cell.stage} of mb {cell.microbatch}" for rank, cell in cells]
    if stuck:
        raise VerifyError(
            f"schedule {schedule.name!r} cannot finish: these cells wait for each other: {'; '.join(stuck)}; "
            "order each rank's cells so that every value is made before it is read"
        )


def _place(
    schedule: Schedule, messages: Iterable[_Message], order: Iterable[Site]
) -> tuple[Mapping[Site, list[Instruction]], Mapping[Site, list[Instruction]]]:
    """The receives to post before each position, and the sends and moves that follow it.

    A receive goes to where its rank has come when the message is sent, or to the position before its
    reader if that is earlier; only weights are received before the weights that its rank lends.
    """
    outgoing: dict[Site, list[_Message]] = defaultdict(list)
    for message in messages:
        outgoing[message.producer].append(message)

    passed = [0] * schedule.num_ranks
    posts: list[tuple[int, _Message]] = []
    for site in order:
        for message in outgoing[site]:
            rank, reader = message.reader
            ahead = max(reader - 1, 1) if site[1] else 0
            if message.crosses_ranks:
                posts.append((min(passed[rank], ahead), message))
        passed[site[0]] += 1

    receives: dict[Site, list[Instruction]] = defaultdict(list)
    for position, message in _in_channel_order(posts):
        receives[message.reader[0], position].append(message.receive())
    return receives, {site: [message.send() for message in leaving] for site, leaving in outgoing.items()}


def _in_channel_order(posts: Sequence[tuple[int, _Message]]) -> Iterator[tuple[int, _Message]]:
    """The same posts, each moved to where no later message of its channel is posted before it."""
    earliest: dict[tuple[int, int], int] = {}
    moved = []
    for position, message in reversed(posts):
        channel = (message.producer[0], message.reader[0])
        earliest[channel] = min(position, earliest.get(channel, position))
        moved.append((earliest[channel], message))
    return reversed(moved)


def _emit(
    schedule: Schedule,
    rank: int,
    receives: Mapping[Site, list[Instruction]],
    sends: Mapping[Site, list[Instruction]],
    recompute: Collection[int],
) -> Iterator[Instruction]:
    """The instructions of a rank, their slots still open."""
    order = schedule.orders[rank]
    last = {(cell.stage, cell.microbatch): cell for cell in order}
    for position, cell in enumerate((None, *order, None)):
        yield from receives.get((rank, position), ())
        if cell:
            yield from _compute(cell, recompute)
        yield from sends.get((rank, position), ())
        if cell and last[cell.stage, cell.microbatch] == cell:
            yield Instruction(Op.FREE, cell.stage, cell.microbatch)


def _compute(cell: Compute, recompute: Collection[int]) -> Iterator[Instruction]:
    if cell.stage in recompute and cell.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT):
        yield Instruction(Op.RECOMPUTE, cell.stage, cell.microbatch)
    yield Instruction(Op(cell.phase), cell.stage, cell.microbatch)


def _with_slots(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Number the buffers: each is live from its receive or move to the free of its stage and microbatch.

    Taking the lowest free number in program order colours these intervals with as few as can be. A pool
    holds the free numbers below the first that was never used, and that one.
    """
    pools: dict[Link, list[int]] = {}
    held: dict[tuple[int, int], list[tuple[list[int], int]]] = defaultdict(list)
    numbered = []
    for instruction in instructions:
        cell, link = (instruction.stage, instruction.microbatch), instruction.link
        if instruction.op is Op.FREE:
            for pool, slot in held.pop(cell, ()):
                heapq.heappush(pool, slot)
        elif link and link.payload.per_microbatch and instruction.op is not Op.SEND:
            pool = pools.setdefault(link, [0])
            slot = heapq.heappop(pool)
            if not pool:
                pool.append(slot + 1)
            held[cell].append((pool, slot))
            instruction = Instruction(instruction.op, *cell, link, instruction.peer, slot)
        numbered.append(instruction)
    return tuple(numbered)
