"""Steps of all kinds, and their execution on symbols, which shows what programs mean.

Nothing here looks at how programs are made or verified: it knows what each op does, and not by which table.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bare_programs import plan_of
from example_schedules import tied_links, value
from hypothesis import assume
from hypothesis import strategies as st

from pipec.errors import InputError
from pipec.ir import (
    GRADIENT_PHASES,
    Bucket,
    Instruction,
    Link,
    Mode,
    ModelCollective,
    NonFiniteAction,
    Op,
    Payload,
    Phase,
    Placement,
    Plan,
    Program,
    Schedule,
    ShardingLevel,
    Stage,
    SyncSpec,
    Tail,
    count_ranks,
    replica_counts,
    result_ranks,
    stages_on,
)
from pipec.programs.lower import chain_links, lower
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify_step
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin

EQUAL = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "looped-bfs")


@dataclass(frozen=True)
class Step:
    """What is lowered."""

    schedule: Schedule
    plan: Plan

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    @property
    def sync_spec(self) -> SyncSpec:
        return self.plan.sync_spec

    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, self.plan)

    def verify(self, programs: Sequence[Program]) -> None:
        verify_step(self.plan, programs)


ROWS = value("z_rows", "b", 4)


def make_step(
    schedule: Schedule,
    *,
    links: Sequence[Link] = (),
    tied: tuple[int, int] | None = None,
    num_segments: int = 1,
    recompute: Collection[int] = (),
    offload: Collection[int] = (),
    precomputes: bool = False,
    tail: bool = False,
    collectives: bool = False,
    mode: Mode = Mode.TRAIN,
    **options: object,
) -> Step:
    """A chain of the stages of a schedule, and ``links`` beside it.

    Gradients are made in ``num_segments`` segments. Each stage with replicas has a bucket for each of these,
    and one for what it lends; with ``weights_on_host``, so has every stage, and one that is frozen, as have
    replicas that share parameters. With
    ``collectives``, the last stage has three model collectives, and with ``tail`` it has a tail. In the
    ``mode`` OUTPUTS the script computes the loss.
    """
    if mode is Mode.OUTPUTS:
        schedule = with_forwards_first(schedule)
    phases = {cell.phase for order in schedule.orders for cell in order}
    links, buckets = [*chain_links(schedule.num_stages, training=phases != {Phase.FORWARD}), *links], []
    if tied:
        lent, brought = tied_links(*tied)
        links += [lent, Link(brought.source, brought.target, Payload.WEIGHT_GRADIENT, lent.values)]
    for stage, ranks in enumerate(schedule.placement):
        on_host = bool(options.get("weights_on_host")) and len(ranks) == 1
        made = functools.partial(Bucket, stage, on_host=on_host)
        if len(ranks) > 1 or on_host:
            buckets += [made((value(f"w_{stage}.{k}", 6),), segment=k) for k in range(num_segments)]
        if on_host or (len(ranks) > 1 and options.get("shard") is ShardingLevel.PARAMETERS):
            buckets.append(made((value(f"frozen_{stage}", 6),), trained=False))
        if tied and tied[0] == stage and (len(ranks) > 1 or on_host):
            buckets.append(made(lent.values, is_tied=True))
    stages = range(schedule.num_stages) if num_segments > 1 else ()
    segments = {(stage, phase): num_segments for stage in stages for phase in phases & {*GRADIENT_PHASES}}
    last, backward = (
        schedule.num_stages - 1,
        min(phases - {Phase.FORWARD, Phase.BACKWARD_WEIGHT}, default=None),
    )
    model_collectives = {}
    if collectives:
        segments |= {(last, Phase.FORWARD): 3, (last, backward): 2}
        kinds = (Op.ALL_GATHER, Phase.FORWARD, 1), (Op.ALL_REDUCE, Phase.FORWARD, 2)
        model_collectives[last] = tuple(
            ModelCollective(op, phase, segment, value(f"{op}_{segment}", "b", 8))
            for op, phase, segment in (*kinds, (Op.REDUCE_SCATTER, backward, 1))
        )
    sync_spec = SyncSpec(tuple(buckets), stream=schedule.stream, **options)  # type: ignore[arg-type]
    plan = plan_of(schedule, links, recompute, sync_spec, segments, model_collectives, offload)
    stages_made = [
        replace(each, precomputed_phases=tuple(phases) if precomputes else ()) for each in plan.stages
    ]
    stages_made[-1] = replace(stages_made[-1], tail=Tail((ROWS,), (ROWS,)) if tail else None)
    return Step(schedule, replace(plan, mode=mode, stages=tuple(stages_made)))


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
        weights_on_host=draw(st.booleans()),
        num_segments=draw(st.integers(1, 3)),
    )


class Wrong(Exception):
    """Programs that do not do what their step should."""


COLLECTIVES = {
    *(Op.SUM_COUNTS, Op.GATHER_ROWS, Op.REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.GRAD_NORM, Op.UNSHARD),
    *(Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER),
}
MODEL_COLLECTIVES = {Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER}
COPIES = (Op.OFFLOAD, Op.WAIT_OFFLOAD, Op.PREFETCH, Op.WAIT_PREFETCH)
"""The order in which saved values go to the host and come back."""

PHASES = {Op(phase): phase for phase in Phase if phase is not Phase.TAIL}

Cell = tuple[int, int]
"""A stage and a microbatch."""

Gradients = Counter[Cell]
"""A sum of gradients: how often it has that of a stage and a microbatch."""

Message = tuple[Link, int]
"""A link and a microbatch, -1 if it is sent once."""


@dataclass
class _Rank:
    """What a rank has done, and what it holds.

    ``over`` counts the segments of each phase; ``made`` has the gradients that the last compute made, until
    they are accumulated; ``started`` the results of collectives that are not awaited yet. ``slots`` has what
    is in the buffers that messages are received into, or will be, and ``launched`` how many messages of each
    pair of ranks have to come before the next compute.
    """

    position: int = 0
    over: Counter[tuple[Phase, int, int]] = field(default_factory=Counter)
    freed: set[Cell] = field(default_factory=set)
    copied: dict[Cell, Op] = field(default_factory=dict)
    precomputed: set[Cell] = field(default_factory=set)
    posted: dict[tuple[Message, int], int] = field(default_factory=dict)
    arrived: dict[tuple[Message, int], int] = field(default_factory=dict)
    launched: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[tuple[Link, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, str], Gradients] = field(default_factory=lambda: defaultdict(Counter))
    made: dict[tuple[int, int, int], set[str]] = field(default_factory=dict)
    started: dict[Instruction, Any] = field(default_factory=dict)
    sums: dict[int, Gradients] = field(default_factory=lambda: defaultdict(Counter))
    gathered: dict[int, set[bool]] = field(default_factory=dict)
    exchanged: set[tuple[int, int, int]] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    tails: set[int] = field(default_factory=set)
    versions: Counter[int] = field(default_factory=Counter)
    stashed: set[Cell] = field(default_factory=set)
    averaged: Counter[int] = field(default_factory=Counter)
    counted: set[int] = field(default_factory=set)
    norms: set[Cell] = field(default_factory=set)
    checks: set[Cell] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    paused: set[int] = field(default_factory=set)


@dataclass
class SymbolicExecution:
    """Executes programs on symbols, as ranks do that wait for each other at every collective.

    ``waits_for`` is what waits for messages in the worst case: a send until its receive is posted, or a
    compute until all messages have come whose receives were posted before the compute in front of it, behind
    which a GPU launches them. It raises ``Wrong`` where ranks wait for ever
    or meet in different collectives, where something is read that is not there any more or not yet, a
    gradient is counted twice or not at all, or weights are not those of the step.
    """

    step: Step
    programs: Sequence[Program]
    waits_for: Literal["receives", "messages"] = "receives"

    def __post_init__(self) -> None:
        self.plan, self.sync_spec = self.step.plan, self.step.sync_spec
        self.placement, self.replicas = self.step.placement, replica_counts(self.step.placement)
        self.stages: Mapping[int, Stage] = {each.index: each for each in self.plan.stages}
        self.ranks = [_Rank() for _ in self.programs]
        self.sends: dict[tuple[int, int], list[tuple[Message, Gradients]]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def run(self) -> None:
        while any(self._advance(rank) for rank in range(len(self.ranks))):
            pass
        for rank, (state, program) in enumerate(zip(self.ranks, self.programs, strict=True)):
            self._require(state.position == len(program.instructions), f"rank {rank} is stuck")
            self._check_end(rank, state)
        for pair in {*self.sends, *self.receives}:
            self._require(len(self.sends[pair]) == len(self.receives[pair]), "a message without a receive")

    def _require(self, holds: object, what: str) -> None:
        if not holds:
            raise Wrong(what)

    # which instruction runs next

    def _advance(self, rank: int) -> bool:
        state, instructions = self.ranks[rank], self.programs[rank].instructions
        if state.position == len(instructions):
            return False
        each = instructions[state.position]
        if each.op in COLLECTIVES:
            return self._meet(each)
        if each.op in (Op.LOAD, Op.STORE):
            self._require(each.stage in self.stages, "no such stage")
            self._collect([(rank, each)])
            state.position += 1
            return True
        if not self._can_run(rank, each):
            return False
        self._run(rank, each)
        state.position += 1
        return True

    def _can_run(self, rank: int, each: Instruction) -> bool:
        if each.op is Op.WAIT_RECV:
            return self._brought(rank, each) is not None
        if each.op is Op.SEND and self.waits_for == "receives":
            pair = rank, each.peer
            return len(self.receives[pair]) > len(self.sends[pair])
        if each.op in PHASES and self.waits_for == "messages":
            return all(len(self.sends[pair]) >= count for pair, count in self.ranks[rank].launched.items())
        return True

    def _brought(self, rank: int, each: Instruction) -> Gradients | None:
        """What a message that a rank waits for brings; None if it is not sent yet."""
        sent = dict(self.sends[each.peer, rank])
        return sent.get((each.link, each.microbatch))  # type: ignore[arg-type]

    def _run(self, rank: int, each: Instruction) -> None:
        state, cell = self.ranks[rank], (each.stage, each.microbatch)
        if each.op in PHASES:
            self._compute(rank, each)
            pairs = [(peer, rank) for peer in range(len(self.ranks))]
            state.launched = {pair: len(self.receives[pair]) for pair in pairs}
        elif each.link is not None:
            self._message(rank, each, (each.link, each.microbatch))
        elif each.op in COPIES:
            before = [None, *COPIES][COPIES.index(each.op)]
            self._require(state.copied.get(cell) is before, "copies in another order")
            self._require(self.stages[each.stage].offloaded, "copies of a stage that keeps its values")
            self._require_made(state, Phase.FORWARD, cell)
            state.copied[cell] = each.op
        else:
            self._run_other(rank, each)

    def _run_other(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        match each.op:
            case Op.ACCUMULATE:
                names = state.made.pop((*cell, each.segment), None)
                self._require(names is not None, "adds what is not made")
                self._require(cell not in state.freed, "adds what is freed")
                for name in names or ():
                    state.gradients[stage, name][cell] += 1
            case Op.PRECOMPUTE:
                self._require_weights(state, each)
                state.precomputed.add((stage, each.version))
            case Op.FREE:
                self._require(cell not in state.freed, "freed twice")
                state.freed.add(cell)
            case Op.TAIL:
                self._require(stage in state.rows or self.replicas[stage] == 1, "a tail without rows")
                self._require_all_forwards(rank, stage)
                self._require(stage not in state.tails, "two tails")
                state.tails.add(stage)
            case Op.RESHARD:
                self._require(state.gathered.pop(each.bucket, None) is not None, "nothing to let go of")
                state.precomputed -= {(stage, -1)}
            case Op.STAGE_NORM:
                self._require_complete(rank, each)
                state.norms.add(cell)
            case Op.CHECK:
                self._check(rank, each)
            case Op.STASH:
                self._require(state.versions[stage] == each.version, "stashes another version")
                state.stashed.add((stage, each.version))
            case Op.UPDATE | Op.HOST_UPDATE:
                self._update(rank, each)
            case Op.PAUSE:
                self._pause(rank, each)
            case _:
                self._await(state, each)

    # messages

    def _message(self, rank: int, each: Instruction, message: Message) -> None:
        state, link, key = self.ranks[rank], each.link, (message, each.peer)
        assert link is not None
        match each.op:
            case Op.RECV:
                self._require(key not in state.posted, "received twice")
                self._require_route(link, each, each.peer, rank)
                state.posted[key] = each.slot
                self.receives[each.peer, rank].append(message)
                self._fill(state, each)
            case Op.WAIT_RECV:
                self._require(key in state.posted, "waits for nothing")
                self._require(key not in state.arrived, "awaited twice")
                state.arrived[key] = state.posted[key]
                if link.payload is Payload.MICROBATCH_RESULT:
                    state.results.add(each.microbatch)
            case Op.SEND | Op.MOVE:
                self._send(rank, each, message)
            case Op.ACCUMULATE:
                self._require(key in state.arrived, "adds what has not come")
                brought = self._brought(rank, each)
                self._require(brought, "adds what was added already")
                state.gradients[each.stage, link.values[0].name] += Counter(brought)
                (brought or Counter()).clear()

    def _fill(self, state: _Rank, each: Instruction) -> None:
        if each.link is not None and each.slot >= 0:
            state.slots[each.link, each.slot] = each.microbatch

    def _send(self, rank: int, each: Instruction, message: Message) -> None:
        state, link = self.ranks[rank], each.link
        assert link is not None
        source, target = link.source, each.peer if each.op is Op.SEND else rank
        self._require_route(link, each, rank, target)
        payload: Gradients = Counter()
        match link.payload:
            case Payload.ACTIVATION | Payload.MICROBATCH_RESULT:
                self._require_made(state, Phase.FORWARD, (source, each.microbatch))
            case Payload.GRADIENT:
                phases = [Phase.BACKWARD, Phase.BACKWARD_INPUT]
                self._require_made(state, phases, (source, each.microbatch))
            case Payload.RESULT:
                self._require_all_forwards(rank, source)
                self._require(not self.stages[source].tail or source in state.tails, "before the tail")
            case Payload.WEIGHT:
                for number in self.sync_spec.buckets_of(source):
                    bucket = self.sync_spec.buckets[number]
                    if bucket.on_host and {*bucket.names} & {*link.names}:
                        self._require(state.gathered.get(number) == {False}, "lends what is on the host")
                self._require(not state.versions[source], "lends weights after the update")
            case Payload.WEIGHT_GRADIENT:
                self._require(not state.made, "sends gradients that are not complete")
                payload = state.gradients.pop((source, link.values[0].name), Counter())
        if each.op is Op.MOVE:
            self._require((message, -1) not in state.arrived, "moved twice")
            state.arrived[message, -1] = each.slot
            self._fill(state, each)
            if link.payload is Payload.WEIGHT_GRADIENT:
                state.gradients[link.target, link.values[0].name] += payload
            return
        pair, sent = (rank, target), self.sends[rank, target]
        sent.append((message, payload))
        expected = self.receives[pair][: len(sent)]
        if len(expected) == len(sent):
            self._require(expected[-1] == message, "received in another order than sent")
        self._require(message not in dict(sent[:-1]), "sent twice")

    def _require_route(self, link: Link, each: Instruction, source: int, target: int) -> None:
        """A message goes from the replica that makes it to the one that reads it."""
        self._require((each.microbatch >= 0) == link.payload.per_microbatch, "another number of microbatches")
        ends = [(link.source, source)] + ([] if link.is_broadcast else [(link.target, target)])
        for stage, rank in ends:
            ranks = self.placement[stage]
            self._require(rank in ranks, "a message of another rank")
            if each.microbatch >= 0:
                self._require(ranks[each.microbatch % len(ranks)] == rank, "a message of another replica")

    # computes

    def _compute(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        plan, phase = self.stages.get(stage), PHASES[each.op]
        self._require(plan is not None and 0 <= each.microbatch < self.plan.num_microbatches, "no such cell")
        assert plan is not None
        number = self._num_segments(stage, phase)
        ranks = self.placement[stage]
        self._require(ranks[each.microbatch % len(ranks)] == rank, "computed by another replica")
        self._require(not state.made, "computes before gradients are accumulated")
        self._require(cell not in state.freed, "computes with what is freed")
        self._require(stage in state.counted or stage not in self.sync_spec.count_stages, "without counts")
        self._require_messages(state, each, phase)
        self._require_weights(state, each)
        if phase in plan.precomputed_phases:
            self._require((stage, each.version) in state.precomputed, "before what it reads is precomputed")
        if phase is Phase.FORWARD:
            self._require(not state.averaged[stage], "a forward after the average")
        else:
            self._require_order(state, phase, cell, plan)
        for part in range(number) if each.segment < 0 else (each.segment,):
            self._require(state.over[phase, *cell] == part, "segments that are not one after the other")
            for place, collective in enumerate(plan.model_collectives):
                if (collective.phase, collective.segment) == (phase, part):
                    self._require((*cell, place) in state.exchanged, "before its collective")
            state.over[phase, *cell] += 1
        if phase is Phase.FORWARD and self._has_results(stage) and state.over[phase, *cell] == number:
            state.results.add(each.microbatch)
        if phase in GRADIENT_PHASES or phase is Phase.BACKWARD_INPUT:
            segments = range(number) if each.segment < 0 else (each.segment,)
            makes = self._parameters(stage) if phase is not Phase.BACKWARD_INPUT else {}
            made = {name for name, part in makes.items() if part % number in segments}
            state.made[*cell, each.segment] = made

    def _require_messages(self, state: _Rank, each: Instruction, phase: Phase) -> None:
        for link in self.plan.links:
            if link.target != each.stage or phase not in link.payload.readers:
                continue
            microbatch = each.microbatch if link.payload.per_microbatch else -1
            came = [slot for (message, _), slot in state.arrived.items() if message == (link, microbatch)]
            self._require(came, "reads what has not come")
            if came[0] >= 0:
                self._require(state.slots[link, came[0]] == microbatch, "reads what was overwritten")

    def _require_order(self, state: _Rank, phase: Phase, cell: Cell, plan: Stage) -> None:
        """A phase behind the forward runs after what it reads."""
        self._require_made(state, Phase.FORWARD, cell)
        is_early = self.plan.mode is Mode.OUTPUTS and not state.paused
        self._require(not is_early or phase is Phase.RECOMPUTE, "a backward before the loss")
        if phase is Phase.RECOMPUTE:
            self._require(plan.recompute, "recomputes what is kept")
        elif phase is Phase.BACKWARD_WEIGHT:
            self._require_made(state, Phase.BACKWARD_INPUT, cell)
        else:
            self._require(state.over[Phase.RECOMPUTE, *cell] or not plan.recompute, "before the recompute")
            self._require(
                cell[0] in state.tails or not (plan.tail and plan.tail.gradients), "before the tail"
            )
        if phase is not Phase.BACKWARD_WEIGHT:
            self._require(state.copied.get(cell) in (None, Op.WAIT_PREFETCH), "reads what is on the host")

    def _require_weights(self, state: _Rank, each: Instruction) -> None:
        """A compute has the weights of the step, or the version that its stream wants."""
        stage, stream = each.stage, self.sync_spec.stream
        for number in self.sync_spec.buckets_of(stage):
            if self.sync_spec.reshards_after_use(self.sync_spec.buckets[number]):
                self._require(state.gathered.get(number) == {False}, "computes without the step's weights")
        if stream is None:
            self._require(not state.versions[stage], "computes after the update")
            return
        wanted = stream.version(each.microbatch, stage, self.replicas)
        self._require(each.version == wanted, "computes with another version")
        held = state.versions[stage] == wanted or (stage, wanted) in state.stashed
        self._require(held, "the version is not there")

    def _require_made(self, state: _Rank, phases: Phase | Sequence[Phase], cell: Cell) -> None:
        """A phase of a microbatch is over, and what it has made is not freed."""
        done = [
            phase
            for phase in ([phases] if isinstance(phases, Phase) else phases)
            if state.over[phase, *cell] == self._num_segments(cell[0], phase)
        ]
        self._require(done, "reads what is not made")
        self._require(cell not in state.freed, "reads what is freed")

    def _require_all_forwards(self, rank: int, stage: int) -> None:
        for microbatch in self._own_microbatches(rank, stage):
            over = self.ranks[rank].over[Phase.FORWARD, stage, microbatch]
            self._require(over == self._num_segments(stage, Phase.FORWARD), "before the last forward")

    def _num_segments(self, stage: int, phase: Phase) -> int:
        return len(self.stages[stage].segments.get(phase, (1.0,)))

    def _own_microbatches(self, rank: int, stage: int) -> range:
        ranks = self.placement[stage]
        return range(ranks.index(rank), self.plan.num_microbatches, len(ranks))

    def _has_results(self, stage: int) -> bool:
        kinds = {link.payload for link in self.plan.links if link.source == stage}
        return Payload.MICROBATCH_RESULT in kinds

    def _parameters(self, stage: int) -> dict[str, int]:
        """The parameters of a stage, each with the part that completes its gradient; -1 is the last one."""
        tied = [link for link in self.plan.links if link.payload is Payload.WEIGHT]
        buckets = [self.sync_spec.buckets[number] for number in self.sync_spec.buckets_of(stage)]
        own = {
            name: -1 if bucket.is_tied else bucket.segment
            for bucket in buckets
            for name in (bucket.names if bucket.trained else ())
        }
        lent = {v.name: -1 for x in tied if stage in (x.source, x.target) for v in x.values}
        return {**(own or {f"w_{stage}": -1}), **lent}

    # collectives

    def _meet(self, each: Instruction) -> bool:
        """The collective that a rank has come to, if all others of its group have come to one."""
        everyone = range(len(self.ranks))

        def group(other: Instruction) -> Sequence[int]:
            return everyone if other.op is Op.GRAD_NORM else self.placement[other.stage]

        self._require(each.op is Op.GRAD_NORM or each.stage in self.stages, "no such stage")
        members, met = [*group(each)], list[Instruction]()
        for rank in members:
            state, instructions = self.ranks[rank], self.programs[rank].instructions
            if state.position == len(instructions):
                return False
            met.append(instructions[state.position])
        if any(other.op not in COLLECTIVES or {*group(other)} != {*members} for other in met):
            return False
        rounds = {self._without_replica(other) for other in met}
        self._require(len(rounds) == 1, f"different collectives meet: {met}")
        self._collect([*zip(members, met, strict=True)])
        for rank in members:
            self.ranks[rank].position += 1
        return True

    def _without_replica(self, each: Instruction) -> Instruction:
        """A collective as all its members have it: model collectives are of a round of microbatches."""
        count = self.replicas[each.stage] if each.op in MODEL_COLLECTIVES else 1
        return replace(each, microbatch=each.microbatch // count)

    def _collect(self, met: Sequence[tuple[int, Instruction]]) -> None:
        total, each = Gradients(), met[0][1]
        if each.op in (Op.REDUCE_GRAD, Op.STORE):
            self._require(0 <= each.bucket < len(self.sync_spec.buckets), "no such bucket")
            for rank, _ in met:
                for name in self.sync_spec.buckets[each.bucket].names:
                    total += self.ranks[rank].gradients.pop((each.stage, name), Counter())
        versions = {bool(self.ranks[rank].versions[each.stage]) for rank, _ in met}
        for rank, own in met:
            state, cell = self.ranks[rank], (each.stage, own.microbatch)
            self._require(own not in state.started, "started twice")
            if each.op in (Op.REDUCE_GRAD, Op.STORE, Op.GRAD_NORM):
                self._require(not state.made, "reads gradients before they are accumulated")
            if each.op in MODEL_COLLECTIVES:
                collective = self.stages[each.stage].model_collectives[own.model_collective]
                self._require(collective.op is own.op, "another collective")
                self._require(state.over[collective.phase, *cell] == collective.segment, "before its input")
            elif each.op is Op.GATHER_ROWS:
                self._require_all_forwards(rank, each.stage)
            elif each.op is Op.AVERAGE_BUFFERS:
                state.averaged[each.stage] += 1
            if each.op is Op.GRAD_NORM:
                self._require(not state.norms, "two norms")
                for stage in stages_on(self.placement, rank):
                    self._check_gradients(rank, stage, self._every_microbatch)
                state.norms.add((-1, -1))
            else:
                state.started[own] = versions if each.op in (Op.UNSHARD, Op.LOAD) else total

    def _await(self, state: _Rank, each: Instruction) -> None:
        """What a collective has made is there from now on."""
        started = replace(each, op=Op(each.op.removeprefix("wait_")))
        self._require(started in state.started, "waits for nothing")
        result = state.started.pop(started)
        match each.op:
            case Op.WAIT_REDUCE_GRAD | Op.WAIT_STORE:
                state.sums[each.bucket] += result
            case Op.WAIT_SUM_COUNTS:
                state.counted.add(each.stage)
            case Op.WAIT_GATHER_ROWS:
                state.rows.add(each.stage)
            case Op.WAIT_UNSHARD | Op.WAIT_LOAD:
                self._require(each.bucket not in state.gathered, "gathered twice")
                state.gathered[each.bucket] = result
            case _ if started.op in MODEL_COLLECTIVES:
                state.exchanged.add((each.stage, each.microbatch, each.model_collective))

    # updates

    def _round(self, each: Instruction) -> range:
        """The microbatches whose gradients an update uses."""
        stream = self.sync_spec.stream
        if stream is None:
            return self._every_microbatch
        count = stream.microbatches_per_update(each.stage, self.replicas)
        self._require(each.microbatch >= 0 and each.microbatch % count == 0, "not the first of a round")
        last = min(each.microbatch + count, self.plan.num_microbatches)
        return range(each.microbatch, last)

    def _require_complete(self, rank: int, each: Instruction) -> None:
        self._require(not self.ranks[rank].made, "reads gradients before they are accumulated")
        self._check_gradients(rank, each.stage, self._round(each))

    def _check(self, rank: int, each: Instruction) -> None:
        state = self.ranks[rank]
        if self.sync_spec.stream is None:
            self._require(state.norms, "checks before the norm")
        else:
            self._require_complete(rank, each)
            if any(link.payload is Payload.MICROBATCH_RESULT for link in self.plan.links):
                self._require(state.results >= {*self._round(each)}, "checks before the losses have come")
        state.checks.add((each.stage, each.microbatch))

    def _update(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        self._require(rank in self.placement[stage], "updates another rank's stage")
        self._require_complete(rank, each)
        if stream := self.sync_spec.stream:
            self._require(cell in state.norms or not self.sync_spec.clips, "an update before its norm")
            self._require(cell in state.checks or not self.sync_spec.on_nan, "an update before its check")
            self._require(each.version == state.versions[stage] + 1, "updates in another order")
            size = stream.microbatches_per_update(stage, self.replicas)
            self._require(each.version == each.microbatch // size + 1, "an update of another round")
            for number in (buckets := self.sync_spec.buckets_of(stage)):
                state.sums.pop(number, None)
            for name in () if buckets else self._parameters(stage):
                state.gradients.pop((stage, name), None)
        else:
            self._require(not state.versions[stage], "updated twice")
            self._require(state.norms or not self.sync_spec.has_grad_norm, "an update before the norm")
            self._require(state.checks or not self.sync_spec.may_skip_step, "an update before the check")
            plan = self.stages[stage]
            self._require(stage in state.tails or not plan.tail, "an update before the tail")
        state.versions[stage] += 1

    def _pause(self, rank: int, each: Instruction) -> None:
        """The script asks for the loss of a mini-batch when it has those of all before.

        Or it computes the loss of the results, while nothing is under way.
        """
        state, stream = self.ranks[rank], self.sync_spec.stream
        if self.plan.mode is Mode.OUTPUTS:
            self._pause_for_loss(rank, state)
        self._require(stream is not None or self.plan.mode is Mode.OUTPUTS, "a script that asks for nothing")
        self._require(each.microbatch not in state.paused, "paused twice")
        first = each.microbatch // stream.microbatches * stream.microbatches if stream else 0
        if any(link.payload is Payload.MICROBATCH_RESULT for link in self.plan.links):
            self._require(state.results >= {*range(first)}, "a script that waits for ever")
        state.paused.add(each.microbatch)

    def _pause_for_loss(self, rank: int, state: _Rank) -> None:
        for stage in stages_on(self.placement, rank):
            self._require_all_forwards(rank, stage)
        self._require(not state.started, "a collective that runs during the pause")
        self._require(state.posted.keys() <= state.arrived.keys(), "a message that comes during the pause")
        is_still = {*state.copied.values()} <= {Op.WAIT_OFFLOAD}
        self._require(is_still, "a copy that runs during the pause, or is back before it")
        kept = {number for number, late in state.gathered.items() if late != {True}}
        self._require(not kept, "parameters that are gathered during the pause")
        for link in (each for each in self.plan.links if each.payload is Payload.RESULT):
            makers, readers = self.placement[link.source], result_ranks(link, self.placement)
            for peer in readers if rank in makers else ():
                sent = [message for message, _ in self.sends[rank, peer]]
                self._require(peer == rank or (link, -1) in sent, "a result that is sent behind the pause")
            came = {peer for message, peer in state.arrived if message == (link, -1)}
            is_complete = rank not in readers or came >= {*makers} - {rank}
            self._require(is_complete, "a result that comes behind the pause")

    def _check_gradients(self, rank: int, stage: int, microbatches: Sequence[int]) -> None:
        """All gradients that a rank updates with are complete, each counted once."""
        state = self.ranks[rank]
        for name in self._owned(stage):
            bucket = next(
                (k for k in self.sync_spec.buckets_of(stage) if name in self.sync_spec.buckets[k].names),
                None,
            )
            found = state.gradients.get((stage, name), Counter()) if bucket is None else state.sums[bucket]
            if bucket is not None and self.sync_spec.stream is None:
                self._require(not state.gradients.get((stage, name)), f"{name} has unsummed gradients")
            expected = Counter((of, mb) for of in self._users(stage, name) for mb in microbatches)
            self._require(found == expected, f"{name} of stage {stage} has gradients {dict(found)}")

    @property
    def _every_microbatch(self) -> range:
        return range(self.plan.num_microbatches)

    def _owned(self, stage: int) -> set[str]:
        borrowed = {
            value.name
            for link in self.plan.links
            if link.payload is Payload.WEIGHT and link.target == stage
            for value in link.values
        }
        return {*self._parameters(stage)} - borrowed

    def _users(self, stage: int, name: str) -> set[int]:
        tied = [link for link in self.plan.links if link.payload is Payload.WEIGHT]
        return {stage, *(x.target for x in tied if x.values[0].name == name)}

    # the end

    def _check_end(self, rank: int, state: _Rank) -> None:
        sync_spec = self.sync_spec
        self._require(
            bool(state.paused) or self.plan.mode is not Mode.OUTPUTS, "a loss that is never computed"
        )
        self._require(not state.made, "gradients that are never accumulated")
        self._require(not state.started, "collectives that are never awaited")
        self._require(state.posted.keys() <= state.arrived.keys(), "messages that are never awaited")
        self._require({*state.copied.values()} <= {Op.WAIT_PREFETCH}, "values that are left on the host")
        for stage in stages_on(self.placement, rank):
            self._check_stage(rank, stage)
        results = (each for each in self.plan.links if each.payload.is_result)
        for link in (each for each in results if rank in result_ranks(each, self.placement)):
            for microbatch in self._every_microbatch if link.payload.per_microbatch else (-1,):
                makers = self.placement[link.source]
                makers = [makers[microbatch % len(makers)]] if microbatch >= 0 else makers
                came = any(message == (link, microbatch) for message, _ in state.arrived)
                self._require(came or rank in makers, "a result that does not come")
        if sync_spec.stream is None:
            self._require(bool(state.norms) == sync_spec.has_grad_norm, "a norm too much or too little")

    def _check_stage(self, rank: int, stage: int) -> None:
        state, sync_spec, plan = self.ranks[rank], self.sync_spec, self.stages[stage]
        own = {(stage, microbatch) for microbatch in self._own_microbatches(rank, stage)}
        self._require(own <= state.freed, "what is never freed")
        trains = any(link.payload is Payload.GRADIENT for link in self.plan.links) or len(self.stages) == 1
        for cell in own:
            self._require(state.over[Phase.FORWARD, *cell], "a microbatch without a forward")
        for cell in own if trains else ():
            self._require_over(state, cell)
        self._require((stage in state.tails) == bool(plan.tail), "a tail too much or too little")
        self._require(
            state.averaged[stage] == (stage in sync_spec.buffer_sync_stages), "buffers are not averaged"
        )
        if stream := sync_spec.stream:
            size = stream.microbatches_per_update(stage, self.replicas)
            expected = self.plan.num_microbatches // size
        else:
            expected = int(sync_spec.updates)
        self._require(state.versions[stage] == expected, f"stage {stage} has made other updates")
        if not sync_spec.updates and trains:
            self._check_gradients(rank, stage, self._every_microbatch)
        for number in sync_spec.buckets_of(stage):
            late = sync_spec.shard and not sync_spec.reshards_after_use(sync_spec.buckets[number])
            self._require(state.gathered.get(number) == ({True} if late else None), "wrong weights left")

    def _require_over(self, state: _Rank, cell: Cell) -> None:
        gradients = [phase for phase in GRADIENT_PHASES if state.over[phase, *cell]]
        self._require(len(gradients) == 1, "a microbatch without one backward")


def check_meaning(step: Step, programs: Sequence[Program]) -> None:
    """Raises ``Wrong`` unless the programs do what the step asks for, though sends wait for receives."""
    assert len(programs) == count_ranks(step.placement)
    SymbolicExecution(step, programs, "receives").run()


def check_on_gpus(step: Step, programs: Sequence[Program]) -> None:
    """Raises ``Wrong`` unless programs also finish where launched receives hold computes up.

    Lowered programs do. The verifier does not look at what waits in other places than theirs would lead to.
    """
    SymbolicExecution(step, programs, "messages").run()
