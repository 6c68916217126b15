"""Steps with replicas and endings: drawn at random, and executed on symbols to see what they mean."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bare_programs import lower, verify_programs
from example_schedules import tied_links, value
from hypothesis import assume
from hypothesis import strategies as st

from pipec.errors import InputError
from pipec.ir import (
    GRADIENT_PHASES,
    WAIT_OF,
    Bucket,
    Instruction,
    Link,
    NonFiniteAction,
    Op,
    OpKind,
    Payload,
    Placement,
    Program,
    Schedule,
    SegmentCounts,
    ShardingLevel,
    SyncSpec,
    count_ranks,
    stages_on,
)
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin

EQUAL = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "looped-bfs")


@dataclass(frozen=True)
class Step:
    """What is lowered: a schedule of stages with replicas, links, the sync spec, and phases in segments."""

    schedule: Schedule
    links: tuple[Link, ...]
    sync_spec: SyncSpec
    segments: SegmentCounts

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, self.links, sync_spec=self.sync_spec, segments=self.segments)

    def verify(self, programs: Sequence[Program]) -> None:
        count = self.schedule.num_microbatches
        sync_spec, segments = self.sync_spec, self.segments
        verify_programs(programs, self.placement, self.links, count, sync_spec=sync_spec, segments=segments)


def make_step(
    schedule: Schedule, *, tied: tuple[int, int] | None = None, num_segments: int = 1, **options: object
) -> Step:
    """A chain of the stages of a schedule, whose gradients are made in ``num_segments`` segments.

    Each with replicas has a bucket for each part, and one for what it lends.
    """
    links, buckets = chain_links(schedule.num_stages), []
    if tied:
        lent, brought = tied_links(*tied)
        brought = Link(brought.source, brought.target, Payload.WEIGHT_GRADIENT, lent.values)
        links = (*links, lent, brought)
    for stage in [stage for stage, ranks in enumerate(schedule.placement) if len(ranks) > 1]:
        buckets += [Bucket(stage, (value(f"w_{stage}.{k}", 6),), segment=k) for k in range(num_segments)]
        if tied and tied[0] == stage:
            buckets.append(Bucket(stage, lent.values, is_tied=True))
    phases = {cell.phase for order in schedule.orders for cell in order}
    stages = range(schedule.num_stages) if num_segments > 1 else ()
    segments = {(stage, phase): num_segments for stage in stages for phase in phases & {*GRADIENT_PHASES}}
    return Step(schedule, links, SyncSpec(tuple(buckets), **options), segments)  # type: ignore[arg-type]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Equal pipelines of any schedule side by side, or 1F1B on unequal numbers of replicas."""
    if draw(st.booleans()):
        replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        return round_robin(draw(st.integers(max(replicas), 7)), replicas)
    name, ranks = draw(st.sampled_from(EQUAL)), draw(st.integers(1, 3))
    replicas_of_all = draw(st.integers(1, 3))
    count = draw(st.integers(replicas_of_all, 8))
    make = functools.partial(make_schedule, name, ranks)
    try:
        return replicate_schedule(make, count, replicas_of_all)
    except InputError:  # such as a number of microbatches that the schedule cannot do with
        assume(False)
        raise


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step of a chain, with or without a tied weight, buffers, an optimizer, clipping and shards."""
    schedule = draw(schedules())
    several = [stage for stage, ranks in enumerate(schedule.placement) if len(ranks) > 1]
    pairs = st.permutations(range(schedule.num_stages)).map(lambda order: (order[0], order[1]))
    updates = draw(st.booleans())
    return make_step(
        schedule,
        tied=draw(pairs) if schedule.num_stages > 1 and draw(st.booleans()) else None,
        buffer_sync_stages=tuple(stage for stage in several if draw(st.booleans())),
        count_stages=tuple(stage for stage in several if draw(st.booleans())),
        updates=updates,
        clips=updates and draw(st.booleans()),
        on_nan=draw(st.sampled_from([None, *NonFiniteAction])),
        shard=draw(st.sampled_from([None, *ShardingLevel])) if updates else None,
        num_segments=draw(st.integers(1, 3)),
    )


class Wrong(Exception):
    """A step that does not do what it should."""


Message = tuple[Link, int, int]
"""A link, a microbatch, and the rank that sends it."""


@dataclass
class _Rank:
    """What a rank holds. Gradients are counted by the stage and microbatch that they come from.

    ``made`` has those that the last compute made, until they are accumulated; ``started`` the results of
    collectives that are not awaited yet.
    """

    position: int = 0
    over: Counter[tuple[Op, int, int]] = field(default_factory=Counter)
    forwards: Counter[tuple[int, int]] = field(default_factory=Counter)
    gradients: dict[tuple[int, str], Counter[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    made: dict[Instruction, set[str]] = field(default_factory=dict)
    started: dict[Instruction, object] = field(default_factory=dict)
    sums: dict[int, Counter[tuple[int, int]]] = field(default_factory=lambda: defaultdict(Counter))
    gathered: dict[int, set[bool]] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    posted: set[Message] = field(default_factory=set)
    arrived: set[Message] = field(default_factory=set)
    averaged: Counter[int] = field(default_factory=Counter)
    counted: set[int] = field(default_factory=set)
    has_norm: bool = False
    is_checked: bool = False


class SymbolicExecution:
    """Executes programs on symbols, as ranks do that wait for each other at every collective.

    Nothing here looks at how programs are made or verified. It raises ``Wrong`` where a gradient is counted
    twice or not at all, weights are not those of the step, or ranks meet in different collectives.
    """

    def __init__(self, step: Step, programs: Sequence[Program]) -> None:
        self.step, self.programs = step, programs
        self.ranks = [_Rank() for _ in programs]
        self.sent: dict[tuple[Link | None, int, int, int], Counter[tuple[int, int]]] = {}

    def run(self) -> None:
        while any(self._advance(rank) for rank in range(len(self.ranks))):
            pass
        for rank, (state, program) in enumerate(zip(self.ranks, self.programs, strict=True)):
            self._require(state.position == len(program.instructions), f"rank {rank} is stuck")
            self._check_end(rank, state)

    def _advance(self, rank: int) -> bool:
        state, instructions = self.ranks[rank], self.programs[rank].instructions
        if state.position == len(instructions):
            return False
        each = instructions[state.position]
        if each.op.traits.kind is OpKind.COLLECTIVE:
            return self._meet(each)
        if not self._can_run(rank, each):
            return False
        self._run(rank, each)
        state.position += 1
        return True

    def _can_run(self, rank: int, each: Instruction) -> bool:
        return each.op is not Op.WAIT_RECV or (each.link, each.microbatch, each.peer, rank) in self.sent

    def _run(self, rank: int, each: Instruction) -> None:
        state, stage = self.ranks[rank], each.stage
        message = each.link, each.microbatch, each.peer
        match each.op:
            case Op.RECV:
                self._require(message not in state.posted, "received twice")
                state.posted.add(message)  # type: ignore[arg-type]
            case Op.WAIT_RECV:
                self._require(message in state.posted, "waits for nothing")
                self._require(message not in state.arrived, "awaited twice")
                state.arrived.add(message)  # type: ignore[arg-type]
            case Op.SEND | Op.MOVE:
                self._send(rank, each)
            case Op.ACCUMULATE if each.link:
                self._require(message in state.arrived, "adds what has not come")
                name = each.link.values[0].name
                state.gradients[stage, name] += self.sent.pop((*message, rank))  # type: ignore[arg-type]
            case Op.ACCUMULATE:
                names = state.made.pop(replace(each, op=Op.BACKWARD), None)
                self._require(names is not None, "adds what is not made")
                for name in names or ():
                    state.gradients[stage, name][stage, each.microbatch] += 1
            case Op.CHECK:
                self._require(state.has_norm, "checks before the norm")
                state.is_checked = True
            case Op.UPDATE:
                self._require(stage not in state.updated, "updated twice")
                self._require(
                    state.has_norm or not self.step.sync_spec.has_grad_norm, "update before the norm"
                )
                self._require(
                    state.is_checked or not self.step.sync_spec.may_skip_step, "update before the check"
                )
                self._check_gradients(rank, stage)
                state.updated.add(stage)
            case Op.RESHARD:
                self._require(state.gathered.pop(each.bucket, None) is not None, "nothing to let go of")
        if each.op.phase:
            self._compute(rank, each)
        elif each.op.traits.awaits not in (None, Op.RECV):
            self._await(state, each)

    def _await(self, state: _Rank, each: Instruction) -> None:
        """What a collective has made is there from now on."""
        started = replace(each, op=each.op.traits.awaits or each.op)
        self._require(started in state.started, "waits for nothing")
        result: Any = state.started.pop(started)
        if each.op is Op.WAIT_REDUCE_GRAD:
            state.sums[each.bucket] += result
        elif each.op is Op.WAIT_SUM_COUNTS:
            state.counted.add(each.stage)
        elif each.op is Op.WAIT_UNSHARD:
            self._require(each.bucket not in state.gathered, "gathered twice")
            state.gathered[each.bucket] = result

    def _send(self, rank: int, each: Instruction) -> None:
        link = each.link
        assert link is not None
        target = each.peer if each.op is Op.SEND else rank
        payload: Counter[tuple[int, int]] = Counter()
        if link.payload is Payload.WEIGHT_GRADIENT:
            self._require(not self.ranks[rank].made, "sends gradients that are not complete")
            payload = self.ranks[rank].gradients.pop((link.source, link.values[0].name), Counter())
        if link.payload is Payload.WEIGHT:
            self._require(link.source not in self.ranks[rank].updated, "lends weights after the update")
        if each.op is Op.MOVE:
            self.ranks[rank].arrived.add((link, each.microbatch, rank))
            if link.payload is Payload.WEIGHT_GRADIENT:
                self.ranks[rank].gradients[link.target, link.values[0].name] += payload
        self.sent[link, each.microbatch, rank, target] = payload

    def _compute(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        self._require(not state.made, "computes before gradients are accumulated")
        needs_counts = stage in self.step.sync_spec.count_stages
        self._require(stage in state.counted or not needs_counts, "computes before its counts are summed")
        for link in self.step.links:
            if link.target == stage and each.op.phase in link.payload.readers:
                microbatch = each.microbatch if link.payload.per_microbatch else -1
                ranks = self.step.placement[link.source]
                source = ranks[microbatch % len(ranks)] if microbatch >= 0 else -1
                came = {at for of, mb, at in state.arrived if (of, mb) == (link, microbatch)}
                self._require(bool(came) if source < 0 else source in came, "reads what has not come")
        self._require(stage not in state.updated, "computes after the update")
        for number in self.step.sync_spec.buckets_of(stage):
            if self.step.sync_spec.reshards_after_use(self.step.sync_spec.buckets[number]):
                self._require(state.gathered.get(number) == {False}, "computes without the step's weights")
        if each.op is Op.FORWARD:
            self._require(not state.averaged[stage], "forward after the average")
            state.forwards[cell] += 1
        number = self.step.segments.get((stage, each.op.phase), 1)  # type: ignore[arg-type]
        segments = range(number) if each.segment < 0 else (each.segment,)
        for part in segments:
            self._require(state.over[each.op, *cell] == part, "segments that are not one after the other")
            state.over[each.op, *cell] += 1
        if each.op.phase in GRADIENT_PHASES or each.op is Op.BACKWARD_INPUT:
            makes = self._parameters(stage) if each.op is not Op.BACKWARD_INPUT else {}
            made = {name for name, part in makes.items() if part % number in segments}
            state.made[Instruction(Op.BACKWARD, *cell, segment=each.segment)] = made

    def _parameters(self, stage: int) -> dict[str, int]:
        """The parameters of a stage, each with the part that completes its gradient; -1 is the last one."""
        tied = [link for link in self.step.links if link.payload is Payload.WEIGHT]
        buckets = [self.step.sync_spec.buckets[number] for number in self.step.sync_spec.buckets_of(stage)]
        own = {name: -1 if bucket.is_tied else bucket.segment for bucket in buckets for name in bucket.names}
        lent = {v.name: -1 for x in tied if stage in (x.source, x.target) for v in x.values}
        return {**(own or {f"w_{stage}": -1}), **lent}

    def _meet(self, each: Instruction) -> bool:
        """The collective that a rank has come to, if all others of its group have come to one."""
        sync_spec, everyone = self.step.sync_spec, range(len(self.ranks))
        members = list(everyone) if each.op is Op.GRAD_NORM else list(self.step.placement[each.stage])
        met = []
        for rank in members:
            state, instructions = self.ranks[rank], self.programs[rank].instructions
            if state.position == len(instructions):
                return False
            met.append(instructions[state.position])
        if any(other.op.traits.kind is not OpKind.COLLECTIVE for other in met):
            return False
        groups = [everyone if x.op is Op.GRAD_NORM else self.step.placement[x.stage] for x in met]
        if any(set(group) != set(members) for group in groups):
            return False
        self._require(all(other == each for other in met), f"{each} meets others in {met}")
        self._collect(each, members, sync_spec)
        for rank in members:
            self.ranks[rank].position += 1
        return True

    def _collect(self, each: Instruction, members: Sequence[int], sync_spec: SyncSpec) -> None:
        total: Counter[tuple[int, int]] = Counter()
        if each.op is Op.REDUCE_GRAD:
            for rank in members:
                for name in sync_spec.buckets[each.bucket].names:
                    total += self._take(rank, each.stage, name)
        versions = {each.stage in self.ranks[rank].updated for rank in members}
        for rank in members:
            state = self.ranks[rank]
            if each.op in (Op.REDUCE_GRAD, Op.GRAD_NORM):
                self._require(not state.made, "reads gradients before they are accumulated")
            self._require(each not in state.started, "started twice")
            if each.op in WAIT_OF:
                state.started[each] = versions if each.op is Op.UNSHARD else total
            if each.op is Op.AVERAGE_BUFFERS:
                state.averaged[each.stage] += 1
            elif each.op is Op.GRAD_NORM:
                self._require(not state.has_norm, "two norms")
                for stage in stages_on(self.step.placement, rank):
                    self._check_gradients(rank, stage)
                state.has_norm = True

    def _take(self, rank: int, stage: int, name: str) -> Counter[tuple[int, int]]:
        """The gradients of a parameter that a rank has accumulated."""
        return self.ranks[rank].gradients.pop((stage, name), Counter())

    def _check_gradients(self, rank: int, stage: int) -> None:
        """All gradients that a rank updates with are complete, each counted once."""
        state, sync_spec = self.ranks[rank], self.step.sync_spec
        for name in self._owned(stage):
            bucket = next(
                (k for k in sync_spec.buckets_of(stage) if name in sync_spec.buckets[k].names), None
            )
            if bucket is None:
                state.gradients[stage, name] = self._take(rank, stage, name)
                found = state.gradients[stage, name]
            else:
                found = state.sums[bucket]
                self._require(not state.gradients.get((stage, name)), f"{name} has unsummed gradients")
            expected = Counter((of, mb) for of in self._users(stage, name) for mb in self._microbatches)
            self._require(found == expected, f"{name} of stage {stage} has gradients {dict(found)}")

    @property
    def _microbatches(self) -> range:
        return range(self.step.schedule.num_microbatches)

    def _owned(self, stage: int) -> set[str]:
        borrowed = {
            value.name
            for link in self.step.links
            if link.payload is Payload.WEIGHT and link.target == stage
            for value in link.values
        }
        return {*self._parameters(stage)} - borrowed

    def _users(self, stage: int, name: str) -> set[int]:
        tied = [link for link in self.step.links if link.payload is Payload.WEIGHT]
        return {stage, *(x.target for x in tied if x.values[0].name == name)}

    def _check_end(self, rank: int, state: _Rank) -> None:
        sync_spec = self.step.sync_spec
        self._require(not state.made, "gradients that are never accumulated")
        self._require(not state.started, "collectives that are never awaited")
        self._require(state.posted <= state.arrived, "messages that are never awaited")
        for stage in stages_on(self.step.placement, rank):
            self._require((stage in state.updated) == sync_spec.updates, f"stage {stage} is not updated")
            self._require(state.has_norm == sync_spec.has_grad_norm, "a norm too much or too little")
            self._require(
                state.averaged[stage] == (stage in sync_spec.buffer_sync_stages), "buffers are not averaged"
            )
            if not sync_spec.updates:
                self._check_gradients(rank, stage)
            for number in sync_spec.buckets_of(stage):
                late = sync_spec.shard and not sync_spec.reshards_after_use(sync_spec.buckets[number])
                self._require(state.gathered.get(number) == ({True} if late else None), "wrong weights left")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Wrong(what)


def check_meaning(step: Step, programs: Sequence[Program]) -> None:
    """Raises ``Wrong`` unless the programs do once what the step asks for, on gradients that are complete."""
    assert len(programs) == count_ranks(step.placement)
    SymbolicExecution(step, programs).run()
