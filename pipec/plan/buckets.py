"""Chooses the buckets in which replicas reduce gradients, and so the segments of a stage's backward.

A bucket is summed when the segment of the last backward is over that completes it. Few large buckets pay few
latencies; of several, the first are on their way while the backward still runs. What is best is found by
simulating a step of the stage alone with buckets of different sizes, on links as slow as its own.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from pipec.graph import TrainingGraph
from pipec.graph.phase_functions import StageFunctions, stage_functions
from pipec.hardware.topology import Topology
from pipec.ir import (
    GRADIENT_PHASES,
    Bucket,
    Compute,
    Mode,
    Op,
    Phase,
    Placement,
    Schedule,
    Stage,
    SyncSpec,
    Value,
)
from pipec.ir.text_format import value_bytes
from pipec.plan.build_plan import stage_speed
from pipec.plan.node_values import plan_value
from pipec.plan.sync_spec import with_collective_seconds
from pipec.programs.lower import bare_plan, lower
from pipec.timeline.simulate import SimulationCosts, simulate

MAX_SEGMENTS = 32
LAUNCHES_PER_SEGMENT = 10
"""What one more segment of a backward costs, in operator launches: another call, another collective, and
passing on what later segments read."""

_ROUNDS, _RANKS = 2, (0, 1)
"""What is simulated: all replicas do the same, so that two stand for all of them."""


def segment_backwards(
    graph: TrainingGraph,
    stages: Sequence[StageFunctions],
    split_backward: bool,
    placement: Placement,
    size: int,
    topology: Topology,
    launch_seconds: float,
    sync_spec: SyncSpec,
) -> list[StageFunctions]:
    """The stages, their backwards split into segments where reductions of gradients are to overlap them.

    Gradients of parameters that several stages use, and sparse ones, come last.
    """
    if graph.mode is not Mode.TRAIN:
        return list(stages)
    uses = Counter(node.meta["role"].fqn for stage in stages for node in stage.parameters)
    found = []
    for stage in stages:
        ranks, own = placement[stage.index], dict[str, Value]()
        for node in stage.parameters if len(ranks) > 1 else ():
            if uses[fqn := node.meta["role"].fqn] == 1 and _has_dense_gradient(stage, fqn):
                own[fqn] = plan_value(graph, node, fqn)
        speed = stage_speed(topology, ranks)
        price = functools.partial(
            with_collective_seconds, ranks=ranks, topology=topology, requested=sync_spec
        )
        segment_seconds = LAUNCHES_PER_SEGMENT * launch_seconds
        groups = (
            choose_buckets(gradient_times(stage, own, size, speed), sync_spec, price, segment_seconds)
            if own
            else []
        )
        names = [{value.name for value in group} for group in groups]
        if len(names) > 1:
            stage = stage_functions(graph, stage.index, split_backward, names)
        found.append(stage)
    return found


def _has_dense_gradient(stage: StageFunctions, fqn: str) -> bool:
    made = [node for function in stage.functions for name, node in function.gradients if name == fqn]
    return bool(made) and all(node.meta["val"].layout is torch.strided for node in made)


@dataclass(frozen=True)
class GradientTimes:
    """The gradients of a stage in the order in which a backward completes them.

    ``shares`` says after which share of the backward's ``backward_seconds`` each is complete.
    """

    values: Sequence[Value]
    shares: Sequence[float]
    forward_seconds: float
    backward_seconds: float


Price = Callable[[Bucket], Bucket]
"""Returns a bucket with the seconds that its replicas take to sum and to gather it."""


def choose_buckets(
    gradients: GradientTimes, sync_spec: SyncSpec, price: Price, segment_seconds: float
) -> list[tuple[Value, ...]]:
    """The gradients in groups. A segment of the backward completes each group, which is one bucket.

    Every segment takes ``segment_seconds`` more.
    """

    def seconds(groups: list[tuple[Value, ...]]) -> float:
        return _seconds(gradients, groups, sync_spec, price) + segment_seconds * len(groups)

    return min(_candidates(gradients.values), key=seconds)


def _candidates(values: Sequence[Value]) -> Iterator[list[tuple[Value, ...]]]:
    """Candidate groups: all together, and groups of about 1/2, 1/4, 1/8 and so on of all bytes."""
    total, found, number = sum(value_bytes(value, {}) for value in values), 0, 1
    while number <= min(MAX_SEGMENTS, len(values)):
        groups = list(_groups_of_at_least(values, total / number))
        if len(groups) > found:
            yield groups
        found = len(groups)
        number *= 2


def _groups_of_at_least(values: Sequence[Value], least_bytes: float) -> Iterator[tuple[Value, ...]]:
    """Consecutive values in groups of at least so many bytes. What is left over joins the last group."""
    group, held = list[Value](), 0
    left = sum(value_bytes(value, {}) for value in values)
    for value in values:
        group.append(value)
        held += value_bytes(value, {})
        left -= value_bytes(value, {})
        if held >= least_bytes and left >= least_bytes / 2:
            yield tuple(group)
            group, held = [], 0
    yield tuple(group)


def _seconds(
    gradients: GradientTimes, groups: Sequence[tuple[Value, ...]], sync_spec: SyncSpec, price: Price
) -> float:
    """The time of a step of the stage alone with these groups."""
    buckets = tuple(price(Bucket(0, group, segment=segment)) for segment, group in enumerate(groups))
    last = [gradients.shares[end - 1] for end in accumulate(map(len, groups))]
    shares = tuple(end - start for start, end in pairwise([0.0, *last[:-1], 1.0]))
    sync_times = {(Op.REDUCE_GRAD, 0, number): each.reduce_seconds for number, each in enumerate(buckets)}
    sync_times |= {(Op.UNSHARD, 0, number): each.unshard_seconds for number, each in enumerate(buckets)}
    backward = (0, Phase.BACKWARD)
    costs = SimulationCosts(
        {(0, Phase.FORWARD): gradients.forward_seconds, backward: gradients.backward_seconds},
        sync_times=sync_times,
        segments={backward: shares},
    )
    alone = replace(
        sync_spec, buckets=buckets, buffer_sync_stages=(), count_stages=(), clips=False, on_nan=None
    )
    stage = Stage(0, 0, 0, segments={Phase.BACKWARD: shares} if len(groups) > 1 else {})
    schedule = _schedule()
    plan = replace(bare_plan(schedule, (), alone), stages=(stage,))
    programs = lower(schedule, plan)
    return simulate(programs, costs).makespan


def _schedule() -> Schedule:
    """Forward and backward of a microbatch on each rank, in rounds."""
    replicas = len(_RANKS)
    orders = tuple(
        tuple(
            Compute(phase, 0, microbatch)
            for microbatch in range(rank, _ROUNDS * replicas, replicas)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        for rank in _RANKS
    )
    return Schedule("1f1b", _ROUNDS * replicas, (_RANKS,), orders)


def gradient_times(
    stage: StageFunctions, values: Mapping[str, Value], size: int, speed: float
) -> GradientTimes:
    """When a backward of ``size`` rows completes the gradients of the parameters in ``values``."""
    completed = {fqn: 0.0 for function in stage.functions for fqn, _ in function.gradients if fqn in values}
    before = backward = 0.0
    for function in stage.functions:
        made = {node: fqn for fqn, node in function.gradients}
        for node in function.body:
            seconds = float(node.meta["cost"].seconds(size)) / speed
            if function.phase not in GRADIENT_PHASES:
                before += seconds
                continue
            backward += seconds
            if node in made and made[node] in completed:
                completed[made[node]] = backward
    order = sorted(completed, key=completed.__getitem__)
    shares = [completed[fqn] / backward if backward else 1.0 for fqn in order]
    return GradientTimes([values[fqn] for fqn in order], shares, before, backward)
