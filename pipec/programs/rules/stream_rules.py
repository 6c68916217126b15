"""The rule for streams that have versions of weights.

Every stage updates as soon as the gradients of a round, or of a mini-batch, are summed. Each microbatch reads
the version that ``Stream`` specifies, the same in forward and backward. That versions are made, summed and
stashed in order is in the lives of their cells. So no stage needs more versions than
``Stream.max_live_versions``: before the gradients of a microbatch are made, a stage has made no update that
uses them.
"""

from collections.abc import Iterator, Sequence

from pipec.ir import Payload, Stream, VersionPolicy, replica_counts
from pipec.programs.program_index import ProgramIndex, Violation


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
