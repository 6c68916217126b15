"""The words and numbers that every picture of a timeline shares."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, OPS
from pipec.ir.text_format import PHASE_LETTERS, format_bytes, format_seconds, value_bytes
from pipec.timeline.events import Event, Events, Timeline
from pipec.timeline.steady_state import steady_state

BLOCKING_NAMES: Mapping[Op, str] = {
    Op.FORWARD: "forward",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
    Op.TAIL: "tail",
    Op.UPDATE: "update",
}
"""What occupies a rank, by the names that readers see."""

COLLECTIVE_NAMES: Mapping[Op, str] = {
    Op.SUM_COUNTS: "sum of counts",
    Op.GATHER_ROWS: "gathering of rows",
    Op.REDUCE_GRAD: "gradient reduction",
    Op.AVERAGE_BUFFERS: "buffer all-reduce",
    Op.GRAD_NORM: "gradient norm",
    Op.UNSHARD: "parameter all-gather",
    Op.ALL_REDUCE: "all-reduce",
    Op.ALL_GATHER: "all-gather",
    Op.REDUCE_SCATTER: "reduce-scatter",
}

COPY_NAMES: Mapping[Op, str] = {
    Op.OFFLOAD: "offload",
    Op.PREFETCH: "prefetch",
    Op.LOAD: "load",
    Op.STORE: "store",
    Op.HOST_UPDATE: "update in host memory",
}

NAMES = {**BLOCKING_NAMES, **COLLECTIVE_NAMES, **COPY_NAMES}

LETTERS: Mapping[Op, str] = {
    **{Op(phase): letter for phase, letter in PHASE_LETTERS.items()},
    Op.TAIL: "T",
    Op.UPDATE: "U",
    Op.SUM_COUNTS: "C",
    Op.GATHER_ROWS: "R",
    Op.REDUCE_GRAD: "Σ",
    Op.AVERAGE_BUFFERS: "A",
    Op.GRAD_NORM: "N",
    Op.UNSHARD: "G",
    Op.ALL_REDUCE: "+",
    Op.ALL_GATHER: "J",
    Op.REDUCE_SCATTER: "S",
    Op.OFFLOAD: "H",
    Op.PREFETCH: "D",
    Op.LOAD: "L",
    Op.STORE: "O",
    Op.HOST_UPDATE: "U",
}
"""What the labels of cells begin with."""

_MOST_NAMES = 2
"""Parameters of a bucket that are named. Of more, the first is named and the others are counted."""


def ops_present(events: Events) -> list[Op]:
    """The ops that occur, in the order of ``NAMES``."""
    found = np.bincount(events.instructions.ops, minlength=len(OPS))
    return [op for op in NAMES if found[OP_CODE[op]]]


def lane_name(timeline: Timeline, rank: int) -> str:
    """``rank 3``, or ``rank 3, stage 1, 2 of 2`` if any stage of the step has replicas."""
    name = f"rank {timeline.global_rank(rank)}"
    if not timeline.stages[rank] or max(map(len, timeline.replicas.values())) == 1:
        return name
    held, place = timeline.stages[rank], replica_label(timeline, rank)
    stages = f"stage {held[0]}" if len(held) == 1 else f"stages {' '.join(map(str, held))}"
    others = timeline.representatives.counts[rank] - 1 if timeline.representatives else 0
    return ", ".join(filter(None, [name, stages, place, f"{others:,} others do the same" if others else ""]))


def replica_label(timeline: Timeline, rank: int) -> str:
    """``2 of 3`` for the second of the three ranks that share the stages of this one; else nothing."""
    ranks = timeline.replicas[timeline.stages[rank][0]] if timeline.stages[rank] else ()
    if len(ranks) < 2:
        return ""
    if timeline.representatives:
        return f"one of {timeline.representatives.num_replicas:,}"
    return f"{ranks.index(rank) + 1} of {len(ranks)}"


def overlap_rows(events: Events) -> list[int]:
    """The row in which each of these is shown. Those of a rank that overlap are in several."""
    ends: dict[tuple[int, int], float] = {}
    rows = []
    columns = (events.ranks.tolist(), events.starts.tolist(), events.ends.tolist())
    for rank, start, end in zip(*columns, strict=True):
        row = 0
        while ends.get((rank, row), start) > start:
            row += 1
        ends[rank, row] = end
        rows.append(row)
    return rows


def payload_description(timeline: Timeline, event: Event) -> str:
    """The payload of a collective: ``bucket 0 of stage 1, 1.2 MB: h.0.weight and 5 others``; or a copy."""
    instruction = event.instruction
    if event.is_copy and instruction.microbatch >= 0:
        return f"saved values of stage {instruction.stage}, microbatch {instruction.microbatch}"
    stage = f"stage {instruction.stage}" if instruction.stage >= 0 else "all stages"
    if instruction.op is Op.SUM_COUNTS:
        return f"batch counts of {stage}"
    if instruction.model_collective >= 0:
        return (
            f"model collective {instruction.model_collective} of {stage}, microbatch {instruction.microbatch}"
        )
    if not 0 <= instruction.bucket < len(timeline.sync_spec.buckets):
        return f"bucket {instruction.bucket} of {stage}" if instruction.bucket >= 0 else f"{stage}"
    bucket = timeline.sync_spec.buckets[instruction.bucket]
    travels_as = timeline.sync_spec.gradient_dtype if instruction.op is Op.REDUCE_GRAD else ""
    values = [replace(value, dtype=travels_as or value.dtype) for value in bucket.parameters]
    names, num_bytes = bucket.names, sum(value_bytes(value, {}) for value in values)
    told = " and ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} and {len(names) - 1} others"
    size = f"{format_bytes(num_bytes)} as {travels_as}" if travels_as else format_bytes(num_bytes)
    return f"bucket {instruction.bucket} of {stage}, {size}: {told}"


def collective_ranks(timeline: Timeline, event: Event) -> Sequence[int]:
    """The ranks of a collective, of those that the timeline shows; a copy has one."""
    if event.is_copy:
        return [timeline.global_rank(event.rank)]
    ranks = timeline.replicas.get(event.instruction.stage, range(timeline.num_ranks))
    return [timeline.global_rank(rank) for rank in ranks]


def chunk_indices(timeline: Timeline) -> dict[int, int]:
    """The index of each stage among the stages of its rank, from 0."""
    return {stage: chunk for held in timeline.stages for chunk, stage in enumerate(held)}


def event_labels(timeline: Timeline) -> Callable[[Event], str]:
    """How cells are labelled: ``F3`` is the forward of microbatch 3, ``U`` an update, ``Σ2`` sums bucket 2.

    If ranks hold several stages, ``Fb3`` is the forward of the second stage of its rank. ``B3.0`` is segment
    0 of a backward, and ``J3.1`` gathers what its stage calls model collective 1. Where steps follow each
    other without a flush, ``F3v1`` reads version 1 of its weights.
    """
    chunk_of = chunk_indices(timeline)
    several = max(chunk_of.values(), default=0) > 0

    def label(event: Event) -> str:
        instruction = event.instruction
        chunk = chr(ord("a") + chunk_of[instruction.stage] % 26) if several and event.is_blocking else ""
        number = max(instruction.bucket, instruction.microbatch)
        behind = max(instruction.segment, instruction.model_collective)
        part = f".{behind}" if behind >= 0 else ""
        version = f"v{instruction.version}" if event.is_compute and instruction.version >= 0 else ""
        return f"{LETTERS[instruction.op]}{chunk}{number if number >= 0 else ''}{part}{version}"

    return label


def summary(timeline: Timeline) -> str:
    """The figures of merit on one line."""
    makespan, span = format_duration(timeline.makespan, timeline), format_duration(timeline.span, timeline)
    rates = f"bubble {timeline.bubble_rate:.1%}"
    if timeline.overhead_rate - timeline.bubble_rate > 5e-4:
        rates += f" ({timeline.overhead_rate:.1%} if recomputing counts as idle)"
    idle = f"idle {idle_share(timeline):.1%} of makespan {makespan}"
    if not timeline.sync_spec.runs_microbatches:
        return idle
    in_flight = f"at most {max(timeline.peak_in_flight, default=0)} in flight"
    if steady := steady_state(timeline):
        every = format_duration(steady.batch_interval, timeline)
        in_flight += f"; steady state: a mini-batch every {every}, bubble {steady.bubble_rate:.1%}"
    return f"{rates} of span {span}, {idle}, {in_flight}"


def idle_share(timeline: Timeline) -> float:
    """The share of the makespan in which the ranks, on average, compute and update nothing."""
    counts = np.array(
        timeline.representatives.counts if timeline.representatives else [1] * timeline.num_ranks
    )
    work = timeline.blocking
    busy = float(((work.ends - work.starts) * counts[work.ranks]).sum())
    return 1 - busy / (int(counts.sum()) * timeline.makespan) if timeline.makespan else 0.0


def format_duration(time: float, timeline: Timeline) -> str:
    """``time`` with its unit."""
    return format_seconds(time) if timeline.unit == "s" else f"{time:.6g} {timeline.unit}"


def time_axis(timeline: Timeline, most: int) -> tuple[str, list[tuple[float, str]]]:
    """The unit of the time axis, and about ``most`` ticks at round numbers, each a time and its text."""
    factor, unit = 1.0, timeline.unit
    if unit == "s":
        scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
        factor, unit = next((scale for scale in scales if timeline.makespan >= scale[0]), (1e-9, "ns"))
    end = timeline.makespan / factor
    step = _round_step(end / most) if end else 1.0
    return unit, [(k * step * factor, f"{k * step:g}") for k in range(int(end / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
