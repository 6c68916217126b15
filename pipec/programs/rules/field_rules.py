"""The rule of fields: each instruction names what the row of its op says, and what the plan has of it."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Op, OpKind, count_ranks
from pipec.ir.columns import FIELDS, InstructionColumns, Ints, entries, equal_groups, is_constant
from pipec.ir.program import CELLS
from pipec.ir.text_format import format_link
from pipec.programs.cell_accesses import WHERE, RankCells
from pipec.programs.messages import once_peers
from pipec.programs.program_index import ProgramIndex, Violation, describe
from pipec.programs.rules import sync_spec_rules

_Misfit = tuple[NDArray[np.bool_], str, object]
"""Where instructions of one op name a wrong number, its field, and what is expected: of each, or of all."""


def fits_plan(step: ProgramIndex) -> Iterator[Violation]:
    """Programs are of the plan's ranks, and every field of every instruction fits the plan.

    Refused in a plan of two stages with two microbatches, where rank 0 has stage 0::

        rank 0: forward stage 1 mb 0, forward stage 0 mb 2, send stage 0 mb 0 to rank 0
    """
    plan, ranks = step.plan, [program.rank for program in step.programs]
    last = count_ranks(plan.placement) - 1
    if ranks != list(range(last + 1)):
        yield Violation(None, f"programs are of ranks {ranks}; expected one for each of ranks 0 to {last}")
    for program in step.programs:
        if program.period:
            message = f"the program of rank {program.rank} repeats; expected that of a single step"
            yield Violation(None, message)
    for link in plan.links:
        ends = (link.source,) if link.is_broadcast else (link.source, link.target)
        if not all(0 <= stage < len(plan.placement) for stage in ends):
            message = f"{format_link(link)} names a stage beyond the plan's {len(plan.placement)}"
            yield Violation(None, message)
    for misfit in sync_spec_rules.violations(plan.sync_spec, plan.placement, plan.links, step.segments):
        yield Violation(None, misfit)
    for rank, columns in enumerate(step.columns):
        cells = RankCells(step, rank, columns)
        for op, numbers in columns.numbers_by_op.items():
            own = columns.taken(numbers)
            for wrong, field, expected in _misfits(cells, op, own):
                if wrong.any():
                    place = int(wrong.argmax())
                    wanted = expected[place] if isinstance(expected, np.ndarray) else expected
                    message = f"{_found(op, field, own, place)}; expected {wanted}"
                    yield Violation((rank, int(numbers[place])), message)
            yield from _without_cell(cells, op, own, numbers)


def _found(op: Op, field: str, own: InstructionColumns, place: int) -> str:
    if field == "link":
        link = own[place].link
        return f"{op} carries {format_link(link) if link else 'no link'}"
    where = f" of {format_link(link)}" if (link := own[place].link) else ""
    return f"{op}{where} names {field.replace('_', ' ')} {own.columns[FIELDS.index(field)][place]}"


def _misfits(cells: RankCells, op: Op, own: InstructionColumns) -> Iterator[_Misfit]:
    """The fields of the instructions of an op. Each may rely on those before it."""
    step, plan = cells.step, cells.step.plan
    named = {field.rstrip("?"): field for field in op.traits.fields.split()}
    for field, column in zip(FIELDS[1:], own.columns[1:], strict=True):
        if field not in named:
            yield column[: 1 if is_constant(column) else None] != -1, field, "none"
    stages, some_stage = own.stages, int(own.stages[0])
    is_whole: NDArray[np.bool_] | bool = "microbatch" in op.traits.fields.split() or cells.stream is not None
    if "link" in named:
        is_linked = own.link_numbers >= 0
        yield from _link_misfits(cells, op, own, is_linked)
        is_whole = step.links_with("activation/gradient/microbatch_result")[own.link_numbers]
        if op is Op.ACCUMULATE:
            is_whole = ~is_linked
    if "stage" in named and named.get("link") != "link":
        is_named = named["stage"] == "stage" or cells.stream is not None
        allowed = [*cells.stages] if is_named else [-1]
        is_own = np.logical_or.reduce([stages == stage for stage in allowed])
        if "link" in named:
            is_own |= is_linked
        yield ~is_own, "stage", f"a stage of this rank: {allowed}" if is_named else "none"
    if "microbatch" in named:
        yield from _microbatch_misfits(cells, op, own, is_whole)
    if "link" in named:
        yield from _peer_misfits(cells, op, own, is_linked)
    if "bucket" in named:
        of_bucket = np.array([*(bucket.stage for bucket in plan.sync_spec.buckets), -1])
        known = (own.buckets >= 0) & (own.buckets < len(plan.sync_spec.buckets))
        is_own = known & (of_bucket[np.where(known, own.buckets, -1)] == stages)
        yield ~is_own, "bucket", [*plan.sync_spec.buckets_of(some_stage)] or "none"
    if op.traits.kind is OpKind.COMPUTE and not (is_constant(own.segments) and own.segments[0] == -1):
        counts = np.array([step.num_segments(op, stage) for stage in range(len(plan.placement))])[stages]
        fits = (own.segments == -1) | ((counts > 1) & (own.segments >= 0) & (own.segments < counts))
        yield ~fits, "segment", f"one of {counts.max()}" if counts.max() > 1 else "none"
    if "model_collective" in named:
        of_stage = step.model_collectives(some_stage)
        some = ", ".join(f"{each.op}, model collective {k}" for k, each in enumerate(of_stage))
        pairs = zip(stages.tolist(), own.model_collectives.tolist(), strict=True)
        fits = np.array([_has_collective(step, op.traits.awaits or op, *pair) for pair in pairs])
        yield ~fits, "model_collective", some or "none"
    if "version" in named:
        yield from _version_misfits(cells, op, own)


def _has_collective(step: ProgramIndex, op: Op, stage: int, number: int) -> bool:
    of_stage = step.model_collectives(stage)
    return 0 <= number < len(of_stage) and of_stage[number].op is op


def _link_misfits(
    cells: RankCells, op: Op, own: InstructionColumns, is_linked: NDArray[np.bool_]
) -> Iterator[_Misfit]:
    """Links of the plan, and the stage that sends or receives them."""
    step, links = cells.step, own.link_numbers
    is_known = links < len(step.plan.links)
    yield ~is_known if op is Op.ACCUMULATE else ~(is_known & is_linked), "link", "a link of the plan"
    if op is Op.ACCUMULATE:
        yield is_linked & ~step.links_with("weight_gradient")[links], "link", "gradients of a tied weight"
        yield is_linked & (own.segments != -1), "segment", "none"
    ends = (step.sources if op is Op.SEND else step.targets)[links]
    yield is_linked & (own.stages != ends), "stage", ends


def _microbatch_misfits(
    cells: RankCells, op: Op, own: InstructionColumns, is_whole: NDArray[np.bool_] | bool
) -> Iterator[_Misfit]:
    """Microbatches of the plan that the rank runs, or firsts of a round; none where not ``is_whole``."""
    microbatches, last = own.microbatches, cells.step.plan.num_microbatches - 1
    yield is_whole & ((microbatches < 0) | (microbatches > last)), "microbatch", f"0 to {last}"
    if is_whole is not True:
        yield ~np.asarray(is_whole) & (microbatches != -1), "microbatch", "none"
    if op.traits.per_microbatch:
        is_other = entries(cells.step.ranks, own.stages, microbatches) != cells.rank
        yield is_whole & is_other, "microbatch", f"one that rank {cells.rank} runs"
    elif cells.stream and "link" not in op.traits.fields and op is not Op.PRECOMPUTE:
        rest = microbatches % cells.round_sizes[own.stages]
        yield rest != 0, "microbatch", "the first of a round"


def _peer_misfits(
    cells: RankCells, op: Op, own: InstructionColumns, is_linked: NDArray[np.bool_]
) -> Iterator[_Misfit]:
    """The rank at the other end of a message, and that this rank is at its own; and the slot."""
    step, plan, rank = cells.step, cells.step.plan, cells.rank
    links, microbatches, peers = own.link_numbers, own.microbatches, own.peers
    feeds, sends = step.links_with("activation/gradient")[links], op in (Op.SEND, Op.MOVE)
    if "slot" in op.traits.fields:
        yield (own.slots >= 0) != feeds, "slot", np.where(feeds, "a slot", "none")
    if not is_linked.any():
        yield peers != -1, "peer", "none"
        return
    ends = step.sources[links], step.targets[links]
    sources, targets = (
        entries(step.ranks, end, microbatches) if feeds.all() else step.ranks[end, microbatches]
        for end in ends
    )
    here, there = (sources, targets) if sends else (targets, sources)
    yield feeds & (here != rank), "microbatch", f"one that rank {rank} {'makes' if sends else 'reads'}"
    if op is Op.MOVE:
        yield feeds & (there != rank), "stage", "one on another rank: a send"
    else:
        yield feeds & (peers != there), "peer", there
        yield is_linked & ((peers < 0) | (peers == rank)), "peer", "another rank, or a move"
    if feeds.all():
        return
    yield ~is_linked & (peers != -1), "peer", "none"
    is_result = step.links_with("microbatch_result")[links]
    yield is_result & sends & (sources != rank), "microbatch", f"one that rank {rank} makes"
    yield is_result & (peers != sources) & (not sends), "peer", sources
    yield peers >= len(step.columns), "peer", f"one of {len(step.columns)} ranks"
    for number in np.unique(links[is_linked & ~feeds & ~is_result]).tolist():
        found = once_peers(plan.links[number], plan.placement, plan.num_microbatches, rank)
        allowed = found[0 if sends else 1]
        is_known = np.isin(rank if op is Op.MOVE else peers, allowed)
        yield (links == number) & ~is_known, "peer", f"one of {allowed.tolist()}"


def _version_misfits(cells: RankCells, op: Op, own: InstructionColumns) -> Iterator[_Misfit]:
    """In a stream, computes read the specified version, an update makes that of its round, a stash keeps it.

    Refused::

        forward stage 1 mb 1 version 0, update stage 1 makes version 1, backward stage 1 mb 1 version 1
    """
    if cells.stream is None:
        yield own.versions != -1, "version", "none"
    elif op is not Op.PRECOMPUTE:
        expected = own.microbatches // cells.round_sizes[own.stages] + (op is Op.UPDATE)
        if op.phase:
            expected = cells.step.read_versions[own.stages, own.microbatches]
        yield own.versions != expected, "version", expected


def _without_cell(cells: RankCells, op: Op, own: InstructionColumns, numbers: Ints) -> Iterator[Violation]:
    """Instructions that change no cell that the plan has."""
    changed = [
        cell
        for cell, event, _ in op.traits.effect_parts
        if event not in ("read", "close", "use") and event in cells.life(cell).events
    ]
    if not all(cell in WHERE for cell in changed):
        return
    for group in equal_groups(own.stages, own.buckets):
        stage, bucket = int(own.stages[group[0]]), int(own.buckets[group[0]])
        if not any(cells.exists(each, bucket if CELLS[each][0] == "bucket" else stage) for each in changed):
            message = f"{describe(own[int(group[0])])} is not in the plan for rank {cells.rank}"
            yield Violation((cells.rank, int(numbers[group[0]])), f"{message}; expected none")
