"""Static verification: the programs compute everything once, in order, without deadlock and within memory.

The verifier is data: ``RULES`` lists one small function per rule, which yields the faults it finds. A
rule may rely on those before it. The rules know what programs mean, and nothing of how they were made.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipec.errors import VerifyError
from pipec.ir import Instruction, Link, Op, Payload, Program
from pipec.rendezvous import Site, circle, stalls
from pipec.step_index import BACKWARDS, Delivery, StepIndex
from pipec.text import format_link, instruction_lines

_CONTEXT_LINES = 3
_TRANSFERS = (Op.RECV, Op.SEND, Op.MOVE)


def verify_programs(
    programs: Sequence[Program],
    placement: Sequence[int],
    links: Sequence[Link],
    num_microbatches: int,
    *,
    recompute: Collection[int] = (),
    max_in_flight: int | Sequence[int] | None = None,
) -> None:
    """Prove that ``programs`` are one correct step of the stages that ``placement`` puts on ranks.

    ``recompute`` are the stages that replay their forward. ``max_in_flight`` bounds how many pairs of
    stage and microbatch a rank holds between forward and free: one number for all ranks, or one for each.

    Raises:
        VerifyError: a rule is broken; the message shows the lines of the program around the fault.
    """
    limits = (max_in_flight,) * len(programs) if isinstance(max_in_flight, int) else max_in_flight
    step = StepIndex(programs, tuple(placement), tuple(links), num_microbatches, frozenset(recompute), limits)
    for rule in RULES:
        for fault in rule(step):
            raise VerifyError(_explain(programs, fault))


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong, and the instruction to look at; no instruction if the programs as a whole are wrong."""

    site: Site | None
    message: str


def _explain(programs: Sequence[Program], fault: _Fault) -> str:
    if fault.site is None:
        return fault.message
    rank, number = fault.site
    lines = instruction_lines(programs[rank])
    first, last = max(number - _CONTEXT_LINES, 0), number + _CONTEXT_LINES + 1
    shown = [f"{'>' if k == number else ' '} {line}" for k, line in enumerate(lines[first:last], start=first)]
    return "\n".join([f"rank {rank}, instruction {number}: {fault.message}", *shown])


def _fits_plan(step: StepIndex) -> Iterator[_Fault]:
    """Programs are of the plan's ranks, and every field of every instruction fits the plan."""
    ranks = [program.rank for program in step.programs]
    if ranks != list(range(max(step.placement) + 1)):
        yield _Fault(None, f"programs are of ranks {ranks}; expected one for each rank of {step.placement}")
    for link in step.links:
        ends = (link.source,) if link.payload is Payload.RESULT else (link.source, link.target)
        if not all(0 <= stage < len(step.placement) for stage in ends):
            yield _Fault(None, f"{format_link(link)} names a stage beyond the plan's {len(step.placement)}")
    for site, instruction in step.instructions():
        misfits = _transfer_misfits if instruction.op in _TRANSFERS else _compute_misfits
        for misfit in misfits(step, site[0], instruction):
            yield _Fault(site, misfit)


def _compute_misfits(step: StepIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    op, stage, microbatch = instruction.op, instruction.stage, instruction.microbatch
    if not 0 <= stage < len(step.placement) or step.placement[stage] != rank:
        held = [stage for stage, where in enumerate(step.placement) if where == rank]
        yield f"{op} names stage {stage}; expected a stage of this rank: {held}"
    if not 0 <= microbatch < step.num_microbatches:
        yield f"{op} names microbatch {microbatch}; expected 0 to {step.num_microbatches - 1}"
    if instruction.link or instruction.peer != -1 or instruction.slot != -1:
        yield f"{op} carries a link, peer or slot; expected none"


def _transfer_misfits(step: StepIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    op, link = instruction.op, instruction.link
    if link is None or link not in step.link_set:
        yield f"{op} carries {format_link(link) if link else 'no link'}; expected a link of the plan"
        return
    source, targets = step.placement[link.source], step.receivers(link)
    start, end = {Op.SEND: (rank, instruction.peer), Op.RECV: (instruction.peer, rank)}.get(op, (rank, rank))
    if start != source or end not in targets:
        way = f"rank {source} to {' or '.join(map(str, targets))}"
        yield f"{op} takes {format_link(link)} from rank {start} to {end}; expected from {way}"
    if (op is Op.MOVE) != (start == end) or (op is Op.MOVE) != (instruction.peer == -1):
        yield f"{op} from rank {start} to {end}; expected a send and a recv, or a move without a peer"
    stage = link.source if op is Op.SEND else link.target
    if instruction.stage != stage:
        yield f"{op} of {format_link(link)} names stage {instruction.stage}; expected {stage}"
    if instruction.microbatch not in step.microbatches(link):
        allowed = step.microbatches(link)
        yield f"{op} names microbatch {instruction.microbatch}; expected {allowed[0]} to {allowed[-1]}"
    if (instruction.slot >= 0) != (op is not Op.SEND and link.payload.per_microbatch):
        yield f"{op} names slot {instruction.slot}; only what arrives for a microbatch has one, others -1"


def _computes_once(step: StepIndex) -> Iterator[_Fault]:
    """Each stage runs each phase exactly once per microbatch, its backward whole or in two halves."""
    for cell in step.cells():
        for ops, miscount in _miscounts(step, *cell):
            found = [site for op in ops for site in step.computes.get((op, *cell), ())]
            yield _Fault(step.suspect(found, step.placement[cell[0]], *cell), miscount)


def _miscounts(step: StepIndex, stage: int, microbatch: int) -> Iterator[tuple[Sequence[Op], str]]:
    def count(op: Op) -> int:
        return len(step.computes.get((op, stage, microbatch), ()))

    where = f"of stage {stage}, microbatch {microbatch}"
    replays = int(step.trains and stage in step.recompute)
    backwards = tuple(count(op) for op in BACKWARDS)
    if count(Op.FORWARD) != 1:
        yield [Op.FORWARD], f"forward {where} runs {count(Op.FORWARD)} times; expected once"
    if count(Op.RECOMPUTE) != replays:
        yield [Op.RECOMPUTE], f"recompute {where} runs {count(Op.RECOMPUTE)} times; expected {replays}"
    if step.trains and backwards not in ((1, 0, 0), (0, 1, 1)):
        found = ", ".join(f"{number} {op}" for op, number in zip(BACKWARDS, backwards, strict=True))
        yield BACKWARDS, f"the backward {where} is {found}; expected one backward, or one of each half"


def _computes_in_order(step: StepIndex) -> Iterator[_Fault]:
    """Forward, then recompute, then backward; the input half before the weight half."""
    order = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    for stage, microbatch in step.cells():
        sites = [(op, site) for op in order for site in step.computes.get((op, stage, microbatch), ())]
        for (earlier, first), (later, second) in pairwise(sites):
            if second < first:
                where = f"of stage {stage}, microbatch {microbatch}"
                yield _Fault(second, f"{later} {where} runs before its {earlier} at {first[1]}")


def _delivers_once(step: StepIndex) -> Iterator[_Fault]:
    """Each link is sent and received exactly once for each microbatch, or moved on one rank."""
    for link, microbatch, target in step.messages():
        for op in step.transfer_ops(link, target):
            sites = step.transfers.get((op, link, microbatch, target), ())
            if len(sites) != 1:
                sends = op is Op.SEND
                rank, stage = (step.placement[link.source], link.source) if sends else (target, link.target)
                message = f"{op} of {_message_name(link, microbatch)} to rank {target}"
                site = step.suspect(sites, rank, stage, microbatch)
                yield _Fault(site, f"{message} is there {len(sites)} times; expected once")


def _message_name(link: Link, microbatch: int) -> str:
    return format_link(link) + (f", microbatch {microbatch}" if microbatch >= 0 else "")


def _sends_what_was_made(step: StepIndex) -> Iterator[_Fault]:
    """Nothing is sent before the compute that makes it."""
    for delivery in step.deliveries:
        if delivery.made and delivery.send < delivery.made:
            name = _message_name(delivery.link, delivery.microbatch)
            yield _Fault(delivery.send, f"{name} leaves before it is made at {delivery.made[1]}")


def _posts_before_reading(step: StepIndex) -> Iterator[_Fault]:
    """Every receive is posted, and every move done, before the compute that reads it."""
    for delivery in step.deliveries:
        if delivery.read and delivery.read < delivery.receive:
            name = _message_name(delivery.link, delivery.microbatch)
            yield _Fault(delivery.read, f"reads {name}, which is received only at {delivery.receive[1]}")


def _frees_after_last_use(step: StepIndex) -> Iterator[_Fault]:
    """Each stage and microbatch is freed exactly once, and not used afterwards."""
    freed: dict[tuple[int, int], Site] = {}
    for site, instruction in step.instructions():
        for cell in _cells_used(instruction):
            if cell in freed:
                where = f"stage {cell[0]}, microbatch {cell[1]}"
                yield _Fault(site, f"{instruction.op} needs {where}, which was freed at {freed[cell][1]}")
        if instruction.op is Op.FREE:
            freed[instruction.stage, instruction.microbatch] = site
    for stage, microbatch in step.cells():
        if (stage, microbatch) not in freed:
            suspect = step.suspect((), step.placement[stage], stage, microbatch)
            yield _Fault(suspect, f"stage {stage}, microbatch {microbatch} is never freed")


def _cells_used(instruction: Instruction) -> Iterator[tuple[int, int]]:
    """The stages and microbatches whose tensors an instruction reads or writes."""
    if instruction.microbatch >= 0:
        yield instruction.stage, instruction.microbatch
        if instruction.op is Op.MOVE and instruction.link:
            yield instruction.link.source, instruction.microbatch


def _spares_live_slots(step: StepIndex) -> Iterator[_Fault]:
    """Nothing is received into a buffer between the receive it holds and the free of that microbatch."""
    holder: dict[tuple[int, Link, int], int] = {}
    held: dict[tuple[int, int], list[tuple[int, Link, int]]] = defaultdict(list)
    for site, instruction in step.instructions():
        cell = instruction.stage, instruction.microbatch
        if instruction.op is Op.FREE:
            for buffer in held.pop(cell, ()):
                del holder[buffer]
        elif instruction.link and instruction.slot >= 0:
            buffer = site[0], instruction.link, instruction.slot
            if buffer in holder:
                name = f"slot {instruction.slot} of {format_link(instruction.link)}"
                yield _Fault(site, f"{name} still holds microbatch {holder[buffer]}, which is not freed yet")
            holder[buffer] = instruction.microbatch
            held[cell].append(buffer)


def _keeps_channel_order(step: StepIndex) -> Iterator[_Fault]:
    """From one rank to another, receives are posted in the order of the sends."""
    crossing = [delivery for delivery in step.deliveries if delivery.send != delivery.receive]
    sent: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    for delivery in sorted(crossing, key=lambda delivery: delivery.send):
        sent[delivery.send[0], delivery.receive[0]].append(delivery)
    for (source, _), deliveries in sent.items():
        for first, second in pairwise(deliveries):
            if second.receive < first.receive:
                early, late = (_message_name(each.link, each.microbatch) for each in (second, first))
                order = f"rank {source} sends them at {second.send[1]} and {first.send[1]}"
                yield _Fault(second.receive, f"{early} is received before {late}, but {order}")


def _finishes(step: StepIndex) -> Iterator[_Fault]:
    """No rank waits forever, even if every send waits until its receive is posted."""
    stalled = stalls([len(program.instructions) for program in step.programs], _awaited(step))
    if stalled:
        ring = circle(stalled)
        lines = [
            f"  rank {site[0]} at '{step.show(site)}' waits for rank {ahead[0]} to reach '{step.show(ahead)}'"
            for site, ahead in ring
        ]
        yield _Fault(ring[0][0], "\n".join(["deadlock if sends wait for their receives:", *lines]))


def _awaited(step: StepIndex) -> Mapping[Site, list[Site]]:
    """What must be behind other ranks before an instruction can pass: sends await receives, readers sends."""
    awaited: dict[Site, list[Site]] = defaultdict(list)
    for delivery in step.deliveries:
        if delivery.send != delivery.receive:
            awaited[delivery.send].append(delivery.receive)
            if delivery.read:
                awaited[delivery.read].append(delivery.send)
    return awaited


def _bounds_in_flight(step: StepIndex) -> Iterator[_Fault]:
    """No rank holds more between forward and free than it may."""
    if step.limits is None:
        return
    in_flight = [0] * len(step.programs)
    for site, instruction in step.instructions():
        rank = site[0]
        in_flight[rank] += (instruction.op is Op.FORWARD) - (instruction.op is Op.FREE)
        if in_flight[rank] > step.limits[rank]:
            held, limit = in_flight[rank], step.limits[rank]
            yield _Fault(site, f"holds {held} microbatches in flight; expected at most {limit}")


RULES: tuple[Callable[[StepIndex], Iterator[_Fault]], ...] = (
    _fits_plan,
    _computes_once,
    _computes_in_order,
    _delivers_once,
    _sends_what_was_made,
    _posts_before_reading,
    _frees_after_last_use,
    _spares_live_slots,
    _keeps_channel_order,
    _finishes,
    _bounds_in_flight,
)
