"""The rules of computes: each once and in order, and nothing read after it was freed."""

from collections.abc import Iterator, Sequence

import numpy as np

from pipec.ir import Op, rank_of
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints, constant, entries, taken
from pipec.programs.program_index import BACKWARDS, COMPUTES, ProgramIndex, Violation


def _segments_in_order(step: ProgramIndex) -> Iterator[Violation]:
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


def computes_once(step: ProgramIndex) -> Iterator[Violation]:
    """Each stage runs each phase exactly once per microbatch, its backward whole or in two halves. Refused::

    forward stage 0 mb 0, backward stage 0 mb 0, backward_weight stage 0 mb 0
    """
    every = np.arange(len(step.plan.placement))[:, None]
    kinds = np.isin(every, list(step.recompute)).astype(np.int64)
    for op in COMPUTES:
        kinds = kinds * 3 + np.minimum(step.counts[OP_CODE[op]], 2)
    for place in sorted(np.unique(kinds, return_index=True)[1].tolist()):
        stage, microbatch = divmod(place, step.plan.num_microbatches)
        for ops, miscount in _miscounts(step, stage, microbatch):
            found = [int(step.numbers[OP_CODE[op], stage, microbatch]) for op in ops]
            seen = [number for number in found if number >= 0]
            rank = rank_of(step.plan.placement, stage, microbatch)
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


def computes_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """Forward, then recompute, then backward; the input half before the weight half. Refused::

    forward stage 0 mb 0, backward_weight stage 0 mb 0, backward_input stage 0 mb 0
    """
    yield from _segments_in_order(step)
    latest = step.numbers[OP_CODE[COMPUTES[0]]].copy()
    latest_op = np.full_like(latest, OP_CODE[COMPUTES[0]])
    for op in COMPUTES[1:]:
        numbers = step.numbers[OP_CODE[op]]
        begins, runs = step.begins[OP_CODE[op]], numbers >= 0
        for stage, microbatch in np.argwhere(runs & (begins < latest)).tolist():
            earlier, first = OPS[latest_op[stage, microbatch]], latest[stage, microbatch]
            where = f"of stage {stage}, microbatch {microbatch}"
            site = rank_of(step.plan.placement, stage, microbatch), int(begins[stage, microbatch])
            yield Violation(site, f"{op} {where} runs before its {earlier} at {first}")
        latest[runs], latest_op[runs] = numbers[runs], OP_CODE[op]


_USES_MICROBATCH = {op for op in OPS if op.traits.per_microbatch or op.traits.carries_link} | {Op.PRECOMPUTE}
"""The ops that use what a stage keeps for a microbatch."""


def frees_after_last_use(step: ProgramIndex) -> Iterator[Violation]:
    """Each stage and microbatch is freed exactly once, and not used afterwards. Refused::

    forward stage 0 mb 0, free stage 0 mb 0, backward stage 0 mb 0
    """
    freed = step.numbers[OP_CODE[Op.FREE]]
    for rank, columns in enumerate(step.columns):
        late: list[tuple[int, int]] = []
        for op, numbers in step.groups[rank]:
            microbatches, stages = taken(columns.microbatches, numbers), taken(columns.stages, numbers)
            if op not in _USES_MICROBATCH or microbatches[0] < 0 or stages[0] < 0:
                continue
            using = [stages]
            if op is Op.MOVE:
                link = columns.links[columns.link_numbers[numbers[0]]]
                using.append(constant(link.source, numbers.size))
            for used in using:
                at = entries(freed, used, microbatches)
                wrong = np.flatnonzero((at >= 0) & (at < numbers))[:1]
                late += zip(numbers[wrong].tolist(), used[wrong].tolist(), strict=True)
        for number, stage in sorted(late):
            microbatch = int(columns.microbatches[number])
            where = f"stage {stage}, microbatch {microbatch}"
            message = f"needs {where}, which was freed at {freed[stage, microbatch]}"
            yield Violation((rank, number), f"{columns[number].op} {message}")
    for stage, microbatch in np.argwhere(freed < 0).tolist():
        site = step.probable_site((), int(step.ranks[stage, microbatch]), stage, microbatch)
        yield Violation(site, f"stage {stage}, microbatch {microbatch} is never freed")
