"""The rules for asynchronous schedules: the versions that computes read, and the updates between them.

Every stage updates as soon as the gradients of a round, or of a mini-batch, are summed. ``RULES`` prove that
each microbatch reads the version that ``Stream`` specifies, the same in forward and backward; that sums and
updates come in the order of mini-batches, equally on all replicas; and that versions are there when they are
read. So no stage needs more versions than ``Stream.max_live_versions``: before the gradients of a microbatch
are made, a stage has made no update that uses them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from pipec.ir import (
    GRADIENT_PHASES,
    Instruction,
    Op,
    Payload,
    Stream,
    VersionPolicy,
    replica_counts,
    stages_on,
)
from pipec.ir.columns import OP_CODE, Ints, constant, taken
from pipec.programs.program_index import ProgramIndex, Violation

_NAME_VERSIONS = (Op.PRECOMPUTE, Op.STASH, Op.UPDATE)
_PREPARING = (Op.CHECK, Op.STAGE_NORM, Op.STASH)
OPS = (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, *_PREPARING, Op.UPDATE, Op.PAUSE)
"""The ops at the end of each round."""


def violations(step: ProgramIndex, rank: int, instruction: Instruction) -> Iterator[str]:
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
    if instruction.link or not instruction.peer == instruction.slot == instruction.segment == -1:
        yield f"{op} carries a link, peer, slot or segment; expected none"
    is_sum = op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)
    buckets = step.plan.sync_spec.buckets_of(stage) if is_sum else [-1]
    if instruction.bucket not in buckets:
        some = ", ".join(map(str, buckets)) or "none, as the stage has no replicas"
        yield f"{op} of stage {stage} names bucket {instruction.bucket}; expected {some}"


def versions_as_specified(step: ProgramIndex) -> Iterator[Violation]:
    """Each compute reads the version that the stream specifies, backward as forward. Others read none.

    Refused::

        forward stage 0 mb 1 version 0, update stage 0 makes version 1, backward stage 0 mb 1 version 1
    """
    stream = step.plan.sync_spec.stream
    for rank, columns in enumerate(step.columns):
        computes = columns.compute_numbers
        others = columns.versions != -1
        others[computes] = False
        others[columns.numbers_of(*_NAME_VERSIONS) if stream else []] = False
        for number in np.flatnonzero(others).tolist():
            message = f"{columns[number].op} names version {columns.versions[number]}; expected none"
            yield Violation((rank, number), message)
        if stream is None:
            expected = constant(-1, computes.size)
        else:
            replicas = replica_counts(step.plan.placement)
            pairs = zip(
                columns.microbatches[computes].tolist(), columns.stages[computes].tolist(), strict=True
            )
            expected = np.array([stream.version(*pair, replicas) for pair in pairs], np.int64)
        for place in np.flatnonzero(taken(columns.versions, computes) != expected).tolist():
            number = int(computes[place])
            found = f"reads version {columns.versions[number]}; expected {expected[place]}"
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            yield Violation((rank, number), f"{columns[number].op} of {where} {found}")


def updates_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """A stage makes version after version: first the gradients of a round, then their sums, then the update.

    All replicas of a stage do the same, including those without a microbatch in the last round. Refused::

        backward stage 0 mb 0, update stage 0 makes version 1, reduce_grad stage 0 bucket 0
    """
    stream = step.plan.sync_spec.stream
    if stream is None:
        return
    replicas = replica_counts(step.plan.placement)
    for stage, ranks in enumerate(step.plan.placement):
        size = stream.microbatches_per_update(stage, replicas)
        for rank in ranks:
            yield from _not_round_by_round(step, rank, stage, size)
            yield from _wrong_gradients(step, rank, stage, size)
            yield from _unprepared(step, rank, stage)


def _not_round_by_round(step: ProgramIndex, rank: int, stage: int, size: int) -> Iterator[Violation]:
    """Updates and sums of a stage that are missing, repeated or out of order."""
    columns, count = step.columns[rank], -(-step.plan.num_microbatches // size)
    sums = product(step.plan.sync_spec.buckets_of(stage), (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD))
    for bucket, op in [(-1, Op.UPDATE), *sums]:
        numbers = _numbers(step, rank, stage, op, bucket)
        if len(numbers) != count:
            what = (
                f"bucket {bucket} of stage {stage} is summed" if bucket >= 0 else f"stage {stage} is updated"
            )
            message = f"{what} {len(numbers)} times; expected {count}"
            yield Violation(step.probable_site(numbers, rank), message)
        for made, number in enumerate(numbers, start=1):
            if op is Op.UPDATE and columns.versions[number] != made:
                message = f"update of stage {stage} makes version {columns.versions[number]}; expected {made}"
                yield Violation((rank, number), message)
            if columns.microbatches[number] != (made - 1) * size:
                found = f"names microbatch {columns.microbatches[number]}; expected {(made - 1) * size}"
                yield Violation((rank, number), f"{op} {made} of stage {stage} {found}")


def _wrong_gradients(step: ProgramIndex, rank: int, stage: int, size: int) -> Iterator[Violation]:
    """Updates that do not use exactly the gradients of their own round."""
    updates, buckets = _numbers(step, rank, stage, Op.UPDATE), step.plan.sync_spec.buckets_of(stage)
    for bucket in buckets:
        sums = _numbers(step, rank, stage, Op.REDUCE_GRAD, bucket)
        ends = _numbers(step, rank, stage, Op.WAIT_REDUCE_GRAD, bucket)
        yield from _uses_others(step, rank, stage, size, sums)
        for version, (summed, updated) in enumerate(zip(ends, updates, strict=True), start=1):
            if updated < summed:
                what = f"version {version} of stage {stage} is made before bucket {bucket} is summed"
                yield Violation((rank, updated), f"{what} for it at {summed}")
            if version < len(sums) and sums[version] < updated:
                what = f"bucket {bucket} of stage {stage} is summed for version {version + 1}"
                message = f"{what} before version {version} is made at {updated}"
                yield Violation((rank, sums[version]), message)
    if not buckets:
        yield from _uses_others(step, rank, stage, size, updates)


def _unprepared(step: ProgramIndex, rank: int, stage: int) -> Iterator[Violation]:
    """Updates without the check of their gradients, or without the norm by which they are clipped."""
    sync_spec, updates = step.plan.sync_spec, _numbers(step, rank, stage, Op.UPDATE)
    needed = {Op.CHECK: sync_spec.on_nan is not None, Op.STAGE_NORM: sync_spec.clips}
    for op in (op for op, is_needed in needed.items() if is_needed):
        found = np.array(_numbers(step, rank, stage, op))
        for complete, updated in zip(_gradients_complete(step, rank, stage), updates, strict=True):
            if ((found > complete) & (found < updated)).sum() != 1:
                message = f"update of stage {stage} without one {op} of its gradients before it"
                yield Violation((rank, updated), message)


def _gradients_complete(step: ProgramIndex, rank: int, stage: int) -> list[int]:
    """For each update of a stage, the last instruction that adds to its gradients, or the update before."""
    updates, buckets = _numbers(step, rank, stage, Op.UPDATE), step.plan.sync_spec.buckets_of(stage)
    ends = [_numbers(step, rank, stage, Op.WAIT_REDUCE_GRAD, bucket) for bucket in buckets]
    ends = ends or [_last_before(updates, _numbers(step, rank, stage, Op.ACCUMULATE))]
    return [max(numbers) for numbers in zip([-1, *updates][: len(updates)], *ends, strict=True)]


def _last_before(updates: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """For each update, the last of these instructions before it, or -1."""
    found = np.array([-1, *numbers])
    last: list[int] = found[np.searchsorted(found, updates) - 1].tolist()
    return last


def _uses_others(
    step: ProgramIndex, rank: int, stage: int, size: int, numbers: Sequence[int]
) -> Iterator[Violation]:
    """Gradients that are not made between the previous use of gradients and their own."""
    codes = [OP_CODE[Op(phase)] for phase in GRADIENT_PHASES]
    made, begun = (table[codes, stage].max(axis=0) for table in (step.numbers, step.begins))
    for microbatch in np.flatnonzero(step.ranks[stage] == rank).tolist():
        each = microbatch // size
        if not (numbers[each - 1] if each else -1) < begun[microbatch] <= made[microbatch] < numbers[each]:
            found = f"the gradients of stage {stage}, microbatch {microbatch}, are made at {made[microbatch]}"
            yield Violation((rank, numbers[each]), f"{found}, but belong into version {each + 1}")


def _numbers(step: ProgramIndex, rank: int, stage: int, op: Op, bucket: int = -1) -> list[int]:
    """The numbers of the instructions of a stage with this op and bucket."""
    columns = step.columns[rank]
    own = columns.numbers_of(op)
    found: list[int] = own[(columns.stages[own] == stage) & (columns.buckets[own] == bucket)].tolist()
    return found


def versions_available(step: ProgramIndex) -> Iterator[Violation]:
    """A version is made before it is read, and stashed if it is read after the next update. Refused::

    forward stage 0 mb 1 version 1, update stage 0 makes version 1
    """
    placement = step.plan.placement if step.plan.sync_spec.stream else ()
    for rank, stage in [(rank, stage) for stage, ranks in enumerate(placement) for rank in ranks]:
        columns, numbers = step.columns[rank], _numbers(step, rank, stage, Op.UPDATE)
        own = columns.compute_numbers[columns.stages[columns.compute_numbers] == stage]
        read = columns.versions[own]
        made = np.searchsorted(numbers, own)
        yield from _not_stashed(step, rank, stage, numbers, own[read < made])
        for place in np.flatnonzero(read > made).tolist():
            message = f"reads version {read[place]} of stage {stage}, which is not made yet"
            yield Violation((rank, int(own[place])), message)


def _not_stashed(
    step: ProgramIndex, rank: int, stage: int, updates: Sequence[int], late: Ints
) -> Iterator[Violation]:
    """Computes that read a version after the update that changes it, if that is not stashed before.

    A stash keeps the weights that have a gradient, unless the check has found that the update is skipped.
    """
    columns, stashes = step.columns[rank], dict[int, int]()
    checks = _last_before(updates, _numbers(step, rank, stage, Op.CHECK))
    ready = [*map(max, _gradients_complete(step, rank, stage), checks), max(updates, default=-1)]
    for number in _numbers(step, rank, stage, Op.STASH):
        version = int(columns.versions[number])
        what = f"stashes version {version} of stage {stage}"
        if not 0 <= version <= len(updates):
            yield Violation((rank, number), f"{what}, which is never made")
        if version in stashes:
            yield Violation((rank, number), f"{what} again; expected it once, at {stashes[version]}")
        stashes[version] = number
        last = [*updates, len(columns)][version]
        if not ready[version] < number < last:
            yield Violation((rank, number), f"{what} at another time than before the update at {last}")
    for number in late.tolist():
        if (version := int(columns.versions[number])) not in stashes:
            message = f"reads version {version} of stage {stage}, which is not stashed before the update"
            yield Violation((rank, number), f"{message} at {updates[version]}")


def asynchronous_supported(step: ProgramIndex) -> Iterator[Violation]:
    """Streams that the version rules do not support are refused: for example, with tied weights."""
    stream, sync_spec = step.plan.sync_spec.stream, step.plan.sync_spec
    if stream is None:
        return
    if step.plan.num_microbatches % stream.microbatches:
        whole = f"mini-batches of {stream.microbatches} microbatches"
        yield Violation(None, f"{step.plan.num_microbatches} microbatches are no whole number of {whole}")
    if sync_spec.shard or sync_spec.buffer_sync_stages:
        yield Violation(None, "replicas share state or buffers, for which streams have no rules of versions")
    if any(link.payload in (Payload.WEIGHT, Payload.WEIGHT_GRADIENT) for link in step.plan.links):
        yield Violation(None, "stages share tied weights, for which streams have no rule of versions")
    yield from _unsupported(stream, replica_counts(step.plan.placement))


def _unsupported(stream: Stream, replicas: Sequence[int]) -> Iterator[Violation]:
    """Numbers of replicas and microbatches that version policies do not support."""
    most = max(replicas)
    if stream.versions is not VersionPolicy.DOUBLE:
        if stream.microbatches != 1:
            found = f"a mini-batch has {stream.microbatches} microbatches"
            yield Violation(None, f"{found}; versions that are {stream.versions} need 1")
        if stream.versions is VersionPolicy.VERTICAL and most > 1:
            message = f"a stage has {most} replicas; vertical sync has no rule of versions for them"
            yield Violation(None, message)
    elif min(replicas) != most or stream.microbatches % most:
        found = f"{stream.microbatches} microbatches of a mini-batch for {replicas} replicas of the stages"
        message = f"{found}; two versions need as many microbatches for each replica of each stage"
        yield Violation(None, message)
    elif stream.microbatches < len(replicas) * most:
        found = f"a mini-batch has {stream.microbatches} microbatches"
        yield Violation(None, f"{found}; two versions need {len(replicas) * most}")


RULES: tuple[Callable[[ProgramIndex], Iterator[Violation]], ...] = (
    asynchronous_supported,
    versions_as_specified,
    updates_in_order,
    versions_available,
)
