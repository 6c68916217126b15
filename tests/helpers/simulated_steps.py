"""Simulated steps of schedules, also with replicas, sums of gradients, gatherings, norms and updates."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from bare_programs import lower, uniform_costs
from example_schedules import result_link
from hypothesis import strategies as st

from pipec.ir import Bucket, Link, Op, Schedule, ShardingLevel, SyncSpec, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule, zb_h1, zb_v
from pipec.schedules.replicated import replicate_schedule, round_robin
from pipec.timeline.curves import Curve, MemoryCurves
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import DrawnStep


def played(
    schedule: Schedule, links: tuple[Link, ...] = (), recompute: tuple[int, ...] = (), **costs: float | str
) -> Timeline:
    """A step of a chain of stages with further ``links``. The last stage returns the loss."""
    num_stages = schedule.num_stages
    links = (*chain_links(num_stages), result_link(num_stages - 1), *links)
    return simulate(lower(schedule, links, recompute), uniform_costs(num_stages, links=links, **costs))


def one_f_one_b(num_ranks: int = 4, num_microbatches: int = 8, **costs: float | str) -> Timeline:
    """A step of 1F1B, with messages of a quarter of a unit."""
    return played(make_schedule("1f1b", num_ranks, num_microbatches), message=0.25, **costs)


def ended(replicas: int | tuple[int, ...], num_microbatches: int, **options: object) -> Timeline:
    """A step with the ``options`` of a SyncSpec: 1F1B on two stages with so many replicas, or round robin.

    Its forwards and backward halves take a unit.
    """
    if isinstance(replicas, tuple):
        schedule = round_robin(num_microbatches, replicas)
    else:
        schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 2), num_microbatches, replicas)
    buckets = tuple(
        Bucket(stage, tuple(Value(f"{stage}.{name}", "float32", (64,)) for name in "qkv"))
        for stage, ranks in enumerate(schedule.placement)
        if len(ranks) > 1
    )
    sync_spec, times = SyncSpec(buckets, **options), {(Op.GRAD_NORM, -1, -1): 0.25}
    for k, bucket in enumerate(buckets):
        times |= {(Op.REDUCE_GRAD, bucket.stage, k): 1.5, (Op.UNSHARD, bucket.stage, k): 1.0}
    for stage in range(schedule.num_stages):
        times |= {(Op.SUM_COUNTS, stage, -1): 0.75, (Op.UPDATE, stage, -1): 0.5}
    links = chain_links(schedule.num_stages)
    costs = replace(uniform_costs(schedule.num_stages, links=links), sync_times=times)
    return replace(simulate(lower(schedule, links, sync_spec=sync_spec), costs), sync_spec=sync_spec)


EVERYTHING = {"updates": True, "clips": True, "shard": ShardingLevel.PARAMETERS}
COUNTED = {"replicas_pass_own_rows": True, "count_stages": (0,)}

TIMELINES = st.builds(
    lambda options, *sizes: ended(*sizes, **options),
    st.sampled_from([{}, {"updates": True}, {"updates": True, "clips": True}, EVERYTHING]),
    st.sampled_from([1, 2, 3, (3, 2, 1), (1, 2), (2, 1)]),
    st.integers(3, 7),
) | st.builds(
    lambda make, ranks, microbatches, **costs: played(make(ranks, microbatches), **costs),
    st.sampled_from([functools.partial(make_schedule, "1f1b"), zb_h1, zb_v]),
    st.integers(1, 4),
    st.integers(1, 6),
    forward=st.sampled_from([0.3, 1.0, 1.7]),
    message=st.sampled_from([0.0, 0.1, 0.7, 2.5]),
)
"""Steps of any kind."""


def drawn(timeline: Timeline, label: str = "step", memory: Sequence[MemoryCurves] = ()) -> DrawnStep:
    """A step to show. It is told as one of 1F1B with 8 microbatches."""
    return DrawnStep("1f1b", 8, timeline, memory, label)


def held(*steps: tuple[float, float]) -> MemoryCurves:
    """Memory of one category."""
    curve = Curve.of(steps)
    return MemoryCurves(curve, {"saved": curve.amounts})
