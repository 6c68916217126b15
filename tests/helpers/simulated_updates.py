"""Steps with replicas, sums of gradients, gatherings, norms and updates, simulated."""

import functools
from dataclasses import replace

from bare_programs import lower, uniform_costs

from pipec.ir import Bucket, Op, Schedule, ShardingLevel, SyncSpec, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate

REDUCE, GATHER, NORM, UPDATE, COUNT = 1.5, 1.0, 0.25, 0.5, 0.75
"""The units that each takes."""


def schedule_of(replicas: int | tuple[int, ...], num_microbatches: int) -> Schedule:
    """1F1B on two stages with so many replicas, or round robin."""
    if isinstance(replicas, tuple):
        return round_robin(num_microbatches, replicas)
    return replicate_schedule(functools.partial(make_schedule, "1f1b", 2), num_microbatches, replicas)


def ended(replicas: int | tuple[int, ...], num_microbatches: int, **options: object) -> Timeline:
    """A step whose forwards and backward halves take a unit, with the ``options`` of an SyncSpec."""
    schedule = schedule_of(replicas, num_microbatches)
    buckets = tuple(
        Bucket(stage, tuple(Value(f"{stage}.{name}", "float32", (64,)) for name in "qkv"))
        for stage, ranks in enumerate(schedule.placement)
        if len(ranks) > 1
    )
    links = chain_links(schedule.num_stages)
    sync_spec = SyncSpec(buckets, **options)
    programs = lower(schedule, links, sync_spec=sync_spec)
    endings = {(Op.GRAD_NORM, -1, -1): NORM}
    endings |= {(Op.REDUCE_GRAD, bucket.stage, k): REDUCE for k, bucket in enumerate(buckets)}
    endings |= {(Op.UNSHARD, bucket.stage, k): GATHER for k, bucket in enumerate(buckets)}
    endings |= {(Op.SUM_COUNTS, stage, -1): COUNT for stage in sync_spec.count_stages}
    endings |= {(Op.UPDATE, stage, -1): UPDATE for stage in range(schedule.num_stages)}
    costs = uniform_costs(schedule.num_stages, links=links)
    return replace(simulate(programs, replace(costs, sync_times=endings)), sync_spec=sync_spec)


EVERYTHING = {"updates": True, "clips": True, "shard": ShardingLevel.PARAMETERS}
