"""The rules for collectives and updates: how often each runs in a step, and when."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil
from typing import NamedTuple

import numpy as np

from pipec.ir import WAIT_OF, Instruction, Link, Op, Payload, stages_on
from pipec.ir.columns import COLLECTIVES, OP_CODE, OPS
from pipec.programs.program_index import COMPUTES, ProgramIndex, Violation
from pipec.programs.routes import DeliveredMessages
from pipec.programs.rules import weight_version_rules

_SYNC_OPS = [op for op in OPS if not (op.traits.per_microbatch or op.traits.carries_link)]
_READ_GRADIENTS = (Op.REDUCE_GRAD, Op.GRAD_NORM, Op.UPDATE)
_AFTER = {
    Op.TAIL: (Op.WAIT_GATHER_ROWS,),
    Op.GRAD_NORM: (Op.WAIT_REDUCE_GRAD,),
    Op.CHECK: (Op.GRAD_NORM,),
    Op.UPDATE: (Op.WAIT_REDUCE_GRAD, Op.GRAD_NORM, Op.CHECK, Op.AVERAGE_BUFFERS),
    Op.UNSHARD: (Op.UPDATE,),
}
"""The ops that must end before an op of the same stage starts."""

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)


class CollectiveKey(NamedTuple):
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


def sync_instruction_numbers(step: ProgramIndex) -> Sequence[Mapping[CollectiveKey, list[int]]]:
    """For each rank, the numbers of its instructions that do not belong to a microbatch or a link."""
    of_stream = weight_version_rules.OPS if step.plan.sync_spec.stream else ()
    sync_ops = [op for op in _SYNC_OPS if op not in of_stream]
    found = []
    for columns in step.columns:
        own: dict[CollectiveKey, list[int]] = defaultdict(list)
        for number in columns.numbers_of(*sync_ops).tolist():
            op, stage, bucket = columns.ops[number], columns.stages[number], columns.buckets[number]
            own[CollectiveKey(OPS[op], int(stage), int(bucket))].append(number)
        found.append(own)
    return found


def violations(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """Faults in the fields of a collective or an update."""
    key = CollectiveKey(instruction.op, instruction.stage, instruction.bucket)
    others = (
        *(instruction.microbatch, instruction.peer, instruction.slot),
        *(instruction.segment, instruction.model_collective),
    )
    if instruction.link or any(other != -1 for other in others):
        yield f"{key} names a microbatch, link, peer, slot, segment or model collective; expected none"
    expected = _expected(step, rank)
    if key not in expected:
        some = ", ".join(map(str, expected)) or "none"
        yield f"{key} is not in the plan for rank {rank}; expected {some}"


def _expected(step: ProgramIndex, rank: int) -> Mapping[CollectiveKey, int]:
    """The collectives and updates of a rank, and how often each runs; -1 means any number of times."""
    sync_spec, keys = step.plan.sync_spec, dict[CollectiveKey, int]()
    for stage in stages_on(step.plan.placement, rank):
        if stage in sync_spec.count_stages and sync_spec.runs_microbatches:
            keys[CollectiveKey(Op.SUM_COUNTS, stage)] = 1
        if stage == step.plan.tail_stage and sync_spec.runs_microbatches:
            keys[CollectiveKey(Op.TAIL, stage)] = 1
            if len(step.plan.placement[stage]) > 1:
                keys[CollectiveKey(Op.GATHER_ROWS, stage)] = 1
        if stage in sync_spec.buffer_sync_stages and sync_spec.runs_microbatches:
            keys[CollectiveKey(Op.AVERAGE_BUFFERS, stage)] = 1
        if sync_spec.runs_update and not sync_spec.stream:
            keys[CollectiveKey(Op.UPDATE, stage)] = 1
        rounds = ceil(step.plan.num_microbatches / len(step.plan.placement[stage]))
        for number in sync_spec.buckets_of(stage) if not sync_spec.stream else ():
            bucket = sync_spec.buckets[number]
            if sync_spec.runs_microbatches and not sync_spec.only_gathers:
                keys[CollectiveKey(Op.REDUCE_GRAD, stage, number)] = (
                    rounds if sync_spec.reduces_every_round(bucket) else 1
                )
            if sync_spec.reshards_after_use(bucket):
                often = -1 if sync_spec.runs_microbatches else 0
                keys |= {CollectiveKey(op, stage, number): often for op in (Op.UNSHARD, Op.RESHARD)}
            elif sync_spec.shard and sync_spec.runs_update:
                keys[CollectiveKey(Op.UNSHARD, stage, number)] = 1
    if sync_spec.has_grad_norm:
        keys[CollectiveKey(Op.GRAD_NORM)] = 1
        if sync_spec.may_skip_step:
            keys[CollectiveKey(Op.CHECK)] = 1
    waits = {key._replace(op=WAIT_OF[key.op]): often for key, often in keys.items() if key.op in WAIT_OF}
    return keys | waits


def sync_complete(step: ProgramIndex) -> Iterator[Violation]:
    """Every gradient is reduced once, every stage updates once, and gathered parameters are freed. Refused::

    unshard stage 0 bucket 0, forward stage 0 mb 0, backward stage 0 mb 0, update stage 0
    """
    for rank, own in enumerate(sync_instruction_numbers(step)):
        for key, times in _expected(step, rank).items():
            count = len(own.get(key, ()))
            if times not in (count, -1):
                site = step.probable_site(own.get(key, ()), rank)
                often = "once" if times == 1 else f"{times} times"
                yield Violation(site, f"{key} is there {count} times on rank {rank}; expected {often}")
            if key.op is Op.RESHARD and times:
                yield from _alternates(step, rank, own, key)


def _alternates(
    step: ProgramIndex, rank: int, own: Mapping[CollectiveKey, list[int]], key: CollectiveKey
) -> Iterator[Violation]:
    gathered, dropped = own.get(key._replace(op=Op.UNSHARD), []), own.get(key, [])
    both = sorted([*((number, True) for number in gathered), *((number, False) for number in dropped)])
    if [is_unshard for _, is_unshard in both] != [True, False] * (len(both) // 2) or not both:
        site = step.probable_site([number for number, _ in both], rank)
        counts = f"{len(gathered)} unshard and {len(dropped)} reshard"
        bucket = f"stage {key.stage}, bucket {key.bucket}"
        yield Violation(site, f"{bucket} has {counts} on rank {rank}; expected one after the other")


def sync_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """Gradients are completed, then reduced, then measured for the norm, and then the weights are updated.

    No stage computes before its counts are summed or after its update, nor while its parameters are not
    gathered. Its tail runs between its last forward and its first backward. Refused::

        backward stage 0 mb 0, reduce_grad stage 0 bucket 0, backward stage 0 mb 1, update stage 0
    """
    for rank, own in enumerate(sync_instruction_numbers(step)):
        for key, numbers in own.items():
            for other, at in _before(step, rank, own, key):
                if at > numbers[-1]:
                    yield Violation((rank, numbers[-1]), f"{key} runs before {other} at {at}")
            if key.op is Op.RESHARD:
                yield from _computes_while_gathered(step, rank, own, key)
            if key.op is Op.WAIT_SUM_COUNTS:
                yield from _computes_after(step, rank, numbers[0], key)
            if key.op is Op.TAIL and _has_gradients(step, key.stage):
                yield from _computes_after(step, rank, numbers[0], key, _BACKWARDS)


def _before(
    step: ProgramIndex, rank: int, own: Mapping[CollectiveKey, list[int]], key: CollectiveKey
) -> Iterator[tuple[str, int]]:
    """The instructions that must precede an instruction: a description and a number of each."""
    stages = stages_on(step.plan.placement, rank) if key.op is Op.GRAD_NORM else [key.stage]
    if key.op in (Op.AVERAGE_BUFFERS, Op.GATHER_ROWS, Op.TAIL):
        yield f"the last forward of stage {key.stage}", _last(step, rank, key.stage, (Op.FORWARD,))
    if key.op in _READ_GRADIENTS:
        for stage in stages:
            yield f"the last gradients of stage {stage}", _last_gradient(step, rank, stage, key)
        for each in step.deliveries:
            if each.route.target == rank and _delivers_gradient(step, each.route.link, key, stages):
                yield "the gradients that another stage sends back", _added(step, each)
    sync_spec = step.plan.sync_spec
    if key.op is Op.UNSHARD and sync_spec.reshards_after_use(sync_spec.buckets[key.bucket]):
        return
    for other, numbers in own.items():
        is_of_all = key.op in (Op.GRAD_NORM, Op.CHECK)
        if other.op in _AFTER.get(key.op, ()) and (is_of_all or other.stage in (-1, key.stage)):
            yield str(other), numbers[-1]


def _delivers_gradient(step: ProgramIndex, link: Link, key: CollectiveKey, stages: Sequence[int]) -> bool:
    """Whether a link carries gradients that an instruction for these stages reads."""
    if link.payload is not Payload.WEIGHT_GRADIENT or link.target not in stages:
        return False
    return key.bucket < 0 or not {*link.names}.isdisjoint(step.plan.sync_spec.buckets[key.bucket].names)


def _last(step: ProgramIndex, rank: int, stage: int, ops: Sequence[Op]) -> int:
    """The number of the last compute of a stage on a rank that has one of these ops, or -1."""
    numbers = step.numbers[[OP_CODE[op] for op in ops], stage]
    return int(numbers[:, step.ranks[stage] == rank].max(initial=-1))


def _last_gradient(step: ProgramIndex, rank: int, stage: int, key: CollectiveKey) -> int:
    """The number of the last accumulation of gradients of a stage that an instruction reads, or -1.

    Segments after the one that completes a bucket make no gradients of that bucket.
    """
    columns = step.columns[rank]
    numbers = columns.numbers_of(Op.ACCUMULATE)
    added = (columns.stages[numbers] == stage) & (columns.microbatches[numbers] >= 0)
    if key.op is Op.REDUCE_GRAD and not (bucket := step.plan.sync_spec.buckets[key.bucket]).is_tied:
        added &= columns.segments[numbers] <= bucket.segment
    return int(numbers[added].max(initial=-1))


def _added(step: ProgramIndex, message: DeliveredMessages) -> int:
    """The number of the instruction that adds the gradients of a tied weight: a move, or an accumulation."""
    route, columns = message.route, step.columns[message.route.target]
    if not route.crosses_ranks:
        return int(message.sends[0])
    numbers = columns.numbers_of(Op.ACCUMULATE)
    added = (columns.link_numbers[numbers] == route.number) & (columns.peers[numbers] == route.source)
    return int(numbers[added].max(initial=-1))


def _has_gradients(step: ProgramIndex, stage: int) -> bool:
    """Whether backwards of a stage read what its tail returns."""
    tail = step.plan.stages[stage].tail
    return tail is not None and bool(tail.gradients)


def _computes_after(
    step: ProgramIndex, rank: int, wait: int, key: CollectiveKey, ops: Sequence[Op] = COMPUTES
) -> Iterator[Violation]:
    """The first of the stage's computes with one of ``ops``, if it runs before ``wait``."""
    columns = step.columns[rank]
    computes = columns.numbers_of(*ops)
    computes = computes[columns.stages[computes] == key.stage]
    if computes.size and computes[0] < wait:
        number = int(computes[0])
        yield Violation((rank, number), f"{columns[number].op} of stage {key.stage} runs before {key}")


def _computes_while_gathered(
    step: ProgramIndex, rank: int, own: Mapping[CollectiveKey, list[int]], key: CollectiveKey
) -> Iterator[Violation]:
    columns, tail = step.columns[rank], step.plan.stages[key.stage].tail
    computes = columns.numbers_of(*COMPUTES, *([Op.TAIL] if tail and tail.parameters else []))
    computes = computes[columns.stages[computes] == key.stage]
    gathered, dropped = (np.array(own.get(key._replace(op=op), [])) for op in (Op.WAIT_UNSHARD, Op.RESHARD))
    available = np.searchsorted(gathered, computes) > np.searchsorted(dropped, computes)
    for number in computes[~available].tolist():
        message = f"{columns[number].op} of stage {key.stage} runs while bucket {key.bucket} is not gathered"
        yield Violation((rank, number), message)


def collectives_in_one_order(step: ProgramIndex) -> Iterator[Violation]:
    """Any two ranks start their common collectives in the same order. Refused::

    rank 0: ... reduce_grad stage 0 bucket 0, reduce_grad stage 0 bucket 1
    rank 1: ... reduce_grad stage 0 bucket 1, reduce_grad stage 0 bucket 0
    """
    sequences = [_collectives(step, rank) for rank in range(len(step.columns))]
    pairs = {pair for ranks in step.plan.placement for pair in combinations(sorted(ranks), 2)}
    for one, other in sorted(pairs):
        mine, theirs = (
            [(key, number) for key, number in sequences[rank] if {one, other} <= _members(step, key)]
            for rank in (one, other)
        )
        for (key, number), (another, at) in zip(mine, theirs, strict=False):
            if key != another:
                message = f"{key} meets {another} of rank {other}; ranks start collectives in one order"
                yield Violation((one, number), message, ((other, at),))
        if len(mine) != len(theirs):
            longer, rank = (mine, one) if len(mine) > len(theirs) else (theirs, other)
            key, number = longer[min(len(mine), len(theirs))]
            message = f"{key} waits for rank {one + other - rank}, which has no such"
            yield Violation((rank, number), message)


def _collectives(step: ProgramIndex, rank: int) -> Sequence[tuple[CollectiveKey, int]]:
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
    return [(CollectiveKey(OPS[op], *row), at) for (op, *row), at in zip(rows, numbers.tolist(), strict=True)]


def _members(step: ProgramIndex, key: CollectiveKey) -> set[int]:
    """The ranks that take part in a collective."""
    return {*range(len(step.columns))} if key.op is Op.GRAD_NORM else {*step.plan.placement[key.stage]}
