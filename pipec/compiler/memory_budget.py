"""Chooses what ranks that lack memory recompute or offload, so that a schedule fits."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.compiler.pass_list import NO_OFFLOAD
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE, EvaluatedPlan
from pipec.ir import Op, Phase, Placement, stages_on
from pipec.ir.columns import OP_CODE, Floats, InstructionColumns, Ints
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.planner.recompute_solver import (
    ForwardValue,
    MemoryConstraint,
    OffloadCost,
    RecomputeSolution,
    StageValues,
    minimize_seconds,
)
from pipec.programs.lower_periodic import steady_excerpt
from pipec.programs.offload_intervals import num_offloaded

_ATTEMPTS = 3
"""How many choices are tried. Each attempt reserves what the last one lacked."""

_SEGMENTS = (1, 2, 8)
"""The numbers of segments in which a stage may be recomputed, in the order in which they are tried."""

_READING_PHASES = (Phase.BACKWARD, Phase.BACKWARD_INPUT)
_READING = [OP_CODE[Op.BACKWARD], OP_CODE[Op.BACKWARD_INPUT]]
"""The phases that read the saved values of a forward, and free them."""


def may_free_memory(evaluated: EvaluatedPlan) -> bool:
    """Whether the options allow to recompute or offload values."""
    options = evaluated.staged.options
    return options.recompute == "auto" or options.may_offload


def fit_into_memory(evaluated: EvaluatedPlan) -> EvaluatedPlan:
    """The schedule on the same cut, with as little recompute and offloading as lets all ranks fit.

    At first a stage recomputes everything before its backward, which it can do while it waits for a message.
    If this does not fit, the backward recomputes one segment of the stage after another. That can also be
    faster, and so can offloading: if the step now takes clearly longer, what the options allow is tried, and
    the simulator decides.

    If no choice fits, recomputing everything is tried too, because the temporary memory of a function is
    known only after the choice. The result then lacks memory, the least of all that was tried.
    """
    options, recomputes = evaluated.staged.options, evaluated.staged.options.recompute == "auto"
    tried = [_fitted(evaluated, _SEGMENTS, False) if recomputes else evaluated]
    if recomputes and not _lacks(tried[0]) and _is_slower(tried[0], evaluated):
        tried.append(_fitted(evaluated, _SEGMENTS[1:], False))
    may_gain = all(_lacks(each) or _is_slower(each, evaluated) for each in tried)
    if options.may_offload and not evaluated.is_asynchronous and may_gain:
        tried.append(_fitted(evaluated, _SEGMENTS if recomputes else (1,), True))
    if recomputes and all(map(_lacks, tried)):
        tried.append(_marked(evaluated, MarkRecompute(None)))
    return min(tried, key=lambda each: each.score)


def _lacks(evaluated: EvaluatedPlan) -> bool:
    return any(evaluated.excess_bytes)


def _is_slower(evaluated: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    return evaluated.seconds > (1 + PREDICTION_TOLERANCE) * other.seconds


def _fitted(evaluated: EvaluatedPlan, segments: Sequence[int], offloads: bool) -> EvaluatedPlan:
    """The schedule within memory; the last one that was tried if nothing is found to fit.

    A stage recomputes in one of the numbers of ``segments``. Values may be copied to the host if it
    ``offloads``. The temporary memory of a phase function depends on what is recomputed, and is no sum over
    values. The first attempt assumes that of the function without recompute, and each later one adds what the
    last one lacked.
    """
    groups = [group for group in _groups(evaluated, segments, offloads) if group.lacks(evaluated)]
    left = [group.choices() for group in groups]
    chosen = [next(choices) for choices in left]
    while True:
        found = _marked(
            evaluated,
            MarkRecompute(
                frozenset().union(*(choice.recomputed for choice in chosen)),
                in_backward=frozenset().union(*(choice.late_stages for choice in chosen)),
            ),
            MarkOffload(frozenset().union(*(choice.offloaded for choice in chosen))),
        )
        others = dict[int, _Choice]()
        for number, group in enumerate(groups):
            if group.lacks(found) and (choice := next(left[number], None)):
                others[number] = choice
        if not others:
            return found
        chosen = [others.get(number, choice) for number, choice in enumerate(chosen)]


def _marked(
    evaluated: EvaluatedPlan, again: MarkRecompute, offload: MarkOffload = NO_OFFLOAD
) -> EvaluatedPlan:
    return evaluated.staged.with_recompute(again, offload).evaluate(
        evaluated.schedule, evaluated.plan.microbatch_size
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """The limit on saved values while an instruction runs on a rank: ``room`` bytes.

    ``saved`` counts the microbatches in flight, by stage, and ``offloaded`` those of them that can be on the
    host. ``replaying`` is the stage whose backward runs, if any.
    """

    saved: tuple[int, ...]
    offloaded: tuple[int, ...]
    replaying: int | None
    room: float


@dataclass(frozen=True)
class _Choice:
    """What a group recomputes and offloads. The backwards of ``late_stages`` recompute segment by segment."""

    recomputed: frozenset[str]
    offloaded: frozenset[str]
    late_stages: frozenset[int]


@dataclass
class _RankGroup:
    """Ranks that share ``stages``.

    ``values[k]`` are the values of stage k by name, and ``needs`` the memory limits over time. Stages
    recompute in one of the numbers of ``segments``. Values may be copied to the host if there is a ``host``.
    ``lacked`` are the bytes that the last choice lacked.
    """

    ranks: Sequence[int]
    stages: Sequence[int]
    values: Sequence[Mapping[str, ForwardValue]]
    needs: Sequence[_Need]
    segments: Sequence[int]
    host: OffloadCost | None
    lacked: float = 0.0

    def lacks(self, evaluated: EvaluatedPlan) -> bool:
        """Whether a rank of the group needs more memory than it has; notes how much."""
        self.lacked = max(evaluated.excess_bytes[rank] for rank in self.ranks)
        return self.lacked > 0

    def choices(self) -> Iterator[_Choice]:
        """What to recompute and offload: the fastest that fits, in fewest segments; at last everything.

        Each choice reserves what the one before has lacked.
        """
        for number in self.segments:
            segments, reserved = self._segments(number), 0.0
            for _ in range(_ATTEMPTS):
                solution = minimize_seconds(*_problem(segments, self.needs, reserved), self.host)
                if solution is None:
                    break
                yield self._choice(segments, solution)
                reserved += math.ceil(self.lacked)
        values = [(name, value) for own in self.values for name, value in own.items()]
        recomputed = frozenset(name for name, value in values if value.is_recomputable)
        offloaded = frozenset(name for name, value in values if value.may_offload and self.host)
        for late_stages in ((), self.stages) if recomputed else ((),):
            yield _Choice(recomputed, offloaded, frozenset(late_stages))

    def _choice(self, segments: Sequence["_RecomputeSegment"], solution: RecomputeSolution) -> _Choice:
        is_late = len(segments) > len(self.stages)
        return _Choice(
            _names(segments, solution.recomputed),
            _names(segments, solution.offloaded),
            frozenset(self.stages if is_late else ()),
        )

    def _segments(self, count: int) -> list["_RecomputeSegment"]:
        segments = []
        for number, values in enumerate(self.values):
            names = list(values)
            for first, own in _split_into_segments(tuple(values.values()), count):
                segments.append(_RecomputeSegment(number, names[first : first + len(own)], own))
        return segments


@dataclass(frozen=True)
class _RecomputeSegment:
    """Values that are recomputed together: a stage of the group, by its position, or a segment of it."""

    number: int
    names: Sequence[str]
    values: StageValues


def _names(segments: Sequence[_RecomputeSegment], chosen: Sequence[frozenset[int]]) -> frozenset[str]:
    pairs = zip(segments, chosen, strict=True)
    return frozenset(segment.names[position] for segment, positions in pairs for position in positions)


def _problem(
    segments: Sequence[_RecomputeSegment], needs: Sequence[_Need], reserved: float
) -> tuple[tuple[StageValues, ...], tuple[MemoryConstraint, ...]]:
    """The arguments of the solver.

    A backward recomputes one segment of its stage at a time, from the last to the first, and then frees what
    the segment saved.
    """
    constraints = list[MemoryConstraint]()
    for need in needs:
        room, places = need.room - reserved, range(len(segments))
        saved, offloaded = (
            [count[segment.number] for segment in segments] for count in (need.saved, need.offloaded)
        )
        running = [k for k in places if segments[k].number == need.replaying]
        for k in running[::-1] or [-1]:
            recomputed = tuple(int(other == k) for other in places)
            constraints.append(MemoryConstraint(tuple(saved), recomputed, room, tuple(offloaded)))
            saved[k] -= 1
    return tuple(segment.values for segment in segments), tuple(_binding(constraints))


def _groups(evaluated: EvaluatedPlan, segments: Sequence[int], offloads: bool) -> Iterator[_RankGroup]:
    values = evaluated.staged.forward_values(evaluated.plan.microbatch_size)
    if evaluated.staged.options.recompute == "none":
        values = [
            {name: replace(each, is_recomputable=False) for name, each in own.items()} for own in values
        ]
    for ranks, stages in _sharing_stages(evaluated.plan.placement):
        own = {stage: values[stage] for stage in stages}
        different = {
            (evaluated.program(rank).rank, evaluated.memory_limit(rank)): rank for rank in reversed(ranks)
        }
        needs = dict.fromkeys(need for rank in different.values() for need in _needs(evaluated, rank, own))
        host = _host(evaluated, stages) if offloads else None
        yield _RankGroup(ranks, stages, list(own.values()), list(needs), segments, host)


def _host(evaluated: EvaluatedPlan, stages: Sequence[int]) -> OffloadCost:
    """The cost of offloading on ranks with these stages: copies overlap with a stage's shortest compute."""
    link = evaluated.staged.options.device_model.host_link
    shortest = (min(evaluated.plan.stages[stage].cost.seconds.values(), default=0.0) for stage in stages)
    return OffloadCost(sum(shortest) * link.bytes_per_second, 1 / link.bytes_per_second)


def _sharing_stages(placement: Placement) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of ranks that share stages, each with these stages."""
    ranks = {rank for of_stage in placement for rank in of_stage}
    while ranks:
        group, stages = {min(ranks)}, set[int]()
        while found := {stage for rank in group for stage in stages_on(placement, rank)} - stages:
            stages |= found
            group |= {rank for stage in found for rank in placement[stage]}
        ranks -= group
        yield sorted(group), sorted(stages)


def _needs(
    evaluated: EvaluatedPlan, rank: int, values: Mapping[int, Mapping[str, ForwardValue]]
) -> Iterator[_Need]:
    """The memory limit of a rank's saved values at each instruction of a plan without recompute.

    Recompute runs directly before its backward, so that recomputed values are held while the backward runs.
    """
    plan = evaluated.plan
    (program,) = steady_excerpt([evaluated.program(rank)], plan.sync_spec.stream, plan.placement)
    columns = InstructionColumns.of(program.instructions, evaluated.plan.links)
    saved = np.array([_in_flight(columns, stage) for stage in values])
    offloaded = np.array([num_offloaded(columns, stage) for stage in values])
    needed = [
        sum(each.num_bytes for each in of_stage.values() if each.is_needed) for of_stage in values.values()
    ]
    limit = evaluated.memory_limit(rank)
    rooms = limit - evaluated.memory[rank].most + np.array(needed) @ saved
    stages, backward = list(values), np.isin(columns.ops, _READING)
    for number, room in enumerate(rooms.tolist()):
        replaying = stages.index(int(columns.stages[number])) if backward[number] else None
        if room < math.inf:
            in_flight, on_host = (tuple(each[:, number].tolist()) for each in (saved, offloaded))
            yield _Need(in_flight, on_host, replaying, room)


def _in_flight(columns: InstructionColumns, stage: int) -> Ints:
    """The number of microbatches in flight in a stage at each instruction of its rank."""
    computes = columns.is_compute_start & (columns.stages == stage)
    begins, ends = computes & (columns.ops == OP_CODE[Op.FORWARD]), computes & np.isin(columns.ops, _READING)
    in_flight: Ints = np.cumsum(begins) - np.cumsum(ends) + ends
    return in_flight


def _binding(constraints: Sequence[MemoryConstraint]) -> list[MemoryConstraint]:
    """The constraints that no other one implies: one with as little room for as many microbatches."""
    by_room = sorted(set(constraints), key=lambda each: (each.room, -sum(_counts(each))))
    counts, binding = np.array([_counts(each) for each in by_room]), list[int]()
    for number, own in enumerate(counts):
        if not (counts[binding] >= own).all(axis=1).any():
            binding.append(number)
    return [by_room[number] for number in binding]


def _counts(constraint: MemoryConstraint) -> Sequence[int]:
    """The microbatches that hold saved, saved but not offloaded, and recomputed values, by segment."""
    on_device = (saved - gone for saved, gone in zip(constraint.saved, constraint.offloaded, strict=True))
    return (*constraint.saved, *on_device, *constraint.recomputed)


def _split_into_segments(stage: StageValues, count: int) -> list[tuple[int, StageValues]]:
    """The stage in up to ``count`` consecutive segments of about as many bytes, each with its first position.

    Values that a segment reads from earlier ones are always saved. So no segment needs another to be
    recomputed, and boundaries are placed where few bytes cross.
    """
    firsts = _segment_boundaries(stage, count)
    crosses = _values_across(stage, firsts)
    pieces = itertools.pairwise([*firsts, len(stage)])
    return [
        (first, tuple(_of_segment(stage[v], first, v in crosses) for v in range(first, end)))
        for first, end in pieces
    ]


def _segment_boundaries(stage: StageValues, count: int) -> list[int]:
    """The first position of each segment of a stage."""
    sizes = np.cumsum([value.num_bytes * value.is_needed for value in stage])
    across, firsts = _crossing_bytes(stage), [0]
    for number in range(1, count):
        around = np.array([number - 0.5, number + 0.5]) / count * sizes[-1]
        low, high = np.searchsorted(sizes, around).tolist()
        within = range(max(low, firsts[-1] + 1), min(high, len(stage)))
        best = min(within, key=lambda first: across[first], default=0)
        if best and across[best] < math.inf:
            firsts.append(best)
    return firsts


def _values_across(stage: StageValues, firsts: Sequence[int]) -> frozenset[int]:
    """The values that a segment reads from earlier segments."""
    return frozenset(
        u
        for first, end in itertools.pairwise([*firsts, len(stage)])
        for v in range(first, end)
        for u in stage[v].inputs
        if u < first
    )


def _of_segment(value: ForwardValue, first: int, crosses: bool) -> ForwardValue:
    if crosses:
        return replace(value, inputs=(), is_needed=True, is_recomputable=False)
    return replace(value, inputs=tuple(u - first for u in value.inputs if u >= first))


def _crossing_bytes(stage: StageValues) -> Floats:
    """The bytes that each position and later ones read of earlier ones; infinite if one may not be saved."""
    last = {u: v for v, value in enumerate(stage) for u in value.inputs}
    crossing = np.zeros(len(stage) + 1)
    for u, v in last.items():
        crossing[u + 1 : v + 1] += stage[u].num_bytes if stage[u].may_save else math.inf
    return crossing
