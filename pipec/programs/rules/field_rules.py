"""The rules for the fields of one instruction: each fits the plan, from the stage to the segment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from pipec.ir import WAIT_OF, Instruction, Op, OpKind, Payload, count_ranks, rank_of, stages_on
from pipec.ir.columns import InstructionColumns, Ints, constant, is_constant
from pipec.ir.text_format import format_link
from pipec.programs.program_index import ProgramIndex, Violation
from pipec.programs.routes import rank_pairs
from pipec.programs.rules import sync_spec_rules

STREAM_OPS = (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, Op.CHECK, Op.STAGE_NORM, Op.STASH, Op.UPDATE, Op.PAUSE)
"""The ops of a stream that name the first microbatch of a round."""


def _violations(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of an instruction."""
    traits = instruction.op.traits
    if instruction.op is Op.ACCUMULATE and instruction.link:
        return _tied_gradient_misfits(step, rank, instruction)
    if traits.carries_link:
        return _transfer_misfits(step, rank, instruction)
    if traits.per_microbatch:
        return _compute_misfits(step, rank, instruction)
    if instruction.op is Op.PRECOMPUTE:
        return _precompute_misfits(step, rank, instruction)
    if step.plan.sync_spec.stream and instruction.op in STREAM_OPS:
        return _stream_misfits(step, rank, instruction)
    return _sync_misfits(step, rank, instruction)


def _first_of_each_kind(step: ProgramIndex, rank: int) -> Sequence[int]:
    """The first instruction of each kind. If one instruction of a kind fits the plan, all of them do.

    They may differ in their microbatch and slot, as long as both are within the plan's bounds or both are
    not. Only fields that differ in this program distinguish kinds.
    """
    columns, found = step.columns[rank], list[int]()
    fields = _distinguishing_fields(step, columns)
    for _, own in step.groups[rank]:
        kinds, count = np.zeros(own.size, np.int64), 1
        for field, low, high in fields:
            column = field.take(own)
            lowest, highest = max(int(column.min()), low), min(int(column.max()), high)
            if lowest < highest:
                kinds = kinds * (highest - lowest + 1) + (np.clip(column, lowest, highest) - lowest)
                count *= highest - lowest + 1
            if count > _MOST_KINDS:
                kinds = np.unique(kinds, return_inverse=True)[1]
                count = int(kinds.max()) + 1
        if count == 1:
            found.append(int(own[0]))
            continue
        firsts = np.full(count, -1)
        firsts[kinds[::-1]] = own[::-1]
        found += firsts[firsts >= 0].tolist()
    return sorted(found)


_MOST_KINDS = 2**16
"""The size of a table that distinguishes kinds. If there might be more kinds, they are renumbered."""


def _distinguishing_fields(
    step: ProgramIndex, columns: InstructionColumns
) -> Sequence[tuple[Ints, int, int]]:
    """The columns that distinguish kinds of one op, link and peer: each with the bounds beyond which numbers
    count as equal.
    """
    fields = [
        (columns.stages, -2, len(step.plan.placement)),
        (_intervals(columns.microbatches, -1, 0, step.plan.num_microbatches), 0, 3),
        (_intervals(columns.slots, -1, 0), 0, 2),
        (columns.buckets, -2, len(step.plan.sync_spec.buckets)),
        (columns.segments, -2, max(step.segments.values(), default=0)),
        (columns.model_collectives, -2, max(map(len, step.model_collectives.values()), default=0)),
    ]
    if max(map(len, step.plan.placement)) > 1:
        fields.append((_own_rank(step, columns), -1, len(step.programs)))
    return [each for each in fields if not is_constant(each[0])]


def _intervals(numbers: Ints, *bounds: int) -> Ints:
    """For each number, how many of the ``bounds`` it has reached."""
    lowest, highest = np.searchsorted(bounds, [numbers.min(initial=0), numbers.max(initial=0)], "right")
    if lowest == highest:
        return constant(lowest, numbers.size)
    found = np.zeros(numbers.size, np.int8)
    for bound in bounds:
        found += numbers >= bound
    return found


def _own_rank(step: ProgramIndex, columns: InstructionColumns) -> Ints:
    """The rank that should run the stage and microbatch of each instruction; -1 where they do not exist."""
    stages, microbatches = columns.stages, columns.microbatches
    valid = (stages >= 0) & (stages < len(step.plan.placement))
    valid &= (microbatches >= 0) & (microbatches < step.plan.num_microbatches)
    found: Ints = np.full(len(columns), -1, np.int32)
    found[valid] = step.ranks[stages[valid], microbatches[valid]]
    return found


def _compute_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in a compute, a free, or a collective of the model."""
    op, stage, microbatch = instruction.op, instruction.stage, instruction.microbatch
    if not 0 <= stage < len(step.plan.placement) or rank_of(step.plan.placement, stage, microbatch) != rank:
        rank_stages = stages_on(step.plan.placement, rank)
        yield f"{op} names stage {stage}; expected a stage of this rank: {rank_stages}"
    if not 0 <= microbatch < step.plan.num_microbatches:
        yield f"{op} names microbatch {microbatch}; expected 0 to {step.plan.num_microbatches - 1}"
    if instruction.link or not instruction.peer == instruction.slot == instruction.bucket == -1:
        yield f"{op} carries a link, peer, slot or bucket; expected none"
    if (op.traits.awaits or op).traits.kind is OpKind.COLLECTIVE:
        yield from _model_collective_misfits(step, instruction)
        return
    if instruction.model_collective != -1:
        yield f"{op} names model collective {instruction.model_collective}; expected none"
    if op is Op.RECOMPUTE and not (step.trains and stage in step.recompute):
        yield f"{op} of stage {stage}, which keeps what a backward reads; expected none"
    if (op.traits.awaits or op).traits.kind is OpKind.COPY and stage not in step.offload:
        yield f"{op} of stage {stage}, which keeps what it saves; expected none"
    if op is Op.ACCUMULATE:
        return
    num_segments = step.num_segments(op, stage) if op.traits.kind is OpKind.COMPUTE else 1
    if instruction.segment != -1 and (num_segments == 1 or not 0 <= instruction.segment < num_segments):
        expected = f"0 to {num_segments - 1}, or none for all of them" if num_segments > 1 else "none"
        yield f"{op} names segment {instruction.segment}; expected {expected}"


def _transfer_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    op, traits, link = instruction.op, instruction.op.traits, instruction.link
    if link is None or link not in step.link_set:
        yield f"{op} carries {format_link(link) if link else 'no link'}; expected a link of the plan"
    assert link is not None
    ways: Sequence[tuple[int, int]]
    if link.payload is Payload.MICROBATCH_RESULT:
        source = rank_of(step.plan.placement, link.source, instruction.microbatch)
        ways = [(source, target) for target in range(len(step.programs)) if target != source]
    elif link.payload.per_microbatch:
        stages = link.source, link.target
        source, target = (rank_of(step.plan.placement, stage, instruction.microbatch) for stage in stages)
        ways = [(source, target)]
    else:
        ways = rank_pairs(link, step.plan.placement, step.plan.num_microbatches)
    peer = instruction.peer if traits.has_peer else rank
    receives = op in (Op.RECV, Op.WAIT_RECV)
    start, end = (peer, rank) if receives else (rank, peer)
    if (start, end) not in ways:
        expected = " or ".join(f"{one} to {other}" for one, other in ways)
        yield f"{op} takes {format_link(link)} from rank {start} to {end}; expected from rank {expected}"
    if traits.has_peer == (start == end) or traits.has_peer == (instruction.peer == -1):
        yield f"{op} from rank {start} to {end}; expected a send and a recv, or a move without a peer"
    stage = link.target if receives or op is Op.MOVE else link.source
    if instruction.stage != stage:
        yield f"{op} of {format_link(link)} names stage {instruction.stage}; expected {stage}"
    if instruction.microbatch not in step.microbatches(link):
        allowed = step.microbatches(link)
        yield f"{op} names microbatch {instruction.microbatch}; expected {allowed[0]} to {allowed[-1]}"
    for word in ("bucket", "segment"):
        if (number := getattr(instruction, word)) != -1:
            yield f"{op} names {word} {number}; expected none"
    if (instruction.slot >= 0) != (traits.fills_slot and link.payload.feeds_compute):
        yield f"{op} names slot {instruction.slot}; only messages of a microbatch have a slot, others -1"


def _tied_gradient_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the accumulation of gradients that another rank has sent: its receive would have none."""
    received = replace(instruction, op=Op.RECV)
    if instruction.link and instruction.link.payload is not Payload.WEIGHT_GRADIENT:
        yield f"accumulate carries {format_link(instruction.link)}; expected gradients of a tied weight"
    yield from _transfer_misfits(step, rank, received)


def _model_collective_misfits(step: ProgramIndex, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a model collective, except its stage and its microbatch."""
    stage, number = instruction.stage, instruction.model_collective
    op = instruction.op.traits.awaits or instruction.op
    model_collectives = step.model_collectives.get(stage, ())
    if not 0 <= number < len(model_collectives) or model_collectives[number].op is not op:
        some = ", ".join(f"{each.op}, model_collective {k}" for k, each in enumerate(model_collectives))
        expected = some or "none"
        yield f"{op}, model collective {number} is not in the plan for stage {stage}; expected {expected}"
    if instruction.segment != -1:
        yield f"{op} names segment {instruction.segment}; expected none"


def _precompute_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a ``precompute``."""
    plan, stage, microbatch = step.plan, instruction.stage, instruction.microbatch
    if stage not in stages_on(plan.placement, rank) or not plan.stages[stage].precomputed_phases:
        yield f"precompute names stage {stage}; expected one of this rank with something to precompute"
    if not (0 <= microbatch < plan.num_microbatches if plan.sync_spec.stream else microbatch == -1):
        yield f"precompute names microbatch {microbatch}; expected one in a stream, and none in a step"
    others = (instruction.peer, instruction.slot, instruction.bucket, instruction.segment)
    if instruction.link or any(other != -1 for other in (*others, instruction.model_collective)):
        yield "precompute names a link, peer, slot, bucket, segment or model collective; expected none"


def _stream_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a sum, an update or a pause of a stream."""
    op, stage, microbatch = instruction.op, instruction.stage, instruction.microbatch
    if op is Op.PAUSE:
        if stage != -1 or not 0 <= microbatch < step.plan.num_microbatches:
            expected = f"no stage, and a microbatch below {step.plan.num_microbatches}"
            yield f"pause names stage {stage}, microbatch {microbatch}; expected {expected}"
    elif (
        stage not in stages_on(step.plan.placement, rank) or not 0 <= microbatch < step.plan.num_microbatches
    ):
        expected = f"a stage of this rank, and a microbatch below {step.plan.num_microbatches}"
        yield f"{op} names stage {stage}, microbatch {microbatch}; expected {expected}"
    others = instruction.peer, instruction.slot, instruction.segment, instruction.model_collective
    if instruction.link or any(other != -1 for other in others):
        yield f"{op} carries a link, peer, slot, segment or model collective; expected none"
    is_sum = op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)
    buckets = step.plan.sync_spec.buckets_of(stage) if is_sum else [-1]
    if instruction.bucket not in buckets:
        some = ", ".join(map(str, buckets)) or "none, as the stage has no replicas"
        yield f"{op} of stage {stage} names bucket {instruction.bucket}; expected {some}"


class SyncKey(NamedTuple):
    """Identifies a collective or an update: instructions of different ranks with equal keys are one."""

    op: Op
    stage: int = -1
    bucket: int = -1
    model_collective: int = -1
    round: int = -1

    def __str__(self) -> str:
        of = f" of stage {self.stage}" if self.stage >= 0 else ""
        numbers = {"bucket": self.bucket, "model collective": self.model_collective, "round": self.round}
        named = (f"{word} {number}" for word, number in numbers.items() if number >= 0)
        return ", ".join([f"{self.op}{of}", *named])


def _sync_misfits(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a collective or an update."""
    key = SyncKey(instruction.op, instruction.stage, instruction.bucket)
    others = (
        *(instruction.microbatch, instruction.peer, instruction.slot),
        *(instruction.segment, instruction.model_collective),
    )
    if instruction.link or any(other != -1 for other in others):
        yield f"{key} names a microbatch, link, peer, slot, segment or model collective; expected none"
    expected = expected_sync(step, rank)
    if key not in expected:
        some = ", ".join(map(str, expected)) or "none"
        yield f"{key} is not in the plan for rank {rank}; expected {some}"


def expected_sync(step: ProgramIndex, rank: int) -> Mapping[SyncKey, int]:
    """The collectives and updates of a rank, and how often each runs; -1 means any number of times."""
    sync_spec, keys = step.plan.sync_spec, dict[SyncKey, int]()
    for stage in stages_on(step.plan.placement, rank):
        if stage in sync_spec.count_stages and sync_spec.runs_microbatches:
            keys[SyncKey(Op.SUM_COUNTS, stage)] = 1
        if stage == step.plan.tail_stage and sync_spec.runs_microbatches:
            keys[SyncKey(Op.TAIL, stage)] = 1
            if len(step.plan.placement[stage]) > 1:
                keys[SyncKey(Op.GATHER_ROWS, stage)] = 1
        if stage in sync_spec.buffer_sync_stages and sync_spec.runs_microbatches:
            keys[SyncKey(Op.AVERAGE_BUFFERS, stage)] = 1
        if sync_spec.runs_update and not sync_spec.stream:
            keys[SyncKey(Op.UPDATE, stage)] = 1
        rounds = ceil(step.plan.num_microbatches / len(step.plan.placement[stage]))
        for number in sync_spec.buckets_of(stage) if not sync_spec.stream else ():
            bucket = sync_spec.buckets[number]
            if sync_spec.runs_microbatches and not sync_spec.only_gathers:
                keys[SyncKey(Op.REDUCE_GRAD, stage, number)] = (
                    rounds if sync_spec.reduces_every_round(bucket) else 1
                )
            if sync_spec.reshards_after_use(bucket):
                often = -1 if sync_spec.runs_microbatches else 0
                keys |= {SyncKey(op, stage, number): often for op in (Op.UNSHARD, Op.RESHARD)}
            elif sync_spec.shard and sync_spec.runs_update:
                keys[SyncKey(Op.UNSHARD, stage, number)] = 1
    if sync_spec.has_grad_norm:
        keys[SyncKey(Op.GRAD_NORM)] = 1
        if sync_spec.may_skip_step:
            keys[SyncKey(Op.CHECK)] = 1
    waits = {key._replace(op=WAIT_OF[key.op]): often for key, often in keys.items() if key.op in WAIT_OF}
    return keys | waits


def fits_plan(step: ProgramIndex) -> Iterator[Violation]:
    """Programs are of the plan's ranks, and every field of every instruction fits the plan.

    Refused in a plan of two stages with two microbatches, where rank 0 has stage 0::

        rank 0: forward stage 1 mb 0, forward stage 0 mb 2, send stage 0 mb 0 to rank 0
    """
    ranks = [program.rank for program in step.programs]
    last = count_ranks(step.plan.placement) - 1
    if ranks != list(range(last + 1)):
        yield Violation(None, f"programs are of ranks {ranks}; expected one for each of ranks 0 to {last}")
    for program in step.programs:
        if program.period:
            message = f"the program of rank {program.rank} repeats; expected that of a single step"
            yield Violation(None, message)
    for link in step.plan.links:
        ends = (link.source,) if link.payload.is_result else (link.source, link.target)
        if not all(0 <= stage < len(step.plan.placement) for stage in ends):
            message = f"{format_link(link)} names a stage beyond the plan's {len(step.plan.placement)}"
            yield Violation(None, message)
    plan = step.plan
    for misfit in sync_spec_rules.violations(plan.sync_spec, plan.placement, plan.links, step.segments):
        yield Violation(None, misfit)
    for rank, columns in enumerate(step.columns):
        for number in _first_of_each_kind(step, rank):
            for misfit in _violations(step, rank, columns[number]):
                yield Violation((rank, number), misfit)
