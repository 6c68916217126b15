"""The cells that instructions of a rank read and change, from the rows of their ops in ``ir/program.py``."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipec.ir import Mode, Op, OpKind, Payload, Stream, SyncSpec, replica_counts, stages_on
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints, constant, taken
from pipec.ir.program import CELLS
from pipec.ir.text_format import format_link
from pipec.programs.lives import AT_START, Accesses, Life, life
from pipec.programs.program_index import ProgramIndex

_Keys = tuple[Ints, Ints]
"""Keys of cells, and the instructions that access them."""

Access = tuple[int, Ints, Ints]
"""An event of a life, with the keys of the cells that have it and the instructions that cause it."""

_OF_EACH_SEGMENT = ("gradients", "unadded", "gathered", "precomputed", "version", "stashed")
"""The cells that every segment of a compute makes or reads: gradients and weights."""


@dataclass(frozen=True)
class RankCells:
    """The cells of one rank of a step, and what its instructions do to them: ``columns``."""

    step: ProgramIndex
    rank: int
    columns: InstructionColumns

    @cached_property
    def stages(self) -> Sequence[int]:
        """The stages of the rank."""
        return stages_on(self.step.plan.placement, self.rank)

    @property
    def stream(self) -> Stream | None:
        return self.step.plan.sync_spec.stream

    @property
    def sync_spec(self) -> SyncSpec:
        return self.step.plan.sync_spec

    @cached_property
    def size(self) -> np.int64:
        """The number of microbatches."""
        return np.int64(self.step.plan.num_microbatches)

    @cached_property
    def round_sizes(self) -> Ints:
        """By stage, how many microbatches an update of a stream uses; last, how many a mini-batch has."""
        stream, replicas = self.stream, replica_counts(self.step.plan.placement)
        assert stream is not None
        sizes = [stream.microbatches_per_update(stage, replicas) for stage in range(len(replicas))]
        return np.array([*sizes, stream.microbatches])

    def lives(self) -> Iterator[tuple[str, Life, Accesses]]:
        """Each cell that some instruction accesses, with its life and the accesses, in the order of cells."""
        found = self.accesses(CELLS)
        if found["slot"]:
            found["slot"] += self._slots_freed()
        for cell in CELLS:
            if found[cell] and not self._is_free(cell, found[cell]):
                yield cell, self.life(cell), Accesses.of([*found[cell], *self._given(cell)])

    def accesses(self, names: Collection[str]) -> dict[str, list[Access]]:
        """What the instructions do to the cells of these names, by name."""
        found: dict[str, list[Access]] = {cell: [] for cell in names}
        for op, numbers in self.columns.numbers_by_op.items():
            for cell, event, kind in op.traits.effect_parts:
                if cell in found:
                    found[cell] += self.caused(op, cell, event, kind, numbers)
        return found

    def caused(self, op: Op, cell: str, event: str, kind: str, numbers: Ints) -> Iterator[Access]:
        """An effect of the instructions with these numbers, or of an ``op`` with their fields."""
        if event not in self.life(cell).events or not self.exists(cell):
            return
        own = self._of_kind(kind, numbers) if kind else numbers
        if event != "add" and cell not in _OF_EACH_SEGMENT:
            own = self._of_segments(op, event, own)
        number = self.life(cell).events.index(event)
        for keys, accessing in _KEYS[CELLS[cell][0]](self, cell, op, event, own) if own.size else ():
            if accessing.size:
                yield number, keys, accessing

    def exists(self, cell: str, number: int = -1) -> bool:
        """Whether the plan has a cell: that of a stage or bucket, or without a number any of this rank."""
        if cell not in WHERE:
            return True
        if number >= 0 or not CELLS[cell][0]:
            return WHERE[cell](self, number)
        every = range(len(self.sync_spec.buckets)) if CELLS[cell][0] == "bucket" else self.stages
        return any(WHERE[cell](self, each) for each in every)

    def life(self, cell: str) -> Life:
        """The life of a cell. That of a round has what the step needs before an update."""
        pattern = CELLS[cell][1]
        if cell == "round":
            pattern = pattern.replace("check?", "check" if self.sync_spec.on_nan else "")
            pattern = pattern.replace("norm?", "norm" if self.sync_spec.clips else "")
        return life(pattern)

    def _is_free(self, cell: str, parts: Sequence[Access]) -> bool:
        """Whether all accesses are one event that is always allowed."""
        allowed, event = self.life(cell).allowed, parts[0][0]
        return all(each == event for each, *_ in parts) and bool(
            allowed[-1, event] and allowed[event, event] and allowed[event, -1]
        )

    def _given(self, cell: str) -> Iterator[Access]:
        """The events before the first instruction: of a stream, the first version and the first rounds."""
        for stage in self.stages if cell in ("version", "round") else ():
            of_version = cell == "version"
            keys = self.version_keys(np.array([stage]), 0) if of_version else self.round_keys(stage, 0)
            yield 0, keys, np.full(keys.size, AT_START)

    def _of_kind(self, kind: str, numbers: Ints) -> Ints:
        """Those of some instructions that carry a link with one of these payloads, or ``none``.

        Or, of a tail, those of stages whose tail reads parameters, and the unshards after an update.
        """
        columns = self.columns
        if kind == "tail":
            tails = [stage.tail for stage in self.step.plan.stages]
            chosen = np.array([bool(tail and tail.parameters) for tail in tails])[columns.stages[numbers]]
        elif kind == "late":
            late = [not self.sync_spec.reshards_after_use(each) for each in self.sync_spec.buckets]
            chosen = np.array(late)[columns.buckets[numbers]]
        elif not (having := self.step.links_with(kind)).any():
            return numbers[:0]
        else:
            chosen = having[taken(columns.link_numbers, numbers)]
        found: Ints = numbers[chosen]
        return found

    def _of_segments(self, op: Op, event: str, numbers: Ints) -> Ints:
        """The segments of computes that cause an event: the last of a compute makes, the first reads."""
        segments = taken(self.columns.segments, numbers)
        if op.traits.kind is not OpKind.COMPUTE or segments.max(initial=-1) < 0:
            return numbers
        if event != "make":
            return numbers[segments <= 0]
        last = np.array(
            [self.step.num_segments(op, each) - 1 for each in range(len(self.step.plan.placement))]
        )
        found: Ints = numbers[(segments < 0) | (segments == last[taken(self.columns.stages, numbers)])]
        return found

    def _slots_freed(self) -> Iterator[Access]:
        """The frees of what is in a slot: the last one, of the stages that read its values on this rank."""
        freed, columns = self.step.numbers[OP_CODE[Op.FREE]], self.columns
        for keys, filled in self.slot_fills:
            number = int(columns.link_numbers[filled[0]])
            reading = self.step.holding_stages.get(number, [columns.links[number].target])
            held = [(stage, taken(columns.microbatches, filled)) for stage in reading if stage in self.stages]
            on_rank = [np.where(self.step.ranks[at] == self.rank, freed[at], -1) for at in held]
            yield 1, keys, np.maximum.reduce(on_rank)

    @cached_property
    def slot_fills(self) -> Sequence[_Keys]:
        """By link, the keys of slots and the instructions that fill them."""
        columns, found = self.columns, []
        numbers = columns.numbers_of(Op.RECV, Op.MOVE)
        numbers = numbers[taken(columns.slots, numbers) >= 0]
        links, most = taken(columns.link_numbers, numbers), np.int64(columns.slots.max(initial=0)) + 1
        for link in np.unique(links).tolist():
            own = numbers[links == link]
            found.append((link * most + taken(columns.slots, own), own))
        return found

    def version_keys(self, stages: Ints, versions: Ints | int) -> Ints:
        """The keys of versions of the weights of stages."""
        keys: Ints = stages * (self.size + 2) + versions + 1
        return keys

    def round_keys(self, stage: int, rounds: Ints | int, bucket: int | None = None) -> Ints:
        """The keys of rounds of a stage: for each of its buckets, or one if it has none."""
        buckets = self.sync_spec.buckets_of(stage) or [-1]
        base = (stage * (self.size + 1) + np.atleast_1d(rounds)) * (len(self.sync_spec.buckets) + 1) + 1
        return np.concatenate([base + each for each in (buckets if bucket is None else [bucket])])

    def message_keys(self, links: Ints | int, microbatches: Ints, peers: Ints | int) -> Ints:
        """The keys of messages by link, microbatch and peer."""
        keys: Ints = (links * (self.size + 1) + microbatches + 1) * (len(self.step.columns) + 1) + peers + 1
        return keys

    def received_keys(self, links: Ints, microbatches: Ints, peers: Ints) -> Ints:
        """The keys of messages that a rank receives: what feeds a compute comes from one peer, not named."""
        named = self.step.links_with("result/microbatch_result/weight_gradient")[links]
        return self.message_keys(links, microbatches, np.where(named, peers, -1) if named.any() else -1)

    @cached_property
    def result_makers(self) -> Sequence[int]:
        """The stages that make results of microbatches."""
        links = self.step.plan.links
        return [link.source for link in links if link.payload is Payload.MICROBATCH_RESULT]

    def batches(self, op: Op, numbers: Ints) -> _Keys:
        """The mini-batches of pauses, of updates and checks, and of forwards and waits that yield results."""
        plan, columns, stream = self.step.plan, self.columns, self.stream
        assert stream is not None
        if op is Op.FORWARD:
            numbers = numbers[np.isin(columns.stages[numbers], self.result_makers)]
            numbers = numbers[columns.segments[numbers] <= 0]
        elif op.traits.carries_link:
            numbers = self._of_kind("microbatch_result", numbers)
        microbatches = columns.microbatches[numbers].astype(np.int64)
        if op in (Op.UPDATE, Op.CHECK):
            ends = microbatches + self.round_sizes[columns.stages[numbers]]
            last = plan.num_microbatches // stream.microbatches - 1
            return np.minimum(ends // stream.microbatches - 1, last), numbers
        return microbatches // stream.microbatches, numbers

    @cached_property
    def last_results(self) -> Ints:
        """The instructions that yield the last result of each mini-batch, received or awaited."""
        awaited = self._of_kind("microbatch_result", self.columns.numbers_of(Op.WAIT_RECV)).size > 0
        yielding = Op.FORWARD, Op.WAIT_RECV if awaited else Op.RECV
        made = [self.batches(op, self.columns.numbers_of(op)) for op in yielding]
        batches, numbers = (np.concatenate(each) for each in zip(*made, strict=True))
        order = np.lexsort((numbers, batches))
        last: Ints = numbers[order][np.append(np.diff(batches[order]) != 0, True)[: order.size]]
        return last

    def place_of(self, cell: str, key: int) -> tuple[int, int, str]:
        """The stage and the microbatch of a cell, and its name with a blank before it."""
        plan, size, fields = self.step.plan, self.step.plan.num_microbatches, CELLS[cell][0]
        if "link" in fields:
            number, microbatch = divmod(key // (len(self.step.columns) + 1), size + 1)
            link = plan.links[number]
            name = format_link(link) + (f", microbatch {microbatch - 1}" if microbatch else "")
            return link.source if cell == "sent" else link.target, microbatch - 1, f" of {name}"
        if cell == "round":
            key, bucket = divmod(key, len(plan.sync_spec.buckets) + 1)
            stage, number = divmod(key, size + 1)
            name = f"stage {stage}, round {number}" + (f", bucket {bucket - 1}" if bucket else "")
            return stage, -1, f" of {name}"
        if not fields:
            return -1, -1, ""
        if fields == "bucket":
            return -1, -1, f" of stage {plan.sync_spec.buckets[key].stage}, bucket {key}"
        if fields == "stage":
            return -1, -1, f" of stage {key}"
        key, number = divmod(key, self.most_collectives) if cell == "collective" else (key, -1)
        stage, microbatch = divmod(key, size)
        name = f"stage {stage}, microbatch {microbatch}"
        name += f", model collective {number}" if cell == "collective" else ""
        return stage, microbatch, f" of {name}"

    @property
    def most_collectives(self) -> int:
        """The most model collectives of a stage."""
        return max((len(stage.model_collectives) for stage in self.step.plan.stages), default=0)


def _of_microbatch(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    columns = cells.columns
    stages, microbatches = taken(columns.stages, numbers), taken(columns.microbatches, numbers)
    if op is Op.MOVE and event == "read":
        stages = cells.step.sources[taken(columns.link_numbers, numbers)]
    valid = (stages >= 0) & (microbatches >= 0)
    if len(having := [stage for stage in cells.stages if cells.exists(cell, stage)]) < len(cells.stages):
        valid &= np.isin(stages, having)
    if not valid.all():
        numbers, stages, microbatches = numbers[valid], stages[valid], microbatches[valid]
    yield stages * cells.size + microbatches, numbers


def _of_gradients(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    columns, most = cells.columns, max(cells.step.segments.values(), default=0) + 1
    keys = taken(columns.stages, numbers) * cells.size + taken(columns.microbatches, numbers)
    yield keys * most + taken(columns.segments, numbers) + 1, numbers


def _of_message(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """Messages that a rank sends, or receives or moves, and that its computes read."""
    columns = cells.columns
    if op.traits.carries_link or op is Op.ACCUMULATE:
        if cell != "sent":
            is_returned = cells.step.links_with("weight_gradient")[taken(columns.link_numbers, numbers)]
            numbers = numbers[is_returned if cell == "returned" else ~is_returned]
        fields = [taken(columns.columns[k], numbers) for k in (3, 2, 4)]
        yield (cells.message_keys if cell == "sent" else cells.received_keys)(*fields), numbers
        return
    stages = taken(columns.stages, numbers)
    for number in cells.step.links_at(cells.stages):
        link = cells.step.plan.links[number]
        if link.target in cells.stages and op.phase in link.payload.readers:
            own = numbers[stages == link.target] if len(cells.stages) > 1 else numbers
            every = taken(columns.microbatches, own)
            read = every if link.payload.per_microbatch else constant(-1, every.size)
            yield cells.message_keys(number, read, -1), own


def _of_slot(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    if op is Op.RECV or not cells.columns.numbers_of(Op.RECV).size:
        yield from cells.slot_fills


def _of_collective(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """The segment before a model collective makes its input, and the one after it reads the result."""
    columns = cells.columns
    if op.traits.kind is not OpKind.COMPUTE:
        keys = taken(columns.stages, numbers) * cells.size + taken(columns.microbatches, numbers)
        yield keys * cells.most_collectives + taken(columns.model_collectives, numbers), numbers
        return
    every = columns.numbers_of(op)
    for stage in cells.stages:
        for number, each in enumerate(cells.step.model_collectives(stage)):
            if each.phase is op.phase:
                is_segment = columns.segments[every] == each.segment - (event == "make")
                own = every[(columns.stages[every] == stage) & is_segment]
                keys = stage * cells.size + columns.microbatches[own]
                yield keys * cells.most_collectives + number, own


def _of_stage(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """The cell of a stage, or of all on a rank for an op that names none."""
    stages = taken(cells.columns.stages, numbers)
    if op is Op.MOVE and event == "close":
        stages = cells.step.sources[taken(cells.columns.link_numbers, numbers)]
    for stage in cells.stages:
        if cells.exists(cell, stage):
            own = numbers[(stages == stage) | (stages < 0)]
            yield np.full(own.size, stage), own


def _of_bucket(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """The cell of a bucket, or those of a stage, or all, for an op that names none.

    Gradients are added to a bucket by segments up to the one that completes it, and by tied weights. What
    moves a tied weight reads its bucket.
    """
    columns, buckets = cells.columns, cells.sync_spec.buckets
    stages, named = taken(columns.stages, numbers), taken(columns.buckets, numbers)
    links = taken(columns.link_numbers, numbers)
    for number, bucket in enumerate(buckets):
        if bucket.stage not in cells.stages or not cells.exists(cell, number):
            continue
        own = ((stages == bucket.stage) | (stages < 0)) & ((named == number) | (named < 0))
        moves = [not {*link.names}.isdisjoint(bucket.names) for link in columns.links]
        moved = np.array([*moves, False])[links]
        if event == "add":
            early = bucket.is_tied | (taken(columns.segments, numbers) <= bucket.segment)
            own &= np.where(links < 0, early, moved)
        elif cell == "gathered" and op in (Op.SEND, Op.MOVE):  # a move names the stage that gets the weight
            own = moved
        yield np.full(int(own.sum()), number), numbers[own]


def _of_step(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    yield np.zeros(numbers.size, np.int64), numbers


def _of_version(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """A version; one that a compute reads after the update that replaces it is ``stashed``."""
    columns = cells.columns
    versions = taken(columns.versions, numbers)
    if cell == "precomputed":
        yield from _of_precomputed(cells, op, numbers)
        return
    if op.traits.kind is OpKind.COMPUTE:
        is_late, updates = np.zeros(numbers.size, bool), columns.numbers_of(Op.UPDATE)
        for stage in cells.stages:
            own = columns.stages[numbers] == stage
            made = np.searchsorted(updates[columns.stages[updates] == stage], numbers[own])
            is_late[own] = versions[own] < made
        chosen = is_late if cell == "stashed" else ~is_late
        numbers, versions = numbers[chosen], versions[chosen]
    yield cells.version_keys(columns.stages[numbers], versions - (event == "replace")), numbers


def _of_precomputed(cells: RankCells, op: Op, numbers: Ints) -> Iterator[_Keys]:
    """What is computed of one version of weights; where these are gathered for use, each time anew."""
    columns, freed = cells.columns, cells.columns.numbers_of(Op.RESHARD)
    for stage in cells.stages:
        phases = cells.step.plan.stages[stage].precomputed_phases
        if not phases or op.phase not in (None, *phases):
            continue
        own = numbers[columns.stages[numbers] == stage]
        if cells.stream and op is Op.PRECOMPUTE:  # the first periods of a stream all have version 0
            is_first = np.zeros(own.size, bool)
            is_first[np.unique(columns.versions[own], return_index=True)[1]] = True
            own = own[is_first | (columns.versions[own] > 0)]
        uses = np.searchsorted(freed[columns.stages[freed] == stage], own)
        keys = cells.version_keys(columns.stages[own], columns.versions[own])
        yield keys * (freed.size + 1) + uses, own


def _of_round(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """The gradients of one update of a stage. The sum before, or the update before, opens it.

    A sum is also the ``next`` event of the round before, which must be updated by then.
    """
    columns, plan = cells.columns, cells.step.plan
    assert cells.stream is not None
    for stage in cells.stages:
        size = int(cells.round_sizes[stage])
        own, buckets = numbers[columns.stages[numbers] == stage], cells.sync_spec.buckets_of(stage)
        if event == "open" and op is Op.UPDATE and buckets:
            continue
        rounds = columns.microbatches[own] // size + {"open": 1, "next": -1}.get(event, 0)
        valid = (rounds >= 0) & (rounds <= -(-plan.num_microbatches // size) - 1)
        own, rounds = own[valid], rounds[valid]
        if op.traits.awaits or op is Op.REDUCE_GRAD:
            for bucket in buckets:
                chosen = columns.buckets[own] == bucket
                yield cells.round_keys(stage, rounds[chosen], bucket), own[chosen]
        else:
            yield cells.round_keys(stage, rounds), np.tile(own, max(len(buckets), 1))


def _of_batch(cells: RankCells, cell: str, op: Op, event: str, numbers: Ints) -> Iterator[_Keys]:
    """Results of a mini-batch, after which a pause for the next one and a check come; and its request.

    The request decides about the last result of a mini-batch, and about the updates that end with it.
    """
    batches, own = cells.batches(op, numbers)
    if op is Op.PAUSE and event in ("read", "close"):
        batches = batches - 1
    elif cell == "request" and (op is Op.FORWARD or op.traits.awaits):
        is_last = np.isin(own, cells.last_results)
        batches, own = batches[is_last], own[is_last]
    yield batches[batches >= 0], own[batches >= 0]


_KEYS: Mapping[str, Callable[[RankCells, str, Op, str, Ints], Iterator[_Keys]]] = {
    "stage microbatch": _of_microbatch,
    "stage microbatch segment": _of_gradients,
    "stage microbatch model_collective": _of_collective,
    "link microbatch peer": _of_message,
    "link slot": _of_slot,
    "stage": _of_stage,
    "bucket": _of_bucket,
    "": _of_step,
    "stage version": _of_version,
    "round bucket": _of_round,
    "mini-batch": _of_batch,
}
"""By the fields that name a cell, the function that returns the keys of those that instructions access."""


def _is_reduced(cells: RankCells, bucket: int) -> bool:
    sync_spec = cells.sync_spec
    return not cells.stream and sync_spec.buckets[bucket].trained and sync_spec.runs_microbatches


def _averages(cells: RankCells, stage: int) -> bool:
    return cells.sync_spec.runs_microbatches and stage in cells.sync_spec.buffer_sync_stages


def _has_tail(cells: RankCells, stage: int) -> bool:
    return cells.sync_spec.runs_microbatches and cells.step.plan.stages[stage].tail is not None


def _tail_returns(cells: RankCells, stage: int) -> bool:
    tail = cells.step.plan.stages[stage].tail
    return _has_tail(cells, stage) and tail is not None and bool(tail.gradients)


def _is_gathered_for_use(cells: RankCells, bucket: int) -> bool:
    spec = cells.sync_spec
    return spec.runs_microbatches and spec.reshards_after_use(spec.buckets[bucket])


def _is_gathered_at_end(cells: RankCells, bucket: int) -> bool:
    spec = cells.sync_spec
    return bool(spec.shard) and spec.runs_update and not spec.reshards_after_use(spec.buckets[bucket])


WHERE: Mapping[str, Callable[[RankCells, int], bool]] = {
    "recomputed": lambda cells, stage: cells.step.trains and cells.step.plan.stages[stage].recompute,
    "input_gradient": lambda cells, _: cells.step.trains,
    "weight_gradient": lambda cells, _: cells.step.trains,
    "offloaded": lambda cells, stage: bool(cells.step.plan.stages[stage].offloaded),
    "collective": lambda cells, stage: bool(cells.step.model_collectives(stage)),
    "precomputed": lambda cells, stage: bool(cells.step.plan.stages[stage].precomputed_phases),
    "counts": lambda cells, stage: (
        cells.sync_spec.runs_microbatches and stage in cells.sync_spec.count_stages
    ),
    "rows": lambda cells, stage: _has_tail(cells, stage) and len(cells.step.plan.placement[stage]) > 1,
    "tail": _has_tail,
    "tail_gradients": _tail_returns,
    "loss": lambda cells, _: cells.step.plan.mode is Mode.OUTPUTS and cells.sync_spec.runs_microbatches,
    "averaged": _averages,
    "buffers": _averages,
    "sum": lambda cells, _: not cells.stream,
    "returned_sum": lambda cells, _: not cells.stream,
    "updated": lambda cells, _: cells.sync_spec.runs_update and not cells.stream,
    "bucket_sum": _is_reduced,
    "reduction": _is_reduced,
    "gathered": _is_gathered_for_use,
    "shards": _is_gathered_at_end,
    "norm": lambda cells, _: cells.sync_spec.has_grad_norm,
    "verdict": lambda cells, _: cells.sync_spec.has_grad_norm and cells.sync_spec.may_skip_step,
    "round": lambda cells, _: cells.stream is not None,
    "version": lambda cells, _: cells.stream is not None,
    "stashed": lambda cells, _: cells.stream is not None,
    "results": lambda cells, _: cells.stream is not None and bool(cells.result_makers),
    "request": lambda cells, _: cells.stream is not None and bool(cells.result_makers),
}
"""Of cells that not every plan has: whether a stage or a bucket of it has one."""
