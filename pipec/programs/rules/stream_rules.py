"""The rules for the numbers of a stream: of versions that are read, and of the rounds that make them.

Every stage updates as soon as the gradients of a round, or of a mini-batch, are summed. Each microbatch reads
the version that ``Stream`` specifies, the same in forward and backward. That versions are made, summed and
stashed in order is in the lives of their cells. So no stage needs more versions than
``Stream.max_live_versions``: before the gradients of a microbatch are made, a stage has made no update that
uses them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pipec.ir import Op, Payload, Stream, VersionPolicy, replica_counts
from pipec.ir.columns import constant, taken
from pipec.programs.program_index import ProgramIndex, Violation, describe
from pipec.programs.rules.field_rules import STREAM_OPS

_NAME_VERSIONS = (Op.PRECOMPUTE, Op.STASH, Op.UPDATE)


def asynchronous_supported(step: ProgramIndex) -> Iterator[Violation]:
    """Streams that have no rule of versions are refused: for example, with tied weights."""
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
        expected = constant(-1, computes.size)
        if stream:
            expected = step.read_versions[
                taken(columns.stages, computes), taken(columns.microbatches, computes)
            ]
        for place in np.flatnonzero(taken(columns.versions, computes) != expected).tolist():
            number = int(computes[place])
            found = f"reads version {columns.versions[number]}; expected {expected[place]}"
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            yield Violation((rank, number), f"{columns[number].op} of {where} {found}")


def rounds_as_specified(step: ProgramIndex) -> Iterator[Violation]:
    """What ends a round names its first microbatch, an update its version, and a stash the one before.

    A pause names the first microbatch of a mini-batch. Refused, where a round has one microbatch::

        update stage 0 mb 1 version 1
    """
    stream, replicas = step.plan.sync_spec.stream, replica_counts(step.plan.placement)
    if stream is None:
        return
    sizes = [stream.microbatches_per_update(stage, replicas) for stage in range(len(replicas))]
    for rank, columns in enumerate(step.columns):
        numbers = columns.numbers_of(*STREAM_OPS)
        size = np.array([*sizes, stream.microbatches])[columns.stages[numbers]]
        rounds, rest = np.divmod(columns.microbatches[numbers], size)
        ops = columns.ops[numbers]
        for op, made in ((Op.UPDATE, 1), (Op.STASH, 0)):
            named = ops == list(Op).index(op)
            rest += named & (columns.versions[numbers] != rounds + made)
        for place in np.flatnonzero(rest).tolist():
            instruction, number = columns[int(numbers[place])], int(numbers[place])
            expected = "the first microbatch of a round, and the version that it makes or replaces"
            named = f"names microbatch {instruction.microbatch} and version {instruction.version}"
            yield Violation((rank, number), f"{describe(instruction)} {named}; expected {expected}")
