"""Recompute by budget: what ranks that lack memory compute again or offload, so that a schedule fits."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipec.compiler.pass_list import NO_OFFLOAD
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE, EvaluatedPlan
from pipec.cost.formulas import node_bytes
from pipec.graph.lifetimes import live_bytes
from pipec.ir import Op, Phase, Placement, Plan, StageMemory, stages_on
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.planner.recompute_segments import split_into_segments
from pipec.planner.recompute_solver import (
    ForwardValue,
    MemoryConstraint,
    OffloadCost,
    RecomputeSolution,
    StageValues,
    minimize_excess,
    minimize_seconds,
)
from pipec.programs.lower_periodic import steady_excerpt
from pipec.programs.offload_intervals import num_offloaded
from pipec.programs.representative_replicas import as_in_full_step

_ATTEMPTS = 3
"""How often a choice is made again until it fits. An attempt knows what the one before lacked."""

_SEGMENTS = (1, 2, 4, 8, 16)
"""The numbers of segments that a stage may be recomputed in, in the order in which they are tried."""


_READING_PHASES = (Phase.BACKWARD, Phase.BACKWARD_INPUT)
_READING = [OP_CODE[Op.BACKWARD], OP_CODE[Op.BACKWARD_INPUT]]
"""What reads what a forward saved, and lets go of it."""


def fit_into_memory(evaluated: EvaluatedPlan) -> EvaluatedPlan:
    """The same schedule on the same cut, where ranks that lack memory do as little about it as lets them fit.

    They replay, or let values wait on the host, or both, as the options allow. Where they may do both, the
    simulator decides whether it is better to replay alone. Where no choice fits, replaying everything may,
    because what a function holds is not known before it is chosen.
    """
    options = evaluated.staged.options
    ways = [False] * (options.recompute == "auto") + [True] * (
        options.may_offload and not evaluated.is_asynchronous
    )
    tried = [_fitted(evaluated, offloads) for offloads in ways]
    if options.recompute == "auto" and all(any(each.excess_bytes) for each in tried):
        tried.append(_marked(evaluated, MarkRecompute(None)))
    return min(tried, key=lambda each: each.score)


def _fitted(evaluated: EvaluatedPlan, offloads: bool) -> EvaluatedPlan:
    """The schedule within memory, where values may wait on the host if it ``offloads``.

    At first a stage replays all at once before its backward, which it can do while it waits. Where that does
    not fit, the backward replays one segment of the stage after the other. That can also take less time: so
    it is tried for stages that are clearly slower now than any was before, and the simulator decides.

    What a phase function holds besides follows from what is recomputed, and is no sum over values. So it is
    taken to be what it is without recompute, and then to be larger by what the attempt before lacked. If no
    attempt fits, the evaluated plan is the one that needs least.
    """
    groups = [group for group in _groups(evaluated, offloads) if group.lacks(evaluated)]
    tried = _attempts(evaluated, groups)
    if not tried or any(group.lacks(tried[-1]) for group in groups):
        for group in groups:
            group.choose_smallest()
        tried.append(_replaying(evaluated, groups))
    else:
        for group in groups:
            group.compares = group.busy_seconds(tried[-1]) > (1 + PREDICTION_TOLERANCE) * _slowest(evaluated)
        if any(group.compares for group in groups):
            tried += _attempts(evaluated, groups, _ATTEMPTS)
    return min(tried, key=lambda each: each.score)


def _attempts(
    evaluated: EvaluatedPlan, groups: Sequence["_RankGroup"], most: int | None = None
) -> list[EvaluatedPlan]:
    """Choices of all groups, made again until one fits, or until a group has none left."""
    tried = list[EvaluatedPlan]()
    while len(tried) != most and all(group.choose_fastest() for group in groups):
        tried.append(_replaying(evaluated, groups))
        lacking = [group for group in groups if group.lacks(tried[-1])]
        if not lacking:
            break
        for group in lacking:
            group.reserve_more(tried[-1])
    return tried


def _slowest(evaluated: EvaluatedPlan) -> float:
    """How long the rank with most to do computes for a microbatch."""
    plan = evaluated.plan
    return max(_busy_seconds(plan, ranks, stages) for ranks, stages in _sharing_stages(plan.placement))


def _busy_seconds(plan: Plan, ranks: Sequence[int], stages: Sequence[int]) -> float:
    """How long ranks compute for a microbatch, of which each of them has an equal share."""
    return sum(sum(plan.stages[stage].cost.seconds.values()) for stage in stages) / len(ranks)


def _replaying(evaluated: EvaluatedPlan, groups: Sequence["_RankGroup"]) -> EvaluatedPlan:
    again = MarkRecompute(
        frozenset(name for group in groups for name in group.recomputed),
        in_backward=frozenset(stage for group in groups if group.is_late for stage in group.stages),
    )
    return _marked(
        evaluated, again, MarkOffload(frozenset(name for group in groups for name in group.offloaded))
    )


def _marked(
    evaluated: EvaluatedPlan, again: MarkRecompute, offload: MarkOffload = NO_OFFLOAD
) -> EvaluatedPlan:
    return evaluated.staged.with_recompute(again, offload).evaluate(
        evaluated.schedule, evaluated.plan.microbatch_size
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """What a rank may hold of its stages while an instruction runs: ``room`` bytes.

    ``saved`` counts the microbatches that are in flight, by stage, and ``offloaded`` those of them that can
    be on the host. ``replaying`` is the stage whose backward runs, if one does. What that function holds
    besides takes ``running`` of what is not the room.
    """

    saved: tuple[int, ...]
    offloaded: tuple[int, ...]
    replaying: int | None
    room: float
    running: float


@dataclass
class _RankGroup:
    """Ranks that have ``stages`` in common, and what these replay and offload.

    ``values`` are those of each stage by name, and ``backwards`` what its backward holds. ``needs`` is what
    the ranks may hold when. If there is a ``host``, values may wait there.

    A level says in how many segments stages are recomputed. Of the ``levels`` that may fit, the first one is
    taken, or the fastest one if the group ``compares`` them. On each rank so many bytes are ``reserved``.
    """

    ranks: Sequence[int]
    stages: Sequence[int]
    values: Sequence[Mapping[str, ForwardValue]]
    backwards: Sequence["_Backward"]
    needs: Sequence[_Need]
    host: OffloadCost | None = None
    compares: bool = False
    levels: list[int] = field(default_factory=lambda: list(range(len(_SEGMENTS))))
    level: int = 0
    reserved: Counter[int] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    @property
    def is_late(self) -> bool:
        """Whether backwards replay segment by segment."""
        return _SEGMENTS[self.level] > 1

    def lacks(self, evaluated: EvaluatedPlan) -> bool:
        """Whether a rank of the group needs more memory than it has."""
        return any(evaluated.excess_bytes[rank] for rank in self.ranks)

    def busy_seconds(self, evaluated: EvaluatedPlan) -> float:
        """How long a rank of the group computes for a microbatch."""
        return _busy_seconds(evaluated.plan, self.ranks, self.stages)

    def reserve_more(self, evaluated: EvaluatedPlan) -> None:
        """Reserve as much more as the evaluated plan lacked, or give up the level."""
        self.reserved[self.level] += math.ceil(max(evaluated.excess_bytes[rank] for rank in self.ranks))
        self.attempts[self.level] += 1
        if self.attempts[self.level] == _ATTEMPTS:
            self.levels.remove(self.level)

    def choose_fastest(self) -> bool:
        """Choose what takes the least time, and in how many segments; False if nothing fits."""
        least = math.inf
        for level in tuple(self.levels):
            pieces = self._pieces(level)
            choice = minimize_seconds(*_numbers(pieces, self.needs, self.reserved[level]), self.host)
            if choice is None:
                self.levels.remove(level)
            elif choice.seconds < least:
                least, self.level = choice.seconds, level
                self._take(pieces, choice)
                if not self.compares:
                    break
        return bool(self.levels)

    def choose_smallest(self) -> None:
        """Choose what needs least memory in any number of segments."""
        least = math.inf
        for level in range(len(_SEGMENTS)):
            pieces = self._pieces(level)
            problem = _numbers(pieces, self.needs, 0.0)
            choice = minimize_excess(*problem, self.host)
            if (excess := choice.excess_bytes(*problem)) < least:
                least, self.level = excess, level
                self._take(pieces, choice)

    def _take(self, pieces: Sequence["_RecomputeSegment"], choice: RecomputeSolution) -> None:
        self.recomputed, self.offloaded = (
            _names(pieces, chosen) for chosen in (choice.recomputed, choice.offloaded)
        )

    def _pieces(self, level: int) -> list["_RecomputeSegment"]:
        found = []
        for number, (values, backward) in enumerate(zip(self.values, self.backwards, strict=True)):
            names = list(values)
            for first, piece in split_into_segments(tuple(values.values()), _SEGMENTS[level]):
                end = first + len(piece)
                found.append(_RecomputeSegment(number, names[first:end], piece, backward.growth(first, end)))
        return found


@dataclass(frozen=True)
class _RecomputeSegment:
    """What is recomputed at a time: a stage of the group by its position, or a segment of it.

    While it is recomputed, the backward holds up to ``made`` bytes beside what was saved and recomputed.
    """

    number: int
    names: Sequence[str]
    values: StageValues
    made: float


@dataclass(frozen=True)
class _Backward:
    """What the backward of a stage holds of what was saved, and of what it made, as each statement runs.

    That is so without recompute. Statements and values have the ``operators`` that they come from.
    """

    operators: Ints
    saved: Ints
    made: Ints
    operators_of_values: Ints

    @classmethod
    def of(cls, evaluated: EvaluatedPlan, stage: int, names: Iterable[str]) -> "_Backward":
        bytes_of = functools.partial(node_bytes, size=evaluated.plan.microbatch_size)
        functions = [f for phase in _READING_PHASES for f in evaluated.stages[stage].phase_functions(phase)]
        held = [
            (node.meta["operator"], saved, made)
            for each in functions
            for node, saved, made in live_bytes(each, bytes_of)
        ]
        operators, saved, made = np.array(held, np.int64).reshape(-1, 3).T
        operators_of_values = np.array([evaluated.staged.operator_numbers[name] for name in names], np.int64)
        return cls(operators, saved, made, operators_of_values)

    def growth(self, first: int, end: int) -> float:
        """How much more it holds in the statements of the values from ``first`` to ``end`` than was saved.

        What it lets go of there has made room for what it makes.
        """
        firsts = self.operators_of_values
        own = np.full(len(self.operators), True)
        if first > 0:
            own &= self.operators >= firsts[first]
        if end < len(firsts):
            own &= self.operators < firsts[end]
        return float((self.saved + self.made)[own].max(initial=0) - self.saved[own].max(initial=0))


def _names(pieces: Sequence[_RecomputeSegment], chosen: Sequence[frozenset[int]]) -> frozenset[str]:
    pairs = zip(pieces, chosen, strict=True)
    return frozenset(piece.names[position] for piece, positions in pairs for position in positions)


def _numbers(
    pieces: Sequence[_RecomputeSegment], needs: Sequence[_Need], reserved: float
) -> tuple[tuple[StageValues, ...], tuple[MemoryConstraint, ...]]:
    """The problem of what to replay. During a backward, one piece of its stage is recomputed at a time."""
    moments = list[MemoryConstraint]()
    for need in needs:
        saved, gone = (
            tuple(count[piece.number] for piece in pieces) for count in (need.saved, need.offloaded)
        )
        running = [k for k, piece in enumerate(pieces) if piece.number == need.replaying]
        moment = MemoryConstraint(saved, (0,) * len(pieces), need.room - reserved, gone)
        if len(running) > 1:
            eased = replace(moment, room=moment.room + need.running)
            moments += _in_turn(pieces, running, eased)
        else:
            moments.append(replace(moment, recomputed=_only(running, pieces)))
    return tuple(piece.values for piece in pieces), tuple(_highest(moments))


def _in_turn(
    pieces: Sequence["_RecomputeSegment"], running: Sequence[int], before: MemoryConstraint
) -> Iterator[MemoryConstraint]:
    """A backward goes through its pieces from the last to the first.

    Each of them is recomputed then, beside what the backward has made by then, such as gradients of
    parameters, which it holds until its end. What the piece has saved is let go of.
    """
    saved = list(before.saved)
    for piece in reversed(running):
        room = before.room - pieces[piece].made
        yield replace(before, saved=tuple(saved), recomputed=_only([piece], pieces), room=room)
        saved[piece] -= 1


def _only(running: Sequence[int], pieces: Sequence["_RecomputeSegment"]) -> tuple[int, ...]:
    return tuple(int(k in running) for k in range(len(pieces)))


def _groups(evaluated: EvaluatedPlan, offloads: bool) -> Iterator[_RankGroup]:
    values = evaluated.staged.forward_values(evaluated.plan.microbatch_size)
    if evaluated.staged.options.recompute == "none":
        values = [
            {name: replace(each, is_recomputable=False) for name, each in own.items()} for own in values
        ]
    for ranks, stages in _sharing_stages(evaluated.plan.placement):
        own = {stage: values[stage] for stage in stages}
        different = {
            (evaluated.representative(rank), evaluated.memory_limit(rank)): rank for rank in reversed(ranks)
        }
        needs = dict.fromkeys(need for rank in different.values() for need in _needs(evaluated, rank, own))
        host = _host(evaluated, stages) if offloads else None
        backwards = [_Backward.of(evaluated, stage, own[stage]) for stage in stages]
        yield _RankGroup(ranks, stages, list(own.values()), backwards, list(needs), host)


def _host(evaluated: EvaluatedPlan, stages: Sequence[int]) -> OffloadCost:
    """What offloading takes on ranks with these stages: each copies beside its shortest compute."""
    link = evaluated.staged.options.device_model.host_link
    shortest = (min(evaluated.plan.stages[stage].cost.seconds.values(), default=0.0) for stage in stages)
    return OffloadCost(sum(shortest) * link.bytes_per_second, 1 / link.bytes_per_second)


def _sharing_stages(placement: Placement) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of ranks that have stages in common, each with these stages."""
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
    """What a rank may hold of its stages while each instruction of an evaluated plan without recompute runs.

    A replay runs directly before its backward, so that it holds what it made while the backward runs.
    """
    plan = evaluated.plan
    program = steady_excerpt(as_in_full_step(evaluated.programs), plan.sync_spec.stream, plan.placement)[
        evaluated.representative(rank)
    ]
    columns = InstructionColumns.of(program.instructions, evaluated.plan.links)
    saved = np.array([_in_flight(columns, stage) for stage in values])
    gone = np.array([num_offloaded(columns, stage) for stage in values])
    needed = [
        sum(each.num_bytes for each in of_stage.values() if each.is_needed) for of_stage in values.values()
    ]
    limit = evaluated.memory_limit(rank)
    rooms = limit - evaluated.memory[rank].most + np.array(needed) @ saved
    stages, backward = list(values), np.isin(columns.ops, _READING)
    running = [_running(plan.stages[stage].cost.memory) for stage in stages]
    for number, room in enumerate(rooms.tolist()):
        replaying = stages.index(int(columns.stages[number])) if backward[number] else None
        if room < math.inf:
            flying, absent = (tuple(each[:, number].tolist()) for each in (saved, gone))
            makes = running[replaying] if replaying is not None else 0.0
            yield _Need(flying, absent, replaying, room, makes)


def _running(memory: StageMemory) -> float:
    """What is counted for what the backward makes itself, besides all that was saved for it."""
    return next(memory.transient[phase] for phase in _READING_PHASES if phase in memory.transient)


def _in_flight(columns: InstructionColumns, stage: int) -> Ints:
    """How many microbatches hold what a stage saves while each instruction of its rank runs."""
    cells = columns.is_compute_start & (columns.stages == stage)
    begins, ends = cells & (columns.ops == OP_CODE[Op.FORWARD]), cells & np.isin(columns.ops, _READING)
    in_flight: Ints = np.cumsum(begins) - np.cumsum(ends) + ends
    return in_flight


def _highest(moments: Sequence[MemoryConstraint]) -> list[MemoryConstraint]:
    """Those that are not implied by another."""
    found: list[MemoryConstraint] = []
    for moment in sorted(set(moments), key=lambda each: (each.room, -sum(_counts(each)))):
        if not any(_implies(other, moment) for other in found):
            found.append(moment)
    return found


def _implies(one: MemoryConstraint, other: MemoryConstraint) -> bool:
    """Whether whatever is within the room of ``one`` is within that of ``other``."""
    counts = zip(_counts(one), _counts(other), strict=True)
    return one.room <= other.room and all(mine >= its for mine, its in counts)


def _counts(moment: MemoryConstraint) -> Sequence[int]:
    """How many microbatches hold what is saved and stays, what is saved and offloaded, what is recomputed."""
    there = (saved - away for saved, away in zip(moment.saved, moment.offloaded, strict=True))
    return (*moment.saved, *there, *moment.recomputed)
