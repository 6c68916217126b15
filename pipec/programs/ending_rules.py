"""Whether an ending fits the stages and links that it is for: what it names, and that it forgets nothing."""

from collections.abc import Iterator, Sequence

from pipec.ir import GRADIENT_PHASES, Bucket, Ending, Link, Parts, Payload, Placement, Plan
from pipec.ir.text import format_link


def misfits(ending: Ending, placement: Placement, links: Sequence[Link], parts: Parts) -> Iterator[str]:
    """What is wrong with an ending for stages on these ranks, whatever their programs are."""
    if (ending.clips or ending.shard) and not ending.updates:
        yield "the step clips gradients or shards state, but it updates nothing; expected an optimizer in it"
    replicated = [stage for stage, ranks in enumerate(placement) if len(ranks) > 1]
    named = [("averages buffers of", stage) for stage in ending.averaged]
    named += [(f"has bucket {k} of", bucket.stage) for k, bucket in enumerate(ending.buckets)]
    for what, stage in named:
        if stage not in replicated:
            yield f"the step {what} stage {stage}; expected a stage with several replicas: {replicated}"
    yield from _in_no_part(ending.buckets, parts)
    yield from _summed_twice(ending.buckets)
    yield from _wrongly_tied(ending, links)


def _in_no_part(buckets: Sequence[Bucket], parts: Parts) -> Iterator[str]:
    for number, bucket in enumerate(buckets):
        most = max(parts.get((bucket.stage, phase), 1) for phase in GRADIENT_PHASES)
        if not 0 <= bucket.part < most:
            yield f"bucket {number} is complete after part {bucket.part}; stage {bucket.stage} has {most}"


def _summed_twice(buckets: Sequence[Bucket]) -> Iterator[str]:
    first: dict[tuple[int, str], int] = {}
    for number, bucket in enumerate(buckets):
        if not bucket.parameters:
            yield f"bucket {number} of stage {bucket.stage} has no parameters; expected at least one"
        for name in bucket.names:
            if (earlier := first.setdefault((bucket.stage, name), number)) != number:
                yield f"{name} of stage {bucket.stage} is in buckets {earlier} and {number}; expected one"


def _wrongly_tied(ending: Ending, links: Sequence[Link]) -> Iterator[str]:
    """Tied weights stay whole, and are summed when other stages have brought their gradients."""
    for link in links:
        for value in link.values if link.payload in (Payload.WEIGHT, Payload.WEIGHT_GRADIENT) else ():
            owner = link.source if link.payload is Payload.WEIGHT else link.target
            for number in ending.buckets_of(owner):
                if value.name in ending.buckets[number].names and not ending.buckets[number].lent:
                    yield f"bucket {number} is not lent, but {format_link(link)} shares {value.name}"


def misfits_of_stages(plan: Plan) -> Iterator[str]:
    """What is wrong with the ending of a plan, given the tensors of its stages."""
    for number, bucket in enumerate(plan.ending.buckets):
        stage = plan.stages[bucket.stage] if 0 <= bucket.stage < len(plan.stages) else None
        own = {*stage.parameters} - {*stage.borrowed} if stage else set()
        if foreign := sorted({*bucket.names} - own):
            names = ", ".join(foreign)
            yield f"bucket {number} has {names}; expected parameters that stage {bucket.stage} owns"
    changing = [
        stage.index for stage in plan.stages if stage.updated_buffers and len(plan.placement[stage.index]) > 1
    ]
    if sorted(plan.ending.averaged) != changing:
        found = list(plan.ending.averaged)
        yield f"the step averages buffers of stages {found}; expected those that change some: {changing}"
