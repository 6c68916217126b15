"""Static verification: the programs compute everything once, in order, without deadlock and within memory.

The verifier is data: ``RULES`` lists one small function per rule, which yields the faults that it finds. A
rule may rely on the rules before it. The rules know the meaning of programs, but not how they were made. They
work on whole columns of instructions, and describe only faulty ones.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import (
    NO_SYNC,
    Link,
    Mode,
    ModelCollectives,
    Op,
    Placement,
    Plan,
    Program,
    SegmentCounts,
    SyncSpec,
    count_ranks,
    rank_of,
    replica_counts,
)
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints, taken
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.text_format import format_link, instruction_lines
from pipec.programs import (
    collective_rules,
    message_rules,
    model_collective_rules,
    offload_rules,
    result_rules,
    segment_rules,
    sync_spec_rules,
    weight_version_rules,
)
from pipec.programs.collective_waits import collective_waits, tied_gradient_waits
from pipec.programs.counterexample import counterexample
from pipec.programs.deadlock import WaitEdges, stalled_ranks, wait_cycle
from pipec.programs.field_rules import first_of_each_kind, violations
from pipec.programs.lower_periodic import num_microbatches_to_lower
from pipec.programs.program_index import BACKWARDS, COMPUTES, DeliveredMessages, ProgramIndex
from pipec.programs.rank_memory import in_flight
from pipec.programs.violation import Violation

_CONTEXT_LINES = 3
_OF_ROUNDS = [OP_CODE[op] for op in weight_version_rules.OPS]


def verify_programs(
    programs: Sequence[Program],
    placement: Placement,
    links: Sequence[Link],
    num_microbatches: int,
    *,
    recompute: Collection[int] = (),
    max_in_flight: int | Sequence[int] | None = None,
    sync_spec: SyncSpec = NO_SYNC,
    segments: SegmentCounts | None = None,
    model_collectives: ModelCollectives | None = None,
    offload: Collection[int] = (),
) -> None:
    """Prove that ``programs`` are one correct step of the stages that ``placement`` puts on ranks.

    ``recompute`` are the stages that replay their forward. ``max_in_flight`` bounds how many pairs of stage
    and microbatch a rank holds between forward and free: one number for all ranks, or one for each.
    ``sync_spec`` specifies reductions and updates, and ``segments`` are the phases that consist of several
    functions; ``model_collectives`` run between these. Stages in ``offload`` may keep saved values in host
    memory. Time and memory are linear in the number of instructions.

    Raises:
        VerifyError: a rule is broken; the message shows the lines of the program around the fault, and the
            computes of the ranks around it with the faulty one marked.
    """
    limits = (max_in_flight,) * len(programs) if isinstance(max_in_flight, int) else max_in_flight
    recomputed = frozenset(recompute)
    step = ProgramIndex(
        *(programs, placement, tuple(links), num_microbatches, recomputed, limits, sync_spec),
        segments=segments or {},
        model_collectives=model_collectives or {},
        offload=frozenset(offload),
    )
    for rule in RULES:
        for fault in rule(step):
            raise VerifyError(_explain(step, fault))


def verify_plan(plan: Plan, programs: Sequence[Program]) -> None:
    """Prove that ``programs`` are one correct step of a plan. Raises VerifyError as ``verify_programs``."""
    for misfit in sync_spec_rules.stage_violations(plan):
        raise VerifyError(misfit)
    recompute = [stage.index for stage in plan.stages if stage.recompute]
    placement, links, count = plan.placement, plan.links, plan.num_microbatches
    if plan.sync_spec.stream is not None and plan.mode is Mode.TRAIN:
        verify_periodic(programs, placement, links, recompute, plan.sync_spec)
        return
    verify_programs(
        programs,
        placement,
        links,
        count,
        recompute=recompute,
        sync_spec=plan.sync_spec,
        segments=plan.segments,
        model_collectives=plan.model_collectives,
        offload=plan.offloading_stages,
    )


def verify_periodic(
    programs: Sequence[Program],
    placement: Placement,
    links: Sequence[Link],
    recompute: Collection[int],
    sync_spec: SyncSpec,
) -> None:
    """Prove that rounds are right for any number of mini-batches.

    A rank finishes a microbatch before it begins the one that is a window later. So instructions that a rule
    compares are less than a window of microbatches apart, and belong to the first, a middle or the last of
    the rounds. A rule that holds for every number of mini-batches up to two windows and a period therefore
    holds for more.

    Raises:
        VerifyError: as ``verify_programs``, or the programs do not repeat with the mini-batches.
    """
    assert sync_spec.stream is not None, "periodic programs have mini-batches"
    period, size = sync_spec.stream.period(replica_counts(placement)), sync_spec.stream.microbatches
    last = num_microbatches_to_lower(sync_spec.stream, replica_counts(placement))
    for program in programs:
        named = {each.microbatch for each in program.instructions}
        if program.period != period or not named or not 0 <= min(named) <= max(named) <= last:
            raise VerifyError(
                f"rank {program.rank} does not repeat instructions for microbatches 0 to {last} every "
                f"{period} mb, as expected, but those for {sorted(named)[:9]} every {program.period} mb"
            )
    most = -(-(2 * max(map(microbatch_window, programs)) + period) // size) * size
    written = [InstructionColumns.of(unroll(each, most).instructions, tuple(links)) for each in programs]
    for count in range(size, most + size, size):
        shorter = [
            Program(program.rank, each.where(each.microbatches < count))
            for program, each in zip(programs, written, strict=True)
        ]
        verify_programs(shorter, placement, links, count, recompute=recompute, sync_spec=sync_spec)


def _explain(step: ProgramIndex, fault: Violation) -> str:
    if fault.site is None:
        return fault.message
    rank, number = fault.site
    lines = instruction_lines(step.programs[rank])
    first, last = max(number - _CONTEXT_LINES, 0), number + _CONTEXT_LINES + 1
    shown = [f"{'>' if k == number else ' '} {line}" for k, line in enumerate(lines[first:last], start=first)]
    orders = [columns.cells for columns in step.columns]
    marked = {where: _place(step.columns[where], at) for where, at in (fault.site, *fault.others)}
    drawn = counterexample(orders, step.placement, marked) if any(map(len, orders)) else ""
    return "\n".join([f"rank {rank}, instruction {number}: {fault.message}", *shown, drawn]).rstrip("\n")


def _place(columns: InstructionColumns, number: int) -> int:
    """The place of the compute that an instruction belongs to: itself, else the next one, else the last."""
    cells = columns.is_compute_start
    return max(min(int(cells[:number].sum()), int(cells.sum()) - 1), 0)


def _fits_plan(step: ProgramIndex) -> Iterator[Violation]:
    """Programs are of the plan's ranks, and every field of every instruction fits the plan."""
    ranks = [program.rank for program in step.programs]
    last = count_ranks(step.placement) - 1
    if ranks != list(range(last + 1)):
        yield Violation(None, f"programs are of ranks {ranks}; expected one for each of ranks 0 to {last}")
    for program in step.programs:
        if program.period:
            yield Violation(
                None, f"the program of rank {program.rank} repeats; expected that of a single step"
            )
    for link in step.links:
        ends = (link.source,) if link.payload.is_result else (link.source, link.target)
        if not all(0 <= stage < len(step.placement) for stage in ends):
            yield Violation(
                None, f"{format_link(link)} names a stage beyond the plan's {len(step.placement)}"
            )
    for misfit in sync_spec_rules.violations(step.sync_spec, step.placement, step.links, step.segments):
        yield Violation(None, misfit)
    for rank, columns in enumerate(step.columns):
        for number in first_of_each_kind(step, columns):
            for misfit in violations(step, rank, columns[number]):
                yield Violation((rank, number), misfit)


def _computes_once(step: ProgramIndex) -> Iterator[Violation]:
    """Each stage runs each phase exactly once per microbatch, its backward whole or in two halves."""
    kinds = np.isin(np.arange(len(step.placement)), list(step.recompute)).astype(np.int64)[:, None]
    for op in COMPUTES:
        kinds = kinds * 3 + np.minimum(step.counts[OP_CODE[op]], 2)
    for cell in sorted(np.unique(kinds, return_index=True)[1].tolist()):
        stage, microbatch = divmod(cell, step.num_microbatches)
        for ops, miscount in _miscounts(step, stage, microbatch):
            found = [int(step.numbers[OP_CODE[op], stage, microbatch]) for op in ops]
            seen = [number for number in found if number >= 0]
            rank = rank_of(step.placement, stage, microbatch)
            yield Violation(step.probable_site(seen, rank, stage, microbatch), miscount)


def _miscounts(step: ProgramIndex, stage: int, microbatch: int) -> Iterator[tuple[Sequence[Op], str]]:
    def count(op: Op) -> int:
        return int(step.counts[OP_CODE[op], stage, microbatch])

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


def _computes_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """Forward, then recompute, then backward; the input half before the weight half."""
    yield from segment_rules.segments_in_order(step)
    latest, latest_op = (
        step.numbers[OP_CODE[Op.FORWARD]].copy(),
        np.full(step.numbers.shape[1:], OP_CODE[Op.FORWARD]),
    )
    for op in COMPUTES[1:]:
        numbers = step.numbers[OP_CODE[op]]
        begins, runs = step.begins[OP_CODE[op]], numbers >= 0
        for stage, microbatch in np.argwhere(runs & (begins < latest)).tolist()[:1]:
            earlier, first = OPS[latest_op[stage, microbatch]], latest[stage, microbatch]
            where = f"of stage {stage}, microbatch {microbatch}"
            site = rank_of(step.placement, stage, microbatch), int(begins[stage, microbatch])
            yield Violation(site, f"{op} {where} runs before its {earlier} at {first}")
        latest[runs], latest_op[runs] = numbers[runs], OP_CODE[op]


def _frees_after_last_use(step: ProgramIndex) -> Iterator[Violation]:
    """Each stage and microbatch is freed exactly once, and not used afterwards."""
    freed = step.numbers[OP_CODE[Op.FREE]]
    sources = np.array([*(link.source for link in step.links), -1])
    for rank, columns in enumerate(step.columns):
        late: list[tuple[int, int]] = []
        named = np.flatnonzero((columns.microbatches >= 0) & ~np.isin(columns.ops, _OF_ROUNDS))
        used = named[taken(columns.stages, named) >= 0]
        moved = named[columns.ops[named] == OP_CODE[Op.MOVE]]
        places = (used, taken(columns.stages, used)), (moved, sources[columns.link_numbers[moved]])
        for numbers, stages in places:
            at = freed[stages, columns.microbatches[numbers]]
            wrong = np.flatnonzero((at >= 0) & (at < numbers))[:1]
            late += zip(numbers[wrong].tolist(), stages[wrong].tolist(), strict=True)
        for number, stage in sorted(late):
            microbatch = int(columns.microbatches[number])
            where = f"stage {stage}, microbatch {microbatch}"
            message = f"needs {where}, which was freed at {freed[stage, microbatch]}"
            yield Violation((rank, number), f"{columns[number].op} {message}")
    for stage, microbatch in np.argwhere(freed < 0).tolist()[:1]:
        probable_site = step.probable_site((), rank_of(step.placement, stage, microbatch), stage, microbatch)
        yield Violation(probable_site, f"stage {stage}, microbatch {microbatch} is never freed")


def _finishes(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits forever, even if every send waits until its receive is posted."""
    collectives = collective_waits(step)
    others = _together([tied_gradient_waits(step), collectives.waits, result_rules.result_waits(step)])
    if (
        not others.ranks.size
        and step.cells
        and step.cells.receives_precede_sends(message_rules.cross_rank_messages(step))
    ):
        return
    waits = _together([_waits(step.deliveries), others])
    stalled = stalled_ranks([*(len(columns) for columns in step.columns), *[1] * collectives.count], waits)
    if stalled:
        ring = wait_cycle(collectives.of_ranks(stalled))
        lines = [
            f"  rank {site[0]} at '{step.show(site)}' waits for rank {ahead[0]} to reach '{step.show(ahead)}'"
            for site, ahead in ring
        ]
        message = "\n".join(["deadlock if sends wait for their receives:", *lines])
        yield Violation(ring[0][0], message, tuple(site for site, _ in ring[1:]))


def _waits(deliveries: Sequence[DeliveredMessages]) -> WaitEdges:
    """A send waits for its receive, and a reader of a message for its send."""
    parts: dict[int, list[tuple[Ints, ...]]] = defaultdict(list)
    for each in deliveries:
        if each.route.crosses_ranks:
            source = np.full_like(each.sends, each.route.source)
            target = np.full_like(each.sends, each.route.target)
            parts[each.route.source].append((source, each.sends, target, each.receives))
            read = each.reads >= 0
            parts[each.route.target].append((target[read], each.reads[read], source[read], each.sends[read]))
    by_rank = [part for _, of_rank in sorted(parts.items()) for part in of_rank]
    return WaitEdges(*map(_concatenated, zip((np.empty(0, np.int32),) * 4, *by_rank, strict=True)))


def _together(parts: Sequence[WaitEdges]) -> WaitEdges:
    columns = [(each.ranks, each.numbers, each.other_ranks, each.other_numbers) for each in parts]
    return WaitEdges(*map(_concatenated, zip(*columns, strict=True)))


def _concatenated(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int32), *parts])


def _bounds_in_flight(step: ProgramIndex) -> Iterator[Violation]:
    """No rank has more microbatches between forward and free than its limit."""
    if step.limits is None:
        return
    for rank, (columns, limit) in enumerate(zip(step.columns, step.limits, strict=True)):
        pairs = in_flight(columns)
        for number in np.flatnonzero(pairs > limit).tolist()[:1]:
            message = f"holds {pairs[number]} microbatches in flight; expected at most {limit}"
            yield Violation((rank, number), message)


RULES: tuple[Callable[[ProgramIndex], Iterator[Violation]], ...] = (
    _fits_plan,
    _computes_once,
    _computes_in_order,
    message_rules.each_message_delivered_once,
    message_rules.each_value_received_once,
    model_collective_rules.model_collectives_in_order,
    collective_rules.sync_complete,
    collective_rules.sync_in_order,
    collective_rules.collectives_in_one_order,
    *weight_version_rules.RULES,
    message_rules.sent_after_made,
    message_rules.received_before_read,
    _frees_after_last_use,
    offload_rules.offloads_in_order,
    message_rules.live_slots_not_overwritten,
    result_rules.results_before_wait,
    message_rules.channels_in_order,
    _finishes,
    message_rules.receives_after_dependencies,
    _bounds_in_flight,
)
