"""The rules for a sync spec: it fits its stages and links, is complete, and streams have versions of weights.

Every stage of a stream updates as soon as the gradients of a round, or of a mini-batch, are summed. Each
microbatch reads the version that ``Stream`` specifies, the same in forward and backward. That versions are
made, summed and stashed in order is in the lives of their cells. So no stage needs more versions than
``Stream.max_live_versions``: before the gradients of a microbatch are made, a stage has made no update that
uses them.
"""

from collections.abc import Iterator, Sequence

from pipec.ir import (
    GRADIENT_PHASES,
    Bucket,
    Link,
    Payload,
    Placement,
    Plan,
    SegmentCounts,
    SyncSpec,
    replica_counts,
)
from pipec.ir.text_format import format_link
from pipec.programs.program_index import ProgramIndex, Violation


def violations(
    sync_spec: SyncSpec, placement: Placement, links: Sequence[Link], segments: SegmentCounts
) -> Iterator[str]:
    """Faults in a sync spec for stages on these ranks, whatever their programs are."""
    trains = not sync_spec.buckets or any(bucket.trained for bucket in sync_spec.buckets)
    if (sync_spec.clips or sync_spec.shard) and trains and not sync_spec.updates:
        yield "the step clips gradients or shards state, but it updates nothing; expected an optimizer in it"
    replicated = [stage for stage, ranks in enumerate(placement) if len(ranks) > 1]
    named = [("averages buffers of", stage) for stage in sync_spec.buffer_sync_stages]
    named += [("sums counts of", stage) for stage in sync_spec.count_stages]
    whole = [(k, bucket.stage) for k, bucket in enumerate(sync_spec.buckets) if not bucket.on_host]
    named += [(f"has bucket {k} of", stage) for k, stage in whole]
    for what, stage in named:
        if stage not in replicated:
            yield f"the step {what} stage {stage}; expected a stage with several replicas: {replicated}"
    yield from _in_no_segment(sync_spec.buckets, segments)
    yield from _summed_twice(sync_spec.buckets)
    yield from _wrongly_tied(sync_spec, links)


def _in_no_segment(buckets: Sequence[Bucket], segments: SegmentCounts) -> Iterator[str]:
    for number, bucket in enumerate(buckets):
        most = max(segments.get((bucket.stage, phase), 1) for phase in GRADIENT_PHASES)
        if bucket.trained and not 0 <= bucket.segment < most:
            last = f"bucket {number} is complete after segment {bucket.segment}"
            yield f"{last}; stage {bucket.stage} has {most}"


def _summed_twice(buckets: Sequence[Bucket]) -> Iterator[str]:
    first: dict[tuple[int, str], int] = {}
    for number, bucket in enumerate(buckets):
        if not bucket.parameters:
            yield f"bucket {number} of stage {bucket.stage} has no parameters; expected at least one"
        for name in bucket.names:
            if (earlier := first.setdefault((bucket.stage, name), number)) != number:
                yield f"{name} of stage {bucket.stage} is in buckets {earlier} and {number}; expected one"


def _wrongly_tied(sync_spec: SyncSpec, links: Sequence[Link]) -> Iterator[str]:
    """Tied weights are not sharded, and are summed after other stages have sent their gradients."""
    for link in links:
        for value in link.values if link.payload in (Payload.WEIGHT, Payload.WEIGHT_GRADIENT) else ():
            owner = link.source if link.payload is Payload.WEIGHT else link.target
            for number in sync_spec.buckets_of(owner):
                if value.name in sync_spec.buckets[number].names and not sync_spec.buckets[number].is_tied:
                    yield f"bucket {number} is not tied, but {format_link(link)} shares {value.name}"


def stage_violations(plan: Plan) -> Iterator[str]:
    """Faults in the sync spec of a plan, given the tensors of its stages."""
    for number, bucket in enumerate(plan.sync_spec.buckets):
        if not (bucket.trained or bucket.on_host):
            continue  # what training has sharded, of which this call may need less
        stage = plan.stages[bucket.stage] if 0 <= bucket.stage < len(plan.stages) else None
        own = {*stage.parameters} - {*stage.borrowed_parameters} if stage else set()
        if foreign := sorted({*bucket.names} - own):
            names = ", ".join(foreign)
            yield f"bucket {number} has {names}; expected parameters that stage {bucket.stage} owns"
    counting = [
        stage.index
        for stage in plan.stages
        if plan.sync_spec.replicas_pass_own_rows
        and stage.batch_counts
        and len(plan.placement[stage.index]) > 1
    ]
    if sorted(plan.sync_spec.count_stages) != counting:
        found = list(plan.sync_spec.count_stages)
        yield f"the step sums counts of stages {found}; expected those that read some: {counting}"
    changing = [
        stage.index
        for stage in plan.stages
        if stage.averaged_buffers and len(plan.placement[stage.index]) > 1
    ]
    if sorted(plan.sync_spec.buffer_sync_stages) != changing:
        found = list(plan.sync_spec.buffer_sync_stages)
        yield f"the step averages buffers of stages {found}; expected those that change some: {changing}"


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
    if sync_spec.weights_on_host:
        yield Violation(None, "weights are in host memory, for which streams have no rules of versions")
    if any(link.payload in (Payload.WEIGHT, Payload.WEIGHT_GRADIENT) for link in step.plan.links):
        yield Violation(None, "stages share tied weights, for which streams have no rule of versions")
    if reason := stream.unsupported(replica_counts(step.plan.placement)):
        yield Violation(None, f"a stream whose versions are {stream.versions} {reason}")
