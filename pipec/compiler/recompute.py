"""Recompute by budget: what ranks that lack memory compute again or offload, so that a schedule fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.compiler.pass_list import NOTHING_AWAY
from pipec.compiler.staged import Trial
from pipec.ir import Op, Placement, stages_on
from pipec.ir.columns import OP_CODE, Instructions, Ints
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.planner.recompute import Choice, Host, Moment, Stage, Value, fastest_within, smallest
from pipec.planner.segments import segments
from pipec.programs.alike import in_step
from pipec.programs.fold import excerpt
from pipec.programs.offloads import away

_ATTEMPTS = 3
"""How often a choice is made anew until it fits. An attempt knows what the one before lacked."""

_SEGMENTS = (1, 2, 4, 8, 16)
"""The numbers of segments that a stage may be replayed in, in the order in which they are tried."""


_READING = [OP_CODE[Op.BACKWARD], OP_CODE[Op.BACKWARD_INPUT]]
"""What reads what a forward saved, and lets go of it."""


def within_memory(trial: Trial) -> Trial:
    """The same schedule on the same cut, where ranks that lack memory do as little about it as lets them fit.

    They replay, or let values wait on the host, or both, as the options allow. Where they may do both, the
    simulator decides whether it is better to replay alone. Where no choice fits, replaying everything may,
    because what a function holds is not known before it is chosen.
    """
    options = trial.staged.options
    ways = [False] * (options.recompute == "auto") + [True] * (options.offloads and not trial.overlaps)
    tried = [_fitted(trial, offloads) for offloads in ways]
    if options.recompute == "auto" and all(any(each.excess) for each in tried):
        tried.append(_marked(trial, MarkRecompute(None)))
    return min(tried, key=lambda each: each.score)


def _fitted(trial: Trial, offloads: bool) -> Trial:
    """The schedule within memory, where values may wait on the host if it ``offloads``.

    At first a stage replays all at once before its backward, which it can do while it waits. Where that does
    not fit, the backward replays one segment of the stage after the other.

    What a phase function holds besides follows from what is replayed, and is no sum over values. So it is
    taken to be what it is without recompute, and then to be larger by what the attempt before lacked. If no
    attempt fits, the trial is the one that needs least.
    """
    tried, groups = list[Trial](), [group for group in _groups(trial, offloads) if group.lacks(trial)]
    while all(group.choose_fastest() for group in groups):
        tried.append(_replaying(trial, groups))
        lacking = [group for group in groups if group.lacks(tried[-1])]
        if not lacking:
            return tried[-1]
        for group in lacking:
            group.reserve_more(tried[-1])
    for group in groups:
        group.choose_smallest()
    return min([*tried, _replaying(trial, groups)], key=lambda each: each.score)


def _replaying(trial: Trial, groups: Sequence["_Group"]) -> Trial:
    again = MarkRecompute(
        frozenset(name for group in groups for name in group.replayed),
        late=frozenset(stage for group in groups if group.is_late for stage in group.stages),
    )
    return _marked(trial, again, MarkOffload(frozenset(name for group in groups for name in group.offloaded)))


def _marked(trial: Trial, again: MarkRecompute, offload: MarkOffload = NOTHING_AWAY) -> Trial:
    return trial.staged.recomputing(again, offload).trial(trial.schedule, trial.plan.microbatch_size)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a rank may hold of its stages while an instruction runs: ``room`` bytes.

    ``saved`` counts the microbatches that are in flight, by stage, and ``away`` those of them that can be on
    the host. ``replaying`` is the stage whose backward runs, if one does.
    """

    saved: tuple[int, ...]
    away: tuple[int, ...]
    replaying: int | None
    room: float


@dataclass
class _Group:
    """Ranks that have ``stages`` in common, and what these replay and offload.

    ``values`` are those of each stage by name. ``needs`` is what the ranks may hold when. On each of them so
    many bytes are ``reserved``. ``level`` says in how many segments stages are replayed. If there is a
    ``host``, values may wait there.
    """

    ranks: Sequence[int]
    stages: Sequence[int]
    values: Sequence[Mapping[str, Value]]
    needs: Sequence[_Need]
    host: Host | None = None
    level: int = 0
    reserved: float = 0.0
    attempts: int = 0
    replayed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    @property
    def is_late(self) -> bool:
        """Whether backwards replay segment by segment."""
        return _SEGMENTS[self.level] > 1

    def lacks(self, trial: Trial) -> bool:
        """Whether a rank of the group needs more memory than it has."""
        return any(trial.excess[rank] for rank in self.ranks)

    def reserve_more(self, trial: Trial) -> None:
        """Set aside as much more as the trial lacked, or give up the level."""
        self.reserved += max(trial.excess[rank] for rank in self.ranks)
        self.attempts += 1
        if self.attempts == _ATTEMPTS:
            self._next_level()

    def choose_fastest(self) -> bool:
        """Choose in as few segments as fit what takes the least time; False if nothing fits."""
        while self.level < len(_SEGMENTS):
            pieces = self._pieces(self.level)
            if choice := fastest_within(*_numbers(pieces, self.needs, self.reserved), self.host):
                self._take(pieces, choice)
                return True
            self._next_level()
        return False

    def choose_smallest(self) -> None:
        """Choose what needs least memory in any number of segments."""
        least = math.inf
        for level in range(len(_SEGMENTS)):
            pieces = self._pieces(level)
            problem = _numbers(pieces, self.needs, 0.0)
            choice = smallest(*problem, self.host)
            if (excess := choice.excess(*problem)) < least:
                least, self.level = excess, level
                self._take(pieces, choice)

    def _take(self, pieces: Sequence["_Piece"], choice: Choice) -> None:
        self.replayed, self.offloaded = (
            _names(pieces, chosen) for chosen in (choice.replayed, choice.offloaded)
        )

    def _next_level(self) -> None:
        self.level, self.reserved, self.attempts = self.level + 1, 0.0, 0

    def _pieces(self, level: int) -> list["_Piece"]:
        return [
            _Piece(number, list(values)[first : first + len(piece)], piece)
            for number, values in enumerate(self.values)
            for first, piece in segments(tuple(values.values()), _SEGMENTS[level])
        ]


@dataclass(frozen=True)
class _Piece:
    """What is replayed at a time: a stage of the group by its position, or a segment of it."""

    number: int
    names: Sequence[str]
    values: Stage


def _names(pieces: Sequence[_Piece], chosen: Sequence[frozenset[int]]) -> frozenset[str]:
    pairs = zip(pieces, chosen, strict=True)
    return frozenset(piece.names[position] for piece, positions in pairs for position in positions)


def _numbers(
    pieces: Sequence[_Piece], needs: Sequence[_Need], reserved: float
) -> tuple[tuple[Stage, ...], tuple[Moment, ...]]:
    """The problem of what to replay. During a backward, one piece of its stage is replayed at a time."""
    moments = list[Moment]()
    for need in needs:
        saved, gone = (tuple(count[piece.number] for piece in pieces) for count in (need.saved, need.away))
        room, nothing = need.room - reserved, (0,) * len(pieces)
        running = [k for k, piece in enumerate(pieces) if piece.number == need.replaying]
        if len(running) > 1:
            moments += _in_turn(pieces, running, Moment(saved, nothing, room, gone))
        else:
            replayed = tuple(int(k in running) for k in range(len(pieces)))
            moments.append(Moment(saved, replayed, room, gone))
    return tuple(piece.values for piece in pieces), tuple(_highest(moments))


def _in_turn(pieces: Sequence[_Piece], running: Sequence[int], before: Moment) -> Iterator[Moment]:
    """A backward goes through its pieces from the last to the first.

    Each of them is replayed then, and what it has saved is let go of. The gradients that the backward made of
    parameters are held until it is over.
    """
    saved, room = list(before.saved), before.room
    for piece in reversed(running):
        replayed = tuple(int(k == piece) for k in range(len(pieces)))
        yield replace(before, saved=tuple(saved), replayed=replayed, room=room)
        saved[piece] -= 1
        room -= sum(value.gradient_bytes for value in pieces[piece].values)
    yield replace(before, saved=tuple(saved), room=room)


def _groups(trial: Trial, offloads: bool) -> Iterator[_Group]:
    values = trial.staged.forward_values(trial.plan.microbatch_size)
    if trial.staged.options.recompute == "none":
        values = [{name: replace(each, may_replay=False) for name, each in own.items()} for own in values]
    for ranks, stages in _sharing_stages(trial.plan.placement):
        own = {stage: values[stage] for stage in stages}
        different = {(trial.stand_in(rank), trial.memory_limit(rank)): rank for rank in reversed(ranks)}
        needs = dict.fromkeys(need for rank in different.values() for need in _needs(trial, rank, own))
        host = _host(trial, stages) if offloads else None
        yield _Group(ranks, stages, list(own.values()), list(needs), host)


def _host(trial: Trial, stages: Sequence[int]) -> Host:
    """What offloading takes on ranks with these stages: each copies beside its shortest compute."""
    link = trial.staged.options.device_model.host_link
    shortest = (min(trial.plan.stages[stage].cost.seconds.values(), default=0.0) for stage in stages)
    return Host(sum(shortest) * link.bytes_per_second, 1 / link.bytes_per_second)


def _sharing_stages(placement: Placement) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of ranks that have stages in common, each with the stages that they have."""
    ranks = {rank for of_stage in placement for rank in of_stage}
    while ranks:
        group, stages = {min(ranks)}, set[int]()
        while found := {stage for rank in group for stage in stages_on(placement, rank)} - stages:
            stages |= found
            group |= {rank for stage in found for rank in placement[stage]}
        ranks -= group
        yield sorted(group), sorted(stages)


def _needs(trial: Trial, rank: int, values: Mapping[int, Mapping[str, Value]]) -> Iterator[_Need]:
    """What a rank may hold of its stages while each instruction of a trial without recompute runs.

    A replay runs directly before its backward, so that it holds what it made while the backward runs.
    """
    plan = trial.plan
    program = excerpt(in_step(trial.programs), plan.ending.stream, plan.placement)[trial.stand_in(rank)]
    columns = Instructions.of(program.instructions, trial.plan.links)
    saved = np.array([_in_flight(columns, stage) for stage in values])
    gone = np.array([away(columns, stage) for stage in values])
    needed = [
        sum(each.num_bytes for each in of_stage.values() if each.is_needed) for of_stage in values.values()
    ]
    limit = trial.memory_limit(rank)
    rooms = limit - trial.memory[rank].most + np.array(needed) @ saved
    stages, backward = list(values), np.isin(columns.ops, _READING)
    for number, room in enumerate(rooms.tolist()):
        replaying = stages.index(int(columns.stages[number])) if backward[number] else None
        if room < math.inf:
            yield _Need(tuple(saved[:, number].tolist()), tuple(gone[:, number].tolist()), replaying, room)


def _in_flight(columns: Instructions, stage: int) -> Ints:
    """How many microbatches hold what a stage saves while each instruction of its rank runs."""
    cells = columns.is_cell & (columns.stages == stage)
    begins, ends = cells & (columns.ops == OP_CODE[Op.FORWARD]), cells & np.isin(columns.ops, _READING)
    in_flight: Ints = np.cumsum(begins) - np.cumsum(ends) + ends
    return in_flight


def _highest(moments: Sequence[Moment]) -> list[Moment]:
    """Those that are not implied by another."""
    found: list[Moment] = []
    for moment in sorted(set(moments), key=lambda each: (each.room, -sum(_counts(each)))):
        if not any(_implies(other, moment) for other in found):
            found.append(moment)
    return found


def _implies(one: Moment, other: Moment) -> bool:
    """Whether whatever is within the room of ``one`` is within that of ``other``."""
    counts = zip(_counts(one), _counts(other), strict=True)
    return one.room <= other.room and all(mine >= its for mine, its in counts)


def _counts(moment: Moment) -> Sequence[int]:
    """How many microbatches hold what is saved and stays, what is saved and offloaded, what is replayed."""
    there = (saved - away for saved, away in zip(moment.saved, moment.away, strict=True))
    return (*moment.saved, *there, *moment.replayed)
