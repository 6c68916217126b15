"""In what buckets the gradients of a stage travel between replicas, and so in what parts its backward runs.

A bucket is summed when the part of the last backward is over that completes it. Few large buckets pay few
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
from pipec.graph.functions import StageFunctions, stage_functions
from pipec.hardware.topology import Topology
from pipec.ir import (
    GRADIENT_PHASES,
    Bucket,
    Compute,
    Ending,
    Mode,
    Op,
    Phase,
    Placement,
    Schedule,
    Value,
)
from pipec.ir.text import value_bytes
from pipec.plan.build import stage_speed
from pipec.plan.ending import priced
from pipec.plan.values import value_of
from pipec.programs.lower import lower
from pipec.timeline.simulate import Costs, simulate

MOST_PARTS = 32
LAUNCHES_PER_PART = 10
"""What one more part of a backward takes, in launches of an operator: another call, another collective to be
started, carried and waited for, and the handing over of what later parts read."""

_ROUNDS, _RANKS = 2, (0, 1)
"""What is simulated: all replicas do the same, so that two stand for all of them."""


def in_parts(
    graph: TrainingGraph,
    stages: Sequence[StageFunctions],
    split_backward: bool,
    placement: Placement,
    size: int,
    topology: Topology,
    launch_seconds: float,
    ending: Ending,
) -> list[StageFunctions]:
    """The stages, with backwards in parts where sums of gradients are to overlap them.

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
                own[fqn] = value_of(graph, node, fqn)
        speed = stage_speed(topology, ranks)
        price = functools.partial(priced, ranks=ranks, topology=topology, asked=ending)
        part_seconds = LAUNCHES_PER_PART * launch_seconds
        groups = fuse(gradients_of(stage, own, size, speed), ending, price, part_seconds) if own else []
        names = [{value.name for value in group} for group in groups]
        divided = stage_functions(graph, stage.index, split_backward, names) if len(names) > 1 else stage
        found.append(divided)
    return found


def _has_dense_gradient(stage: StageFunctions, fqn: str) -> bool:
    made = [node for function in stage.functions for name, node in function.gradients if name == fqn]
    return bool(made) and all(node.meta["val"].layout is torch.strided for node in made)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a stage in the order in which a backward completes them.

    ``shares`` says after which share of the backward's ``backward_seconds`` each is complete.
    """

    values: Sequence[Value]
    shares: Sequence[float]
    forward_seconds: float
    backward_seconds: float


Price = Callable[[Bucket], Bucket]
"""Returns a bucket with the seconds that its replicas take to sum and to gather it."""


def fuse(gradients: Gradients, ending: Ending, price: Price, part_seconds: float) -> list[tuple[Value, ...]]:
    """The gradients in groups, each to be completed by a part of the backward and to travel together.

    Every part takes ``part_seconds`` more.
    """

    def seconds(groups: list[tuple[Value, ...]]) -> float:
        return _seconds(gradients, groups, ending, price) + part_seconds * len(groups)

    return min(_candidates(gradients.values), key=seconds)


def _candidates(values: Sequence[Value]) -> Iterator[list[tuple[Value, ...]]]:
    """All together, and groups of about a half, a quarter, an eighth and so on of all bytes."""
    total, found, number = sum(value_bytes(value, {}) for value in values), 0, 1
    while number <= min(MOST_PARTS, len(values)):
        groups = list(_filled(values, total / number))
        if len(groups) > found:
            yield groups
        found = len(groups)
        number *= 2


def _filled(values: Sequence[Value], least_bytes: float) -> Iterator[tuple[Value, ...]]:
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
    gradients: Gradients, groups: Sequence[tuple[Value, ...]], ending: Ending, price: Price
) -> float:
    """The time of a step of the stage alone with these groups."""
    buckets = tuple(price(Bucket(0, group, part=part)) for part, group in enumerate(groups))
    last = [gradients.shares[end - 1] for end in accumulate(map(len, groups))]
    shares = tuple(end - start for start, end in pairwise([0.0, *last[:-1], 1.0]))
    endings = {(Op.REDUCE_GRAD, 0, number): each.reduce_seconds for number, each in enumerate(buckets)}
    endings |= {(Op.UNSHARD, 0, number): each.gather_seconds for number, each in enumerate(buckets)}
    backward = (0, Phase.BACKWARD)
    costs = Costs(
        {(0, Phase.FORWARD): gradients.forward_seconds, backward: gradients.backward_seconds},
        endings=endings,
        parts={backward: shares},
    )
    alone = replace(ending, buckets=buckets, averaged=(), clips=False, on_nan=None)
    programs = lower(_schedule(), (), ending=alone, parts={backward: len(groups)} if len(groups) > 1 else {})
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


def gradients_of(stage: StageFunctions, values: Mapping[str, Value], size: int, speed: float) -> Gradients:
    """When a backward of ``size`` rows completes the gradients of those parameters that ``values`` has."""
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
    return Gradients([values[fqn] for fqn in order], shares, before, backward)
