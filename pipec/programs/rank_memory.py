"""The memory of a rank while its program runs, and its microbatches in flight. Nothing else counts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.ir import (
    GRADIENT_PHASES,
    Bucket,
    Compute,
    Op,
    Payload,
    Plan,
    Program,
    RankMemory,
    StageMemory,
    stages_on,
)
from pipec.ir.columns import (
    OP_CODE,
    PHASE_CODE,
    PHASES,
    ComputeColumns,
    Floats,
    InstructionColumns,
    Ints,
    equal_groups,
    one_of,
    with_shared_links,
)
from pipec.ir.memory_figures import MEMORY_CATEGORIES
from pipec.ir.text_format import value_bytes
from pipec.programs.compute_segments import split_into_segments

_MAKES_GRADIENTS = one_of(Op.BACKWARD, Op.BACKWARD_WEIGHT)
_FREES = {
    Payload.ACTIVATION: one_of(Op.BACKWARD, Op.BACKWARD_INPUT),
    Payload.GRADIENT: one_of(Op.BACKWARD_WEIGHT),
}
"""The instruction that frees the values saved by the phase that made a message."""

NUM_SENDS_IN_TRANSIT = 2
"""Sent messages that a rank keeps of each link and peer: one that the peer may still read, and the next."""


def microbatch_bytes(order: Sequence[Compute], stages: Sequence[StageMemory]) -> Floats:
    """The bytes that the microbatches of one rank hold during each of its computes, in order.

    ``stages[stage]`` is the memory of a stage; its static part is left out. For a stage that saves 3 and has
    1 of transient memory::

        compute  F0  F1  B0  F2  B1  B2
        start    +3  +3   0  +3   0   0     growth of memory when the compute starts
        end       0   0  -3   0  -3  -3     growth when the compute ends
        total     4   7   7   7   7   4     with transient memory
    """
    computes = ComputeColumns.of(order)
    starts, ends, transient = (table[computes.phases, computes.stages] for table in _tables(stages))
    while_running: Floats = np.cumsum(starts + ends) - ends + transient
    return while_running


def _tables(stages: Sequence[StageMemory]) -> tuple[Floats, Floats, Floats]:
    """The growth of memory as computes start and end, and the transient memory, at [phase, stage]."""
    rows = [[(*each.growth(phase), each.transient.get(phase, 0.0)) for each in stages] for phase in PHASES]
    table = np.array(rows, np.float64).reshape(len(PHASES), len(stages), 3)
    return table[..., 0], table[..., 1], table[..., 2]


def max_in_flight_of_order(order: Sequence[Compute]) -> int:
    """The most microbatches a rank holds at once, from forward to whole backward or weight gradient."""
    computes = ComputeColumns.of(order)
    one_each = [StageMemory(saved=1, weight_gradient_saved=1)] * (int(computes.stages.max(initial=-1)) + 1)
    return int(microbatch_bytes(computes, one_each).max(initial=0))


def in_flight(instructions: InstructionColumns) -> Ints:
    """After each instruction of a rank, the pairs of stage and microbatch between forward and free."""
    begun, freed = (instructions.ops == OP_CODE[op] for op in (Op.FORWARD, Op.FREE))
    begun = begun & (instructions.segments <= 0)
    pairs: Ints = np.cumsum(begun.astype(np.int64) - freed)
    return pairs


def peak_in_flight(program: Program) -> int:
    """The most pairs of stage and microbatch that a rank holds at once, from forward to free."""
    (columns,) = with_shared_links([program])
    return int(in_flight(columns).max(initial=0))


def rank_memory(plan: Plan, program: Program) -> RankMemory:
    """The memory of a rank during each instruction.

    * A phase that consists of several functions holds the memory of each of them, one after the other, even
      if one instruction runs them all.
    * Memory for a message exists from the instruction that receives it until the last compute that reads it.
    * A sent value stays until the message after the next one of its link and peer, even if it was also saved
      and is not saved any more.
    * Sums of gradients begin with the first gradients, and end with the update, if the program has one.
      Before, ``.grad`` is None. Where replicas add them up in the buffer that is reduced, they exist from the
      start.
    """
    return _Account(plan, program).result()


BytesOverTime = tuple[float, Floats, Floats]
"""Bytes before the program, while each instruction runs, and after it."""


def memory_by_category(plan: Plan, program: Program) -> tuple[Mapping[str, BytesOverTime], BytesOverTime]:
    """The bytes of each category that occurs on the device, and those of host memory.

    While an instruction runs, these are the bytes at its highest total.
    """
    account = _Account(plan, program)
    return account.by_category(), account.on_host()


def _whole_bytes(bucket: Bucket) -> float:
    return sum(value_bytes(value, {}) for value in bucket.parameters)


def _sums_by_segment(memory: StageMemory) -> list[float]:
    """The sums of gradients of a stage by the segment of its backward, or weight half, that makes them."""
    segments = [segment for phase in GRADIENT_PHASES for segment in memory.segments.get(phase, ())]
    made = [segment.gradients for segment in segments] or [0.0]
    made[0] += memory.gradients - sum(made)
    return made


@dataclass
class _Account:
    """Bytes by category: static ones, and their growth as instructions start and end.

    ``columns`` are the instructions segment by segment, and ``numbers`` the instructions of the segments;
    ``is_last`` tells the last segment of each instruction.
    ``host_starts`` and ``host_ends`` are the growth of host memory.
    """

    plan: Plan
    program: Program
    static: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEMORY_CATEGORIES, 0.0))
    starts: dict[str, Floats] = field(default_factory=dict)
    ends: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = stages_on(self.plan.placement, self.program.rank)
        self.stages = [stage.cost.memory for stage in self.plan.stages]
        whole = InstructionColumns.of(self.program.instructions, self.plan.links)
        self.columns, self.numbers = split_into_segments(whole, self.plan.segments)
        self.is_last = np.append(np.diff(self.numbers) > 0, True)[: len(self.columns)]
        self.host_starts: Floats = np.zeros(len(self.columns))
        self.host_ends: Floats = np.zeros(len(self.columns))
        self.count_static()
        self.count_computes()
        self.count_tail()
        self.count_offloads()
        self.count_gradients()
        self.count_messages()
        self.count_results()
        self.count_collectives()
        self.count_precomputed()

    def count_static(self) -> None:
        rows = self.plan.num_microbatches
        for stage in (self.stages[each] for each in self.own):
            self.static["parameters"] += stage.weights
            self.static["buffers"] += stage.buffers
            self.static["optimizer"] += stage.state
            self.static["versions"] += stage.versions
            self.static["precomputed"] += stage.precomputed
            self.static["inputs"] += stage.inputs * rows

    def count_computes(self) -> None:
        columns, computes = self.columns, np.flatnonzero(self.columns.is_compute)
        phases = columns.phases[computes]
        starts, ends, transient = (table[phases, columns.stages[computes]] for table in _tables(self.stages))
        for stage in self.own:
            for phase, segments in self.stages[stage].segments.items():
                of_phase = (phases == PHASE_CODE[phase]) & (columns.stages[computes] == stage)
                for number, segment in enumerate(segments):
                    own = of_phase & (columns.segments[computes] == number)
                    starts[own], ends[own], transient[own] = 0.0, segment.growth, segment.transient
        self.grow("saved", computes, starts, ends)
        self.grow("running", computes, transient, -transient)
        for stage in self.own:
            scratch, updates = self.stages[stage].update, self._at(Op.UPDATE, stage)
            self.grow("running", updates, scratch, -scratch)

    def count_tail(self) -> None:
        """Inputs of the tail, from each forward on, their copy with all rows, and gradients of these."""
        stage = self.plan.tail_stage
        if stage is None or stage not in self.own or (tail := self.plan.stages[stage].tail) is None:
            return
        forwards, runs = self._at(Op.FORWARD, stage), self._at(Op.TAIL, stage)
        forwards = forwards[self.columns.segments[forwards] <= 0]
        sizes = {**self.plan.sizes, "b": self.plan.microbatch_size * self.plan.num_microbatches}
        joined, gradients = (
            sum(value_bytes(value, sizes) for value in values) for values in (tail.inputs, tail.gradients)
        )
        self.grow("results", forwards, 0.0, tail.unsaved_bytes)
        self.grow("results", runs, 0.0, -tail.unsaved_bytes * forwards.size)
        self.grow("running", runs, joined + tail.transient_bytes, -joined - tail.transient_bytes)
        reads = (Op.BACKWARD, Op.BACKWARD_INPUT)
        last = np.concatenate([self._at(op, stage) for op in reads]).max(initial=-1)
        if last >= 0:
            self.grow("saved", runs, 0.0, gradients)
            self.grow("saved", np.array([last]), 0.0, -gradients)

    def count_offloads(self) -> None:
        """Offloaded values are on the host alone from the wait for the offload to the prefetch."""
        for stage in self.own:
            if not (amount := self.stages[stage].offloaded):
                continue
            offloads, prefetches = self._at(Op.OFFLOAD, stage), self._at(Op.PREFETCH, stage)
            self.grow("saved", self._at(Op.WAIT_OFFLOAD, stage), 0.0, -amount)
            self.grow("saved", prefetches, amount, 0.0)
            np.add.at(self.host_starts, offloads, amount)
            np.add.at(self.host_ends, prefetches, -amount)

    def count_gradients(self) -> None:
        """Sums of gradients, from the first gradients after a reduction to the next reduction.

        ``.grad`` is None when a step begins, so the sums become it and nothing is held twice. Buffers that
        are reduced without sharding stay from step to step.
        """
        sync_spec = self.plan.sync_spec
        for stage in () if sync_spec.only_gathers else self.own:
            if sync_spec.stream:
                self.static["gradients"] += self.stages[stage].gradients
                continue
            others = _sums_by_segment(self.stages[stage])
            for number in sync_spec.buckets_of(stage):
                bucket, num_bytes = sync_spec.buckets[number], _whole_bytes(sync_spec.buckets[number])
                others[bucket.segment] -= num_bytes
                if sync_spec.shard:
                    reductions = self._at(Op.REDUCE_GRAD, stage, number)
                    self._sum_until(reductions, num_bytes, stage, bucket.segment)
                else:
                    self.static["gradients"] += num_bytes
                    self._keep_until_accumulated(self._making(stage, bucket.segment), stage, num_bytes)
            if sync_spec.buckets_of(stage):
                others[0] -= (in_transit := sum(others) - self._borrowed_gradients(stage))
                self.static["gradients"] += in_transit
            for segment, num_bytes in enumerate(others):
                self._sum_until(self._at(Op.UPDATE, stage), num_bytes, stage, segment)

    def _borrowed_gradients(self, stage: int) -> float:
        """Sums of gradients of borrowed weights, which a stage sends to their owners."""
        links = (link for link in self.plan.links if link.payload is Payload.WEIGHT_GRADIENT)
        return sum(value_bytes(v, {}) for link in links if link.source == stage for v in link.values)

    def _sum_until(self, reductions: Ints, amount: float, stage: int, segment: int) -> None:
        """Sums that begin with the first gradients of a segment after each reduction."""
        made = self._making(stage, segment)
        rounds, first = np.unique(np.searchsorted(reductions, made), return_index=True)
        self.grow("gradients", made[first], 0.0, amount)
        self._keep_until_accumulated(np.delete(made, first), stage, amount)
        self.grow("gradients", reductions[rounds[rounds < reductions.size]], 0.0, -amount)

    def _making(self, stage: int, segment: int) -> Ints:
        """The computes that make gradients in a segment of a stage."""
        columns, of_stage = self.columns, self.columns.stages == stage
        of_segment = (columns.segments < 0) | (columns.segments == segment)
        made: Ints = np.flatnonzero(of_stage & of_segment & _MAKES_GRADIENTS[columns.ops])
        return made

    def _keep_until_accumulated(self, made: Ints, stage: int, amount: float) -> None:
        """Gradients beside their sum. A compute accumulates those of all its segments but the last itself."""
        own = made[self.is_last[made]]
        accumulates = self._at(Op.ACCUMULATE, stage)
        self.grow("gradients", own, 0.0, amount)
        self.grow("gradients", accumulates[np.searchsorted(accumulates, own)], 0.0, -amount)

    def count_messages(self) -> None:
        columns, links = self.columns, self.plan.links
        sends, moves, receives = (
            np.flatnonzero(columns.ops == OP_CODE[op]) for op in (Op.SEND, Op.MOVE, Op.RECV)
        )
        own = self.plan.link_sender_bytes
        for group in equal_groups(columns.link_numbers[sends], columns.peers[sends]):
            of_peer, number = sends[group], int(columns.link_numbers[sends[group[0]]])
            replacing = of_peer[NUM_SENDS_IN_TRANSIT:]
            self.grow("sent", of_peer, own[number], 0.0)
            self.grow("sent", replacing, -own[number], 0.0)
            until_end = np.full(of_peer.size - replacing.size, len(columns))
            self._outlive_saved(number, of_peer, np.append(replacing, until_end))
        for number in np.unique(columns.link_numbers[moves]).tolist():
            self._keep_until_read(number, moves[columns.link_numbers[moves] == number], own[number])
        in_slots = receives[columns.slots[receives] >= 0]
        for number in np.unique(columns.link_numbers[in_slots]).tolist():
            amount = sum(value_bytes(value, self.plan.sizes) for value in links[number].values)
            self._keep_until_read(number, in_slots[columns.link_numbers[in_slots] == number], amount)
        once = receives[columns.slots[receives] < 0]
        for number in np.unique(columns.link_numbers[once]).tolist():
            own_once = once[columns.link_numbers[once] == number]
            self.grow("received", own_once, self._bytes_once(number), 0.0)

    def _keep_until_read(self, number: int, arrivals: Ints, amount: float) -> None:
        """Values of a link, from the instructions that bring them until the last compute that reads them."""
        columns, reader = self.columns, OP_CODE[Op(self.plan.link_reader_phases[number])]
        reads = np.flatnonzero((columns.ops == reader) & (columns.stages == self.plan.links[number].target))
        last = np.zeros(int(columns.microbatches.max()) + 1, np.int64)
        last[columns.microbatches[reads]] = reads
        self.grow("received", arrivals, amount, 0.0)
        self.grow("received", last[columns.microbatches[arrivals]], 0.0, -amount)

    def _outlive_saved(self, number: int, sends: Ints, replaced: Ints) -> None:
        """Values sent on a link that a stage also saves, from their free until their send is ``replaced``."""
        columns, link, amount = self.columns, self.plan.links[number], self.plan.link_saved_bytes[number]
        if not amount or link.payload not in _FREES:
            return
        frees = _FREES[link.payload][columns.ops] & (columns.stages == link.source)
        freed = np.full(int(columns.microbatches.max()) + 1, len(columns), np.int64)
        freed[columns.microbatches[frees][::-1]] = np.flatnonzero(frees)[::-1]
        saved_until = freed[columns.microbatches[sends]]
        outlives = saved_until < replaced
        self.grow("sent", saved_until[outlives], amount, 0.0)
        self.grow("sent", replaced[outlives & (replaced < len(columns))], -amount, 0.0)

    def count_results(self) -> None:
        """Results of microbatches, which stay until they are merged."""
        for link in self.plan.links:
            if link.payload is Payload.RESULT and link.source in self.own:
                made = self._at(Op.FORWARD, link.source)
                made = made[self.columns.segments[made] <= 0]
                amount = sum(value_bytes(value, self.plan.sizes) for value in link.values)
                self.grow("results", made, 0.0, amount)

    def _bytes_once(self, number: int) -> float:
        """Bytes of a value received once a step. A borrowed weight counts as a parameter of the stage."""
        link, rows = self.plan.links[number], self.plan.microbatch_size * self.plan.num_microbatches
        if link.payload is Payload.WEIGHT:
            return 0.0
        return sum(value_bytes(value, {**self.plan.sizes, "b": rows}) for value in link.values)

    def count_collectives(self) -> None:
        sync_spec = self.plan.sync_spec
        for stage in self.own:
            for number in sync_spec.buckets_of(stage) if sync_spec.shard else ():
                bucket = sync_spec.buckets[number]
                if sync_spec.reshards_after_use(bucket):
                    self.grow("in_transit", self._at(Op.UNSHARD, stage, number), bucket.unsharded_bytes, 0.0)
                    self.grow("in_transit", self._at(Op.RESHARD, stage, number), 0.0, -bucket.unsharded_bytes)
                if sync_spec.only_gathers:
                    continue
                reduces = self._at(Op.REDUCE_GRAD, stage, number)
                ends = self._at(Op.WAIT_REDUCE_GRAD, stage, number)
                self.grow("in_transit", reduces, bucket.in_transit_bytes, 0.0)
                self.grow("in_transit", ends, 0.0, -bucket.in_transit_bytes)
                self.grow("gradients", reduces, bucket.shard_bytes, 0.0)
                self.grow("gradients", ends[1:], 0.0, -bucket.shard_bytes)
                self.grow("gradients", self._at(Op.UPDATE, stage)[:1], 0.0, -bucket.shard_bytes)

    def count_precomputed(self) -> None:
        """Values precomputed from weights, until these are freed where they are gathered for use.

        In a stream there are those of several versions, all the time.
        """
        for stage in () if self.plan.sync_spec.stream else self.own:
            made, gone = self._at(Op.PRECOMPUTE, stage), self._at(Op.RESHARD, stage)
            if amount := self.stages[stage].precomputed * bool(made.size):
                self.static["precomputed"] -= amount
                freed = np.searchsorted(gone, made)
                self.grow("precomputed", made, amount, 0.0)
                self.grow("precomputed", gone[freed[freed < gone.size]], 0.0, -amount)

    def _at(self, op: Op, stage: int, bucket: int = -1) -> Ints:
        columns = self.columns
        found = (columns.ops == OP_CODE[op]) & (columns.stages == stage)
        chosen: Ints = np.flatnonzero(found & (columns.buckets == bucket) if bucket >= 0 else found)
        return chosen

    def grow(self, kind: str, positions: Ints, start: Floats | float, end: Floats | float) -> None:
        """Grow a category by ``start`` as the instructions at ``positions`` start, by ``end`` as they end."""
        for growths, amount in ((self.starts, start), (self.ends, end)):
            np.add.at(growths.setdefault(kind, np.zeros(len(self.columns))), positions, amount)

    def on_host(self) -> BytesOverTime:
        """The bytes of host memory, which only instructions of one segment change."""
        before = sum(self.stages[stage].host for stage in self.own)
        after = before + np.cumsum(self.host_starts + self.host_ends)
        return before, (after - self.host_ends)[self.is_last], after[self.is_last]

    def by_category(self) -> Mapping[str, BytesOverTime]:
        """The bytes of each category that occurs; while an instruction runs, those of its largest segment."""
        after = {
            kind: self.static[kind] + np.cumsum(starts + self.ends[kind])
            for kind, starts in self.starts.items()
        }
        total = sum(
            (amounts - self.ends[kind] for kind, amounts in after.items()), np.zeros(len(self.columns))
        )
        highest = np.lexsort((-np.arange(total.size), total, self.numbers))[self.is_last]
        found = {}
        for kind, before in self.static.items():
            amounts = after.get(kind, np.full(len(self.columns), before))
            while_running = amounts - self.ends.get(kind, 0.0)
            if before or while_running.any():
                found[kind] = before, while_running[highest], amounts[self.is_last]
        return found

    def result(self) -> RankMemory:
        if not len(self.columns):
            return RankMemory(self.program.rank, self.static)
        categories, (_, host, host_after) = self.by_category(), self.on_host()
        most, after = (sum(each[k] for each in categories.values()) for k in (1, 2))
        most, after = np.zeros(host.size) + most, np.zeros(host.size) + after
        peak = int(most.argmax())
        at_peak = {kind: float(amounts[peak]) for kind, (_, amounts, _) in categories.items()}
        bytes_by_category = dict.fromkeys(MEMORY_CATEGORIES, 0.0) | at_peak
        pairs = int(in_flight(self.columns)[self.is_last][peak])
        return RankMemory(
            self.program.rank, bytes_by_category, peak, pairs, float(host.max()), most, after, host_after
        )
