"""Steps of all kinds, and their execution on symbols, which shows what programs mean.

Nothing here looks at how programs are made or verified: it knows what each op does, and not by which table.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bare_programs import plan_of
from example_schedules import result_link, skip_links, tied_links, v_gpipe, value
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
from pipec.schedules import SCHEDULES
from pipec.schedules.replicated import replicate_schedule, round_robin


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
    make = functools.partial(draw(st.sampled_from([*SCHEDULES.values(), v_gpipe])), draw(st.integers(1, 4)))
    replicas_of_all = draw(st.integers(1, 3))
    count = draw(st.integers(replicas_of_all, 12))
    try:
        return replicate_schedule(make, count, replicas_of_all)
    except InputError:  # such as a number of microbatches that the schedule cannot do with
        assume(False)
        raise


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step of a chain, with or without skips, a tied weight, an optimizer, clipping and shards."""
    schedule = draw(schedules())
    stages, last = range(schedule.num_stages), schedule.num_stages - 1
    several = [stage for stage, ranks in enumerate(schedule.placement) if len(ranks) > 1]
    pairs = st.permutations(stages).map(lambda order: (order[0], order[1]))
    skips = {(min(pair), max(pair)) for pair in draw(st.lists(pairs, max_size=4))} if last else set()
    links = [*itertools.chain(*(skip_links(*pair) for pair in sorted(skips))), result_link(last)]
    updates = draw(st.booleans())
    return make_step(
        schedule,
        links=draw(st.permutations(links)),
        recompute=draw(st.lists(st.sampled_from(stages), unique=True)),
        tied=draw(pairs) if last and draw(st.booleans()) else None,
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


def require(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


PHASES = {Op(phase): phase for phase in Phase if phase is not Phase.TAIL}
MODEL_COLLECTIVES = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)
COLLECTIVES = {
    *(Op.SUM_COUNTS, Op.GATHER_ROWS, Op.REDUCE_GRAD, Op.STORE, Op.AVERAGE_BUFFERS, Op.GRAD_NORM),
    *(Op.UNSHARD, Op.LOAD, *MODEL_COLLECTIVES),
}
"""What the replicas of a stage do together, or all ranks, or a rank with its host."""
ONCE = {Op.OFFLOAD, Op.PREFETCH, Op.FREE, Op.TAIL, Op.GRAD_NORM, Op.PAUSE}

Cell = tuple[int, int]
"""A stage and a microbatch."""

Gradients = Counter[Cell]
"""A sum of gradients: how often it has that of a stage and a microbatch."""

Message = tuple[Link, int]
"""A link and a microbatch, -1 if it is sent once."""


@dataclass
class _Rank:
    """What a rank has done, and what it holds.

    ``started`` has the results that are not awaited yet; ``arrived`` the slots of messages that have come,
    and ``returned`` the gradients that these brought. ``slots`` has what is in the buffers that messages are
    received into, or will be, and ``launched`` how many messages of each pair of ranks have to come before
    the next compute. ``made`` has the gradients that the last compute made, until they are accumulated.
    """

    position: int = 0
    done: Counter[tuple[Op, int, int, int]] = field(default_factory=Counter)
    started: dict[Instruction, Any] = field(default_factory=dict)
    arrived: dict[tuple[Message, int], int] = field(default_factory=dict)
    returned: dict[tuple[Message, int], Gradients] = field(default_factory=dict)
    slots: dict[tuple[Link, int], int] = field(default_factory=dict)
    launched: dict[tuple[int, int], int] = field(default_factory=dict)
    made: dict[tuple[int, int, int], set[str]] = field(default_factory=dict)
    gradients: dict[tuple[int, str], Gradients] = field(default_factory=lambda: defaultdict(Counter))
    sums: dict[int, Gradients] = field(default_factory=lambda: defaultdict(Counter))
    gathered: dict[int, set[bool]] = field(default_factory=dict)
    versions: Counter[int] = field(default_factory=Counter)

    def ran(self, op: Op, stage: int = -1, number: int = -1, collective: int = -1) -> int:
        """How often an op ran for a microbatch or a version of a stage; a phase, how many of its segments."""
        return self.done[op, stage, number, collective]

    def note(self, each: Instruction) -> None:
        number = each.version if each.op in (Op.PRECOMPUTE, Op.STASH) else each.microbatch
        fact = each.op, each.stage, number, each.model_collective
        require(each.op not in ONCE or not self.done[fact], f"{each.op} runs twice")
        self.done[fact] += 1

    def fill(self, each: Instruction) -> None:
        if each.link is not None and each.slot >= 0:
            self.slots[each.link, each.slot] = each.microbatch


@dataclass
class SymbolicExecution:
    """Executes programs on symbols, as ranks do that wait for each other at every collective.

    ``waits_for`` is what waits for messages in the worst case: a send until its receive is posted, or a
    compute until all messages have come whose receives were posted before the compute in front of it, behind
    which a GPU launches them. It raises ``Wrong`` where ranks wait for ever or meet in different collectives,
    where something is read that is not there any more or not yet, a gradient is counted twice or not at all,
    or weights are not the weights of the step.
    """

    step: Step
    programs: Sequence[Program]
    waits_for: Literal["receives", "messages"] = "receives"

    def __post_init__(self) -> None:
        self.plan, self.sync_spec = self.step.plan, self.step.sync_spec
        self.placement, self.replicas = self.step.placement, replica_counts(self.step.placement)
        self.stages: Mapping[int, Stage] = {each.index: each for each in self.plan.stages}
        self.microbatches = range(self.plan.num_microbatches)
        self.tied = [link for link in self.plan.links if link.payload is Payload.WEIGHT]
        self.losses = [link for link in self.plan.links if link.payload is Payload.MICROBATCH_RESULT]
        self.ranks = [_Rank() for _ in self.programs]
        self.sends: dict[tuple[int, int], dict[Message, Gradients]] = defaultdict(dict)
        self.receives: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def run(self) -> None:
        while any(self._advance(rank) for rank in range(len(self.ranks))):
            pass
        for rank in range(len(self.ranks)):
            require(self._next(rank) is None, f"rank {rank} is stuck")
            self._check_end(rank)
        for pair in {*self.sends, *self.receives}:
            require(len(self.sends[pair]) == len(self.receives[pair]), "a message without a receive")

    # which instruction runs next

    def _next(self, rank: int) -> Instruction | None:
        position, instructions = self.ranks[rank].position, self.programs[rank].instructions
        return instructions[position] if position < len(instructions) else None

    def _advance(self, rank: int) -> bool:
        state, each = self.ranks[rank], self._next(rank)
        if each is None:
            return False
        if each.op in COLLECTIVES:
            return self._meet(rank, each)
        if not self._can_run(rank, each):
            return False
        if each.op in PHASES:
            self._compute(rank, each)
            pairs = [(peer, rank) for peer in range(len(self.ranks))]
            state.launched = {pair: len(self.receives[pair]) for pair in pairs}
        else:
            self._run(rank, each)
            state.note(each)
        state.position += 1
        return True

    def _can_run(self, rank: int, each: Instruction) -> bool:
        if each.op is Op.WAIT_RECV:
            return (each.link, each.microbatch) in self.sends[each.peer, rank]
        if each.op is Op.SEND and self.waits_for == "receives":
            pair = rank, each.peer
            return len(self.receives[pair]) > len(self.sends[pair])
        if each.op in PHASES and self.waits_for == "messages":
            return all(len(self.sends[pair]) >= count for pair, count in self.ranks[rank].launched.items())
        return True

    def _run(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        match each.op:
            case Op.RECV:
                self._receive(rank, each)
            case Op.SEND | Op.MOVE:
                self._send(rank, each)
            case Op.ACCUMULATE:
                self._accumulate(state, each)
            case Op.FREE:
                pass
            case Op.OFFLOAD | Op.PREFETCH:
                require(self.stages[stage].offloaded, "copies of a stage that keeps its values")
                self._require_made(state, cell, Op.FORWARD)
                is_first = each.op is Op.OFFLOAD
                require(is_first or state.ran(Op.WAIT_OFFLOAD, *cell), "fetches what is not on the host")
                state.started[each] = None
            case Op.PRECOMPUTE:
                self._require_weights(state, each)
            case Op.TAIL:
                has_rows = self.replicas[stage] == 1 or state.ran(Op.WAIT_GATHER_ROWS, stage)
                require(has_rows, "a tail without rows")
                self._require_all_forwards(rank, stage)
            case Op.RESHARD:
                require(state.gathered.pop(each.bucket, None) is not None, "frees what is not gathered")
                del state.done[Op.PRECOMPUTE, stage, -1, -1]
            case Op.STAGE_NORM:
                require(self.sync_spec.stream, "a norm of a stage alone")
                self._require_complete(rank, each)
            case Op.CHECK if self.sync_spec.stream is None:
                require(state.ran(Op.GRAD_NORM), "checks before the norm")
            case Op.CHECK:
                self._require_complete(rank, each)
                require(self._has_losses(rank, self._round(each)), "checks before the losses have come")
            case Op.STASH:
                require(state.versions[stage] == each.version, "stashes another version")
            case Op.UPDATE | Op.HOST_UPDATE:
                self._update(rank, each)
            case Op.PAUSE:
                self._pause(rank, each)
            case _:
                self._await(rank, each)

    def _await(self, rank: int, each: Instruction) -> None:
        """What was started has ended."""
        state = self.ranks[rank]
        started = replace(each, op=Op(each.op.removeprefix("wait_")))
        require(started in state.started, "waits for nothing")
        result = state.started.pop(started)
        match started.op:
            case Op.RECV:
                assert each.link is not None
                message = each.link, each.microbatch
                state.arrived[message, each.peer] = result
                state.returned[message, each.peer] = self.sends[each.peer, rank][message]
            case Op.OFFLOAD | Op.PREFETCH:
                self._require_made(state, (each.stage, each.microbatch), Op.FORWARD)
            case Op.REDUCE_GRAD | Op.STORE:
                state.sums[each.bucket] += result
            case Op.UNSHARD | Op.LOAD:
                require(each.bucket not in state.gathered, "gathered twice")
                state.gathered[each.bucket] = result

    # messages

    def _receive(self, rank: int, each: Instruction) -> None:
        state, link, posted = self.ranks[rank], each.link, replace(each, slot=-1)
        assert link is not None
        message = link, each.microbatch
        require(posted not in state.started, "received twice")
        require((message, each.peer) not in state.arrived, "received twice")
        self._require_route(link, each, each.peer, rank)
        state.started[posted] = each.slot
        self.receives[each.peer, rank].append(message)
        state.fill(each)

    def _send(self, rank: int, each: Instruction) -> None:
        state, link, target = self.ranks[rank], each.link, each.peer if each.op is Op.SEND else rank
        assert link is not None
        message, source, payload = (link, each.microbatch), link.source, Gradients()
        self._require_route(link, each, rank, target)
        match link.payload:
            case Payload.ACTIVATION | Payload.MICROBATCH_RESULT:
                self._require_made(state, (source, each.microbatch), Op.FORWARD)
            case Payload.GRADIENT:
                self._require_made(state, (source, each.microbatch), Op.BACKWARD, Op.BACKWARD_INPUT)
            case Payload.RESULT:
                self._require_all_forwards(rank, source)
                require(not self.stages[source].tail or state.ran(Op.TAIL, source), "before the tail")
            case Payload.WEIGHT:
                for number in self.sync_spec.buckets_of(source):
                    bucket = self.sync_spec.buckets[number]
                    if bucket.on_host and {*bucket.names} & {*link.names}:
                        require(state.gathered.get(number) == {False}, "lends what is on the host")
                require(not state.versions[source], "lends weights after the update")
            case Payload.WEIGHT_GRADIENT:
                require(not state.made, "sends gradients that are not complete")
                payload = state.gradients.pop((source, link.values[0].name), payload)
        if each.op is Op.MOVE:
            require((message, -1) not in state.arrived, "moved twice")
            state.arrived[message, -1] = each.slot
            state.fill(each)
            state.gradients[link.target, link.values[0].name] += payload
            return
        sent, received = self.sends[rank, target], self.receives[rank, target]
        require(message not in sent, "sent twice")
        is_in_order = len(received) <= len(sent) or received[len(sent)] == message
        require(is_in_order, "received in another order than sent")
        sent[message] = payload

    def _require_route(self, link: Link, each: Instruction, source: int, target: int) -> None:
        """A message goes from the replica that makes it to the one that reads it."""
        require((each.microbatch >= 0) == link.payload.per_microbatch, "another number of microbatches")
        ends = [(link.source, source)] + ([] if link.is_broadcast else [(link.target, target)])
        for stage, rank in ends:
            require(rank in self._ranks_of(stage, each.microbatch), "a message of another rank")

    def _ranks_of(self, stage: int, microbatch: int) -> set[int]:
        """The rank of a stage that computes a microbatch; all of them if it is -1."""
        ranks = self.placement[stage]
        return {*ranks} if microbatch < 0 else {ranks[microbatch % len(ranks)]}

    def _accumulate(self, state: _Rank, each: Instruction) -> None:
        cell = each.stage, each.microbatch
        if each.link is not None:
            brought = state.returned.pop(((each.link, each.microbatch), each.peer), None)
            require(brought, "adds what has not come, or was added already")
            state.gradients[each.stage, each.link.values[0].name] += brought or Gradients()
            return
        names = state.made.pop((*cell, each.segment), None)
        require(names is not None, "adds what is not made")
        require(not state.ran(Op.FREE, *cell), "adds what is freed")
        for name in names or ():
            state.gradients[each.stage, name][cell] += 1

    # computes

    def _compute(self, rank: int, each: Instruction) -> None:
        state, stage, phase = self.ranks[rank], each.stage, PHASES[each.op]
        cell = stage, each.microbatch
        require(stage in self.stages and each.microbatch in self.microbatches, "no such cell")
        plan, number = self.stages[stage], self._num_segments(stage, each.op)
        require(rank in self._ranks_of(*cell), "computed by another replica")
        require(not state.made, "computes before gradients are accumulated")
        require(not state.ran(Op.FREE, *cell), "computes with what is freed")
        has_counts = stage not in self.sync_spec.count_stages or state.ran(Op.WAIT_SUM_COUNTS, stage)
        require(has_counts, "without counts")
        self._require_messages(state, each, phase)
        self._require_weights(state, each)
        is_ready = phase not in plan.precomputed_phases or state.ran(Op.PRECOMPUTE, stage, each.version)
        require(is_ready, "before what it reads is precomputed")
        self._require_order(state, each.op, cell, plan)
        segments = range(number) if each.segment < 0 else (each.segment,)
        for segment in segments:
            require(state.ran(each.op, *cell) == segment, "segments that are not one after the other")
            for place, collective in enumerate(plan.model_collectives):
                if (collective.phase, collective.segment) == (phase, segment):
                    awaited = Op(f"wait_{collective.op}")
                    require(state.ran(awaited, *cell, place), "before its collective")
            state.note(replace(each, model_collective=-1))
        if phase in GRADIENT_PHASES or phase is Phase.BACKWARD_INPUT:
            makes = self._parameters(stage) if phase is not Phase.BACKWARD_INPUT else {}
            made = {name for name, segment in makes.items() if segment % number in segments}
            state.made[*cell, each.segment] = made

    def _require_messages(self, state: _Rank, each: Instruction, phase: Phase) -> None:
        for link in self.plan.links:
            if link.target != each.stage or phase not in link.payload.readers:
                continue
            message = link, each.microbatch if link.payload.per_microbatch else -1
            slot = self._slot(state, message)
            require(slot is not None, "reads what has not come")
            if slot is not None and slot >= 0:
                require(state.slots[link, slot] == message[1], "reads what was overwritten")

    def _slot(self, state: _Rank, message: Message) -> int | None:
        """The slot of a message, -1 if it has none; None if it has not come."""
        return next((slot for (each, _), slot in state.arrived.items() if each == message), None)

    def _require_order(self, state: _Rank, op: Op, cell: Cell, plan: Stage) -> None:
        """A compute runs after what it reads, and before what replaces it."""
        if op is Op.FORWARD:
            require(not state.ran(Op.AVERAGE_BUFFERS, plan.index), "a forward after the average")
            return
        self._require_made(state, cell, Op.FORWARD)
        is_early = self.plan.mode is Mode.OUTPUTS and not state.ran(Op.PAUSE)
        require(not is_early or op is Op.RECOMPUTE, "a backward before the loss")
        if op is Op.BACKWARD_WEIGHT:
            self._require_made(state, cell, Op.BACKWARD_INPUT)
            return
        is_away = state.ran(Op.OFFLOAD, *cell) and not state.ran(Op.WAIT_PREFETCH, *cell)
        require(not is_away, "reads what is on the host")
        if op is Op.RECOMPUTE:
            require(plan.recompute, "recomputes what is kept")
            return
        require(state.ran(Op.RECOMPUTE, *cell) or not plan.recompute, "before the recompute")
        reads_tail = plan.tail and plan.tail.gradients
        require(state.ran(Op.TAIL, plan.index) or not reads_tail, "before the tail")

    def _require_weights(self, state: _Rank, each: Instruction) -> None:
        """A compute has the weights of the step, or the version that its stream wants."""
        stage, stream = each.stage, self.sync_spec.stream
        for number in self.sync_spec.buckets_of(stage):
            if self.sync_spec.reshards_after_use(self.sync_spec.buckets[number]):
                require(state.gathered.get(number) == {False}, "computes without the step's weights")
        if stream is None:
            require(not state.versions[stage], "computes after the update")
            return
        wanted = stream.version(each.microbatch, stage, self.replicas)
        require(each.version == wanted, "computes with another version")
        held = state.versions[stage] == wanted or state.ran(Op.STASH, stage, wanted)
        require(held, "the version is not there")

    def _require_made(self, state: _Rank, cell: Cell, *ops: Op) -> None:
        """One of these phases of a microbatch is over, and what it has made is not freed."""
        require(any(self._is_over(state, cell, op) for op in ops), "reads what is not made")
        require(not state.ran(Op.FREE, *cell), "reads what is freed")

    def _require_all_forwards(self, rank: int, stage: int) -> None:
        for cell in self._own_cells(rank, stage):
            require(self._is_over(self.ranks[rank], cell, Op.FORWARD), "before the last forward")

    def _is_over(self, state: _Rank, cell: Cell, op: Op) -> bool:
        return state.ran(op, *cell) == self._num_segments(cell[0], op)

    def _num_segments(self, stage: int, op: Op) -> int:
        return len(self.stages[stage].segments.get(PHASES[op], (1.0,)))

    def _own_cells(self, rank: int, stage: int) -> set[Cell]:
        return {(stage, each) for each in self.microbatches if rank in self._ranks_of(stage, each)}

    # collectives

    def _meet(self, rank: int, each: Instruction) -> bool:
        """Begins the collective that a rank has come to, if all others of its group have come to one."""
        members, met = self._group(rank, each), dict[int, Instruction]()
        for member in members:
            other = self._next(member)
            if other is None or other.op not in COLLECTIVES or self._group(member, other) != members:
                return False
            met[member] = other
        rounds = {self._without_replica(other) for other in met.values()}
        require(len(rounds) == 1, f"different collectives meet: {met}")
        self._begin(met)
        return True

    def _group(self, rank: int, each: Instruction) -> set[int]:
        if each.op is Op.GRAD_NORM:
            return {*range(len(self.ranks))}
        require(each.stage in self.stages, "no such stage")
        members = {rank} if each.op in (Op.LOAD, Op.STORE) else {*self.placement[each.stage]}
        require(rank in members, "a collective of other ranks")
        return members

    def _without_replica(self, each: Instruction) -> Instruction:
        """A collective as all its members have it: model collectives are of a round of microbatches."""
        count = self.replicas[each.stage] if each.op in MODEL_COLLECTIVES else 1
        return replace(each, microbatch=each.microbatch // count)

    def _begin(self, met: Mapping[int, Instruction]) -> None:
        each, total = next(iter(met.values())), Gradients()
        is_sum = each.op in (Op.REDUCE_GRAD, Op.STORE)
        if is_sum:
            require(0 <= each.bucket < len(self.sync_spec.buckets), "no such bucket")
        for rank in met if is_sum else ():
            for name in self.sync_spec.buckets[each.bucket].names:
                total += self.ranks[rank].gradients.pop((each.stage, name), Gradients())
        is_late = {bool(self.ranks[rank].versions[each.stage]) for rank in met}
        for rank, own in met.items():
            state = self.ranks[rank]
            require(own not in state.started, "started twice")
            is_early = state.made and (is_sum or own.op is Op.GRAD_NORM)
            require(not is_early, "reads gradients before they are accumulated")
            if own.op in MODEL_COLLECTIVES:
                collective = self.stages[own.stage].model_collectives[own.model_collective]
                require(collective.op is own.op, "another collective")
                so_far = state.ran(Op(collective.phase), own.stage, own.microbatch)
                require(so_far == collective.segment, "before its input")
            elif own.op is Op.GATHER_ROWS:
                self._require_all_forwards(rank, own.stage)
            if own.op is Op.GRAD_NORM:
                for stage in stages_on(self.placement, rank):
                    self._check_gradients(rank, stage, self.microbatches)
            else:
                state.started[own] = is_late if own.op in (Op.UNSHARD, Op.LOAD) else total
            state.note(own)
            state.position += 1

    # gradients, and updates with them

    def _parameters(self, stage: int) -> dict[str, int]:
        """The parameters of a stage, with the segment that completes each gradient; -1 is the last one."""
        buckets = [self.sync_spec.buckets[number] for number in self.sync_spec.buckets_of(stage)]
        own = {
            name: -1 if bucket.is_tied else bucket.segment
            for bucket in buckets
            for name in (bucket.names if bucket.trained else ())
        }
        lent = {name: -1 for x in self.tied if stage in (x.source, x.target) for name in x.names}
        return {**(own or {f"w_{stage}": -1}), **lent}

    def _check_gradients(self, rank: int, stage: int, microbatches: Sequence[int]) -> None:
        """All gradients that a rank updates with are complete, each counted once."""
        state, buckets = self.ranks[rank], self.sync_spec.buckets_of(stage)
        borrowed = {name for x in self.tied if x.target == stage for name in x.names}
        for name in {*self._parameters(stage)} - borrowed:
            bucket = next((k for k in buckets if name in self.sync_spec.buckets[k].names), None)
            unsummed = state.gradients[stage, name]
            is_summed = bucket is None or self.sync_spec.stream or not unsummed
            require(is_summed, f"{name} has unsummed gradients")
            found = unsummed if bucket is None else state.sums[bucket]
            users = {stage, *(x.target for x in self.tied if name in x.names)}
            expected = Counter((user, microbatch) for user in users for microbatch in microbatches)
            require(found == expected, f"{name} of stage {stage} has gradients {dict(found)}")

    def _round(self, each: Instruction) -> range:
        """The microbatches whose gradients an update uses."""
        stream = self.sync_spec.stream
        if stream is None:
            return self.microbatches
        count = stream.microbatches_per_update(each.stage, self.replicas)
        require(each.microbatch >= 0 and each.microbatch % count == 0, "not the first of a round")
        return range(each.microbatch, min(each.microbatch + count, self.plan.num_microbatches))

    def _require_complete(self, rank: int, each: Instruction) -> None:
        require(not self.ranks[rank].made, "reads gradients before they are accumulated")
        self._check_gradients(rank, each.stage, self._round(each))

    def _has_losses(self, rank: int, microbatches: Sequence[int]) -> bool:
        """Whether a rank has made the losses of all these, or was told them."""
        state = self.ranks[rank]
        return all(
            self._is_over(state, (link.source, each), Op.FORWARD)
            or self._slot(state, (link, each)) is not None
            for link in self.losses
            for each in microbatches
        )

    def _update(self, rank: int, each: Instruction) -> None:
        state, stage, cell = self.ranks[rank], each.stage, (each.stage, each.microbatch)
        require(rank in self.placement[stage], "updates another rank's stage")
        self._require_complete(rank, each)
        if stream := self.sync_spec.stream:
            require(state.ran(Op.STAGE_NORM, *cell) or not self.sync_spec.clips, "an update before its norm")
            require(state.ran(Op.CHECK, *cell) or not self.sync_spec.on_nan, "an update before its check")
            require(each.version == state.versions[stage] + 1, "updates in another order")
            size = stream.microbatches_per_update(stage, self.replicas)
            require(each.version == each.microbatch // size + 1, "an update of another round")
            for number in (buckets := self.sync_spec.buckets_of(stage)):
                state.sums.pop(number, None)
            for name in () if buckets else self._parameters(stage):
                state.gradients.pop((stage, name), None)
        else:
            require(not state.versions[stage], "updated twice")
            require(state.ran(Op.GRAD_NORM) or not self.sync_spec.has_grad_norm, "an update before the norm")
            require(state.ran(Op.CHECK) or not self.sync_spec.may_skip_step, "an update before the check")
            has_tail = self.stages[stage].tail
            require(state.ran(Op.TAIL, stage) or not has_tail, "an update before the tail")
        state.versions[stage] += 1

    def _pause(self, rank: int, each: Instruction) -> None:
        """The script asks for the loss of a mini-batch when it has those of all before.

        Or it computes the loss of the results, while nothing is under way.
        """
        state, stream = self.ranks[rank], self.sync_spec.stream
        require(stream is not None or self.plan.mode is Mode.OUTPUTS, "a script that asks for nothing")
        if stream:
            first = each.microbatch // stream.microbatches * stream.microbatches
            require(self._has_losses(rank, range(first)), "a script that waits for ever")
            return
        for stage in stages_on(self.placement, rank):
            self._require_all_forwards(rank, stage)
        require(not state.started, "a message, a collective or a copy that runs during the pause")
        is_back = any(count and op is Op.PREFETCH for (op, *_), count in state.done.items())
        require(not is_back, "a copy that is back before the pause")
        kept = {number for number, is_late in state.gathered.items() if is_late != {True}}
        require(not kept, "parameters that are gathered during the pause")
        for link in (each for each in self.plan.links if each.payload is Payload.RESULT):
            makers, readers = self.placement[link.source], result_ranks(link, self.placement)
            for peer in {*readers} - {rank} if rank in makers else ():
                require((link, -1) in self.sends[rank, peer], "a result that is sent behind the pause")
            came = {peer for message, peer in state.arrived if message == (link, -1)}
            is_complete = rank not in readers or came >= {*makers} - {rank}
            require(is_complete, "a result that comes behind the pause")

    # the end

    def _check_end(self, rank: int) -> None:
        state, sync_spec = self.ranks[rank], self.sync_spec
        require(state.ran(Op.PAUSE) or self.plan.mode is not Mode.OUTPUTS, "a loss that is never computed")
        require(not state.made, "gradients that are never accumulated")
        require(not state.started, "messages, collectives or copies that are never awaited")
        for stage in stages_on(self.placement, rank):
            self._check_stage(rank, stage)
        for link in (each for each in self.plan.links if each.payload.is_result):
            for microbatch in self.microbatches if link.payload.per_microbatch else (-1,):
                readers = {*result_ranks(link, self.placement)} - self._ranks_of(link.source, microbatch)
                came = self._slot(state, (link, microbatch)) is not None
                require(came or rank not in readers, "a result that does not come")
        if sync_spec.stream is None:
            require(state.ran(Op.GRAD_NORM) == sync_spec.has_grad_norm, "a norm too much or too little")

    def _check_stage(self, rank: int, stage: int) -> None:
        state, sync_spec, plan = self.ranks[rank], self.sync_spec, self.stages[stage]
        trains = any(link.payload is Payload.GRADIENT for link in self.plan.links) or len(self.stages) == 1
        for cell in self._own_cells(rank, stage):
            require(state.ran(Op.FREE, *cell), "never freed")
            require(state.ran(Op.FORWARD, *cell), "a microbatch without a forward")
            backwards = [phase for phase in GRADIENT_PHASES if state.ran(Op(phase), *cell)]
            require(len(backwards) == trains, "a microbatch without one backward")
            is_back = state.ran(Op.WAIT_PREFETCH, *cell) == state.ran(Op.OFFLOAD, *cell)
            require(is_back, "values that are left on the host")
        require(state.ran(Op.TAIL, stage) == bool(plan.tail), "a tail too much or too little")
        averages = stage in sync_spec.buffer_sync_stages
        require(state.ran(Op.AVERAGE_BUFFERS, stage) == averages, "buffers are not averaged")
        num_updates = int(sync_spec.updates)
        if stream := sync_spec.stream:
            num_updates = self.plan.num_microbatches // stream.microbatches_per_update(stage, self.replicas)
        require(state.versions[stage] == num_updates, f"stage {stage} has made other updates")
        if not sync_spec.updates and trains:
            self._check_gradients(rank, stage, self.microbatches)
        for number in sync_spec.buckets_of(stage):
            late = sync_spec.shard and not sync_spec.reshards_after_use(sync_spec.buckets[number])
            require(state.gathered.get(number) == ({True} if late else None), "wrong weights left")


def check_meaning(step: Step, programs: Sequence[Program]) -> None:
    """Raises ``Wrong`` unless the programs do what the step asks for, though sends wait for receives."""
    assert len(programs) == count_ranks(step.placement)
    SymbolicExecution(step, programs, "receives").run()


def check_on_gpus(step: Step, programs: Sequence[Program]) -> None:
    """Raises ``Wrong`` unless programs also finish where launched receives hold computes up.

    Lowered programs do, but for some that recompute: what is posted before a replay holds up its backward.
    The verifier does not look at what waits in other places than theirs would lead to.
    """
    SymbolicExecution(step, programs, "messages").run()
