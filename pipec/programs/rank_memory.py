"""The memory of a rank while its program runs, and its microbatches in flight. Nothing else counts them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipec.ir import (
    GRADIENT_PHASES,
    Compute,
    Op,
    Payload,
    Plan,
    Program,
    RankMemory,
    StageMemory,
    Value,
    result_ranks,
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
    starts, ends, transient = _of_computes(computes.phases, computes.stages, stages)
    while_running: Floats = np.cumsum(starts + ends) - ends + transient
    return while_running


def _of_computes(phases: Ints, stages: Ints, memory: Sequence[StageMemory]) -> tuple[Floats, Floats, Floats]:
    """The growth of memory as each of some computes starts and ends, and its transient memory."""
    table = np.zeros((3, len(PHASES), len(memory)))
    for stage in np.unique(stages).tolist():
        own = memory[stage]
        table[..., stage] = np.array([(*own.growth(x), own.transient.get(x, 0.0)) for x in PHASES]).T
    starts, ends, transient = table[:, phases, stages]
    return starts, ends, transient


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
    categories, (_, host, host_after) = memory_by_category(plan, program)
    at_peak, most, after = dict.fromkeys(MEMORY_CATEGORIES, 0.0), np.zeros(host.size), np.zeros(host.size)
    if not host.size:
        return RankMemory(program.rank, at_peak | {kind: held[0] for kind, held in categories.items()})
    for _, during, behind in categories.values():
        most, after = most + during, after + behind
    peak = int(most.argmax())
    at_peak |= {kind: float(during[peak]) for kind, (_, during, _) in categories.items()}
    pairs = int(in_flight(InstructionColumns.of(program.instructions, plan.links))[peak])
    return RankMemory(program.rank, at_peak, peak, pairs, float(host.max()), most, after, host_after)


def waiting_bytes(plan: Plan, program: Program) -> float:
    """What a rank holds from the forwards of a step to its backwards, while a script computes the loss."""
    categories, _ = memory_by_category(plan, program)
    pause = next(n for n, each in enumerate(program.instructions) if each.op is Op.PAUSE)
    return sum(float(after[pause]) - before for before, _, after in categories.values())


BytesOverTime = tuple[float, Floats, Floats]
"""Bytes before the program, while each instruction runs, and after it."""


def memory_by_category(plan: Plan, program: Program) -> tuple[Mapping[str, BytesOverTime], BytesOverTime]:
    """The bytes of each category that occurs on the device, and those of host memory.

    While an instruction runs, these are the bytes at its highest total.
    """
    found = _Account(plan, program).over_time()
    host = found.pop(_HOST)
    return {kind: held for kind, held in found.items() if held[0] or held[1].any()}, host


_HOST = "host"
"""The category of host memory, which is no part of the device's."""

_ALWAYS = {
    "parameters": "weights",
    "buffers": "buffers",
    "optimizer": "state",
    "versions": "versions",
    "precomputed": "precomputed",
    _HOST: "host",
}
"""By category, the figure of a stage that is held during the whole step."""


def _sums_by_segment(memory: StageMemory) -> list[float]:
    """The sums of gradients of a stage by the segment of its backward, or weight half, that makes them."""
    segments = [segment for phase in GRADIENT_PHASES for segment in memory.segments.get(phase, ())]
    made = [segment.gradients for segment in segments] or [0.0]
    made[0] += memory.gradients - sum(made)
    return made


class _Account:
    """Bytes by category: those before the program, and their growth as instructions start and end.

    ``columns`` are the instructions segment by segment, and ``numbers`` the instructions of the segments;
    ``is_last`` tells the last segment of each instruction.
    """

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.sync_spec, self.rank = plan, plan.sync_spec, program.rank
        own = stages_on(plan.placement, program.rank)
        self.stages = {stage: plan.stages[stage].cost.memory for stage in own}
        whole = InstructionColumns.of(program.instructions, plan.links)
        self.columns, self.numbers = split_into_segments(whole, plan.segments)
        self.is_last = np.append(np.diff(self.numbers) > 0, True)[: len(self.columns)]
        self.before = dict.fromkeys([*MEMORY_CATEGORIES, _HOST], 0.0)
        self.starts = {kind: np.zeros(len(self.columns)) for kind in self.before}
        self.ends = {kind: np.zeros(len(self.columns)) for kind in self.before}
        for memory in self.stages.values():
            for kind, figure in _ALWAYS.items():
                self.before[kind] += getattr(memory, figure)
            self.before["inputs"] += memory.inputs * plan.num_microbatches
        for link in plan.links:
            if link.payload is Payload.WEIGHT and {link.source, link.target} <= self.stages.keys():
                self.before["parameters"] -= self._size(link.values)  # the borrower has no copy
        self._computes()
        self._messages()
        self._output_gradients()
        for stage, memory in self.stages.items():
            self._tail_and_results(stage)
            self._copies(stage, memory)
            if plan.mode.trains:
                self._gradients(stage, memory)
            if self.sync_spec.shard:
                self._collectives(stage)
            self._loads_and_stores(stage)
            if not self.sync_spec.stream:
                self._precomputed(stage, memory)

    def _computes(self) -> None:
        columns, computes = self.columns, np.flatnonzero(self.columns.is_compute)
        phases, stages = columns.phases[computes], columns.stages[computes]
        every = [stage.cost.memory for stage in self.plan.stages]
        starts, ends, transient = _of_computes(phases, stages, every)
        for stage, memory in self.stages.items():
            for phase, segments in memory.segments.items():
                of_phase = (phases == PHASE_CODE[phase]) & (stages == stage)
                for number, segment in enumerate(segments):
                    own = of_phase & (columns.segments[computes] == number)
                    starts[own], ends[own], transient[own] = 0.0, segment.growth, segment.transient
            updates = self._updates(stage)
            self._hold("running", updates, updates, memory.update)
        self._grow("saved", computes, starts, ends)
        self._hold("running", computes, computes, transient)

    def _tail_and_results(self, stage: int) -> None:
        """Inputs of the tail, from each forward on, their copy with all rows, and gradients of these.

        Results of microbatches stay until they are merged.
        """
        forwards, runs = self._at(Op.FORWARD, stage), self._at(Op.TAIL, stage)
        forwards = forwards[self.columns.segments[forwards] <= 0]
        for link in self.plan.links:
            if link.payload is Payload.RESULT and link.source == stage:
                self._grow("results", forwards, 0.0, self._size(link.values))
        if tail := self.plan.stages[stage].tail:
            joined, gradients = (self._size(values, of_all=True) for values in (tail.inputs, tail.gradients))
            self._grow("results", forwards, 0.0, tail.unsaved_bytes)
            self._grow("results", runs, 0.0, -tail.unsaved_bytes * forwards.size)
            self._hold("running", runs, runs, joined + tail.transient_bytes)
            reads = np.concatenate([self._at(op, stage) for op in (Op.BACKWARD, Op.BACKWARD_INPUT)])
            if reads.size:
                self._grow("saved", runs, 0.0, gradients)
                self._grow("saved", reads.max(keepdims=True), 0.0, -gradients)

    def _output_gradients(self) -> None:
        """The gradients of outputs, which a script gives behind the pause where it has the outputs.

        Each rank gets those of all rows.
        """
        names, rank = {each.name for each in self.plan.trained_outputs}, self.rank
        links = (link for link in self.plan.links if link.payload.is_result)
        here = (link for link in links if rank in result_ranks(link, self.plan.placement))
        results = (value for link in here for value in link.values if value.name in names)
        size = self._size(results, of_all=True)
        self._grow("results", np.flatnonzero(self.columns.ops == OP_CODE[Op.PAUSE]), 0.0, size)

    def _copies(self, stage: int, memory: StageMemory) -> None:
        """Offloaded values are on the host alone from the wait for the offload to the prefetch."""
        prefetches = self._at(Op.PREFETCH, stage)
        self._grow("saved", self._at(Op.WAIT_OFFLOAD, stage), 0.0, -memory.offloaded)
        self._grow("saved", prefetches, memory.offloaded, 0.0)
        self._hold(_HOST, self._at(Op.OFFLOAD, stage), prefetches, memory.offloaded)

    def _gradients(self, stage: int, memory: StageMemory) -> None:
        """Sums of gradients, from the first gradients after a reduction to the next reduction.

        ``.grad`` is None when a step begins, so the sums become it and nothing is held twice. Buffers that
        are reduced without sharding stay from step to step.
        """
        if self.sync_spec.stream:
            self.before["gradients"] += memory.gradients
            return
        others, numbers = _sums_by_segment(memory), self.sync_spec.buckets_of(stage)
        numbers = [number for number in numbers if self.sync_spec.buckets[number].trained]
        for number in numbers:
            bucket = self.sync_spec.buckets[number]
            num_bytes = self._size(bucket.parameters)
            others[bucket.segment] -= num_bytes
            if bucket.on_host:
                self._sum_until(self._at(Op.WAIT_STORE, stage, number), num_bytes, stage, bucket.segment)
            elif self.sync_spec.shard:
                reductions = self._at(Op.REDUCE_GRAD, stage, number)
                self._sum_until(reductions, num_bytes, stage, bucket.segment)
            else:
                self.before["gradients"] += num_bytes
                self._keep_until_accumulated(self._making(stage, bucket.segment), stage, num_bytes)
        if numbers:  # others than gradients of borrowed weights, which go to their owners, are in transit
            links = (link for link in self.plan.links if link.payload is Payload.WEIGHT_GRADIENT)
            borrowed = sum(self._size(link.values) for link in links if link.source == stage)
            others[0] -= (in_transit := sum(others) - borrowed)
            self.before["gradients"] += in_transit
        for segment, num_bytes in enumerate(others):
            self._sum_until(self._updates(stage), num_bytes, stage, segment)

    def _sum_until(self, reductions: Ints, amount: float, stage: int, segment: int) -> None:
        """Sums that begin with the first gradients of a segment after each reduction."""
        made = self._making(stage, segment)
        rounds, first = np.unique(np.searchsorted(reductions, made), return_index=True)
        self._grow("gradients", made[first], 0.0, amount)
        self._keep_until_accumulated(np.delete(made, first), stage, amount)
        self._grow("gradients", reductions[rounds[rounds < reductions.size]], 0.0, -amount)

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
        self._grow("gradients", own, 0.0, amount)
        self._grow("gradients", accumulates[np.searchsorted(accumulates, own)], 0.0, -amount)

    def _messages(self) -> None:
        columns, links, sent_bytes = self.columns, self.plan.links, self.plan.link_sender_bytes
        sends, moves, receives = (
            np.flatnonzero(columns.ops == OP_CODE[op]) for op in (Op.SEND, Op.MOVE, Op.RECV)
        )
        for group in equal_groups(columns.link_numbers[sends], columns.peers[sends]):
            of_peer, number = sends[group], int(columns.link_numbers[sends[group[0]]])
            replacing = of_peer[NUM_SENDS_IN_TRANSIT:]
            amount = sum(sent_bytes[number])
            self._grow("sent", of_peer, amount, 0.0)
            self._grow("sent", replacing, -amount, 0.0)
            until_end = np.full(of_peer.size - replacing.size, len(columns))
            self._outlive_saved(number, of_peer, np.append(replacing, until_end))
        for group in equal_groups(columns.link_numbers[moves]):
            number = int(columns.link_numbers[moves[group[0]]])
            self._keep_until_read(number, moves[group], sent_bytes[number])
        for group in equal_groups(columns.link_numbers[receives]):
            own, number = receives[group], int(columns.link_numbers[receives[group[0]]])
            if columns.slots[own[0]] >= 0:
                self._keep_until_read(number, own, [self._size([value]) for value in links[number].values])
            elif links[number].payload is not Payload.WEIGHT:  # a borrowed weight is a parameter of the stage
                self._grow("received", own, self._size(links[number].values, of_all=True), 0.0)

    def _keep_until_read(self, number: int, arrivals: Ints, amounts: Sequence[float]) -> None:
        """Values of a link, from the instructions that bring them until the last compute that reads each."""
        microbatches = self.columns.microbatches
        by_reader = dict.fromkeys(readers := self.plan.link_reader_phases[number], 0.0)
        for reader, amount in zip(readers, amounts, strict=True):
            by_reader[reader] += amount
        for reader, amount in by_reader.items():
            reads = self._at(Op(reader), self.plan.links[number].target)
            last = np.zeros(int(microbatches.max()) + 1, np.int64)
            last[microbatches[reads]] = reads
            self._hold("received", arrivals, last[microbatches[arrivals]], amount)

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
        self._grow("sent", saved_until[outlives], amount, 0.0)
        self._grow("sent", replaced[outlives & (replaced < len(columns))], -amount, 0.0)

    def _updates(self, stage: int) -> Ints:
        return np.sort(np.concatenate([self._at(op, stage) for op in (Op.UPDATE, Op.HOST_UPDATE)]))

    def _loads_and_stores(self, stage: int) -> None:
        """Parameters that are on the host, while they are loaded, and gradients that were stored there."""
        for number in self.sync_spec.buckets_of(stage):
            bucket = self.sync_spec.buckets[number]
            if bucket.on_host:
                num_bytes = self._size(bucket.parameters)
                loads, stores = (self._at(op, stage, number) for op in (Op.LOAD, Op.STORE))
                self._hold("parameters", loads, self._at(Op.RESHARD, stage, number), num_bytes)
                self._hold(_HOST, stores, self._updates(stage), num_bytes)

    def _collectives(self, stage: int) -> None:
        for number in self.sync_spec.buckets_of(stage):
            bucket = self.sync_spec.buckets[number]
            if bucket.on_host:
                continue
            if self.sync_spec.reshards_after_use(bucket):
                gathered, freed = (self._at(op, stage, number) for op in (Op.UNSHARD, Op.RESHARD))
                self._hold("in_transit", gathered, freed, bucket.unsharded_bytes)
            reduces, ends = (self._at(op, stage, number) for op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD))
            received = bucket.in_transit_bytes - bucket.unsharded_bytes
            self._grow("in_transit", reduces, bucket.unsharded_bytes, received)  # once gradients are copied
            self._grow("in_transit", ends, 0.0, -bucket.in_transit_bytes)
            self._grow("gradients", reduces, 0.0, bucket.shard_bytes)
            until = np.append(ends[1:], self._updates(stage)[: bool(reduces.size)])
            if self.sync_spec.is_in_host_memory(bucket):
                self._hold(_HOST, ends, until, bucket.shard_bytes)
                until = ends
            self._grow("gradients", until, 0.0, -bucket.shard_bytes)

    def _precomputed(self, stage: int, memory: StageMemory) -> None:
        """Values precomputed from weights, until these are freed where they are gathered for use.

        In a stream there are those of several versions, all the time.
        """
        made, gone = self._at(Op.PRECOMPUTE, stage), self._at(Op.RESHARD, stage)
        self.before["precomputed"] -= memory.precomputed * bool(made.size)
        freed = np.searchsorted(gone, made)
        self._hold("precomputed", made, gone[freed[freed < gone.size]], memory.precomputed)

    def _size(self, values: Iterable[Value], *, of_all: bool = False) -> float:
        """The bytes of values with the rows of a microbatch, or ``of_all`` of them."""
        rows = self.plan.microbatch_size * (self.plan.num_microbatches if of_all else 1)
        return sum(value_bytes(value, {**self.plan.sizes, "b": rows}) for value in values)

    def _at(self, op: Op, stage: int, bucket: int = -1) -> Ints:
        columns = self.columns
        found = (columns.ops == OP_CODE[op]) & (columns.stages == stage)
        chosen: Ints = np.flatnonzero(found & (columns.buckets == bucket) if bucket >= 0 else found)
        return chosen

    def _hold(self, kind: str, made: Ints, gone: Ints, amount: Floats | float) -> None:
        """Bytes from the start of each instruction that makes them to the end of each that frees them."""
        self._grow(kind, made, amount, 0.0)
        self._grow(kind, gone, 0.0, -amount)

    def _grow(self, kind: str, positions: Ints, start: Floats | float, end: Floats | float) -> None:
        """Grow a category by ``start`` as the instructions at ``positions`` start, by ``end`` as they end."""
        np.add.at(self.starts[kind], positions, start)
        np.add.at(self.ends[kind], positions, end)

    def over_time(self) -> dict[str, BytesOverTime]:
        """The bytes of each category; while an instruction runs, those of its largest segment."""
        kinds = self.before
        after = {kind: kinds[kind] + np.cumsum(self.starts[kind] + self.ends[kind]) for kind in kinds}
        during = {kind: amounts - self.ends[kind] for kind, amounts in after.items()}
        total = sum((during[kind] for kind in MEMORY_CATEGORIES), np.zeros(len(self.columns)))
        highest = np.lexsort((-np.arange(total.size), total, self.numbers))[self.is_last]
        return {kind: (kinds[kind], during[kind][highest], after[kind][self.is_last]) for kind in kinds}
