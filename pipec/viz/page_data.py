"""What a page knows of its timelines, as columns of numbers. ``page/data.d.ts`` describes the same."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pipec.ir import Payload
from pipec.ir.columns import OPS, Floats, Ints
from pipec.timeline.attribution import Attribution, attribute_waits, critical_path
from pipec.timeline.curves import Curve, MemoryCurves, in_flight_over_time
from pipec.timeline.events import Event, Events, Timeline
from pipec.viz.bottleneck import bottleneck_lines
from pipec.viz.drawn_steps import DrawnStep
from pipec.viz.labels import (
    BLOCKING_NAMES,
    COLLECTIVE_NAMES,
    COPY_NAMES,
    LETTERS,
    NAMES,
    chunk_indices,
    collective_ranks,
    idle_share,
    lane_name,
    overlap_rows,
    payload_description,
    replica_label,
    summary,
)
from pipec.viz.packed_data import Column

MOST_EVENTS = 500_000
"""Of more, a page has only the messages for which a rank waited."""

_PHASES, _BESIDE = tuple(BLOCKING_NAMES), (*COLLECTIVE_NAMES, *COPY_NAMES)
_PAYLOADS = tuple(Payload)

_DIGITS = 7
"""Decimal digits of the longest time that the page keeps."""


def vocabulary() -> dict[str, object]:
    """The names of what can happen: their positions are the codes of the columns."""
    return {
        "phases": [{"key": op, "name": BLOCKING_NAMES[op], "letter": LETTERS[op]} for op in _PHASES],
        "ops": [
            {"key": op, "name": NAMES[op], "letter": LETTERS[op], "copies": op in COPY_NAMES}
            for op in _BESIDE
        ],
        "payloads": [payload.replace("_", " ") for payload in _PAYLOADS],
    }


def steps_data(steps: Sequence[DrawnStep]) -> list[dict[str, object]]:
    """The data of each step. Their times have one number of digits."""
    longest = max(step.timeline.makespan for step in steps)
    scale = 10.0 ** (_DIGITS - math.ceil(math.log10(longest))) if longest else 1.0
    whole = sum(len(step.timeline.events) for step in steps) <= MOST_EVENTS
    return [_step_data(step, scale, whole) for step in steps]


def _step_data(step: DrawnStep, scale: float, whole: bool) -> dict[str, object]:
    """The timeline as columns of numbers.

    Computes and updates are numbered together, messages apart, and collectives with copies, each in the order
    of events. ``cause`` is the number of the message that a compute waited for, ``collective`` that of the
    collective, and ``maker`` that of the compute before a message; -1 stands for none. Unless ``whole``,
    there are only those messages for which a rank waited.
    """
    timeline = step.timeline
    found, events = attribute_waits(timeline), timeline.columns
    path = np.array(critical_path(timeline, found), np.int64)
    messages = events.is_message
    if not whole:
        awaited = np.zeros(len(events) + 1, bool)
        awaited[found.awaited] = awaited[path] = True
        messages = messages & awaited[:-1]
    kinds = {"computes": events.is_blocking, "messages": messages, "collectives": events.is_overlapped}
    places = {kind: np.append(np.where(mask, np.cumsum(mask) - 1, -1), -1) for kind, mask in kinds.items()}

    def times(values: Floats) -> Column:
        return Column(np.rint(np.asarray(values) * scale).astype(np.int64), scale)

    def own_times(chosen: Events) -> dict[str, Column]:
        return {"start": times(chosen.starts), "end": times(chosen.ends)}

    blamed = found.awaited[events.is_blocking]
    return {
        "name": step.name,
        "schedule": step.schedule,
        "part": timeline.sync_spec.part,
        "microbatches": step.num_microbatches,
        "summary": summary(timeline),
        "findings": bottleneck_lines(timeline, found),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble_rate,
        "idle": idle_share(timeline),
        "host": step.host_seconds,
        "isRun": step.is_run,
        "note": step.note,
        "allMessages": whole,
        "peaks": timeline.peak_in_flight,
        "names": [lane_name(timeline, rank) for rank in range(timeline.num_ranks)],
        "numbers": [timeline.global_rank(rank) for rank in range(timeline.num_ranks)],
        "replicas": [replica_label(timeline, rank) for rank in range(timeline.num_ranks)],
        "groups": _groups(timeline),
        "computes": {
            **_compute_columns(timeline.blocking, chunk_indices(timeline)),
            **own_times(timeline.blocking),
            "cause": Column.of(places["messages"][blamed]),
            "collective": Column.of(places["collectives"][blamed]),
        },
        "messages": {
            **_message_columns(events.where(messages)),
            **own_times(events.where(messages)),
            "maker": Column.of(places["computes"][found.previous[messages]]),
        },
        "collectives": {
            **_collective_columns(timeline, found),
            **own_times(timeline.overlapped),
            "came": times(np.append(events.ends, 0.0)[found.previous[events.is_overlapped]]),
        },
        "critical": {
            kind: Column.of([n for n in numbers[path] if n >= 0]) for kind, numbers in places.items()
        },
        "inFlight": [_curve(curve, times) for curve in in_flight_over_time(timeline)],
        "memory": [_memory(curves, times) for curves in step.memory],
    }


def _curve(curve: Curve, times: Callable[[Floats], Column]) -> dict[str, Column]:
    return {"time": times(curve.times), "amount": Column.of(np.rint(curve.amounts))}


def _memory(curves: MemoryCurves, times: Callable[[Floats], Column]) -> dict[str, object]:
    kinds = {kind: Column.of(np.rint(held)) for kind, held in curves.by_category.items()}
    host = {} if curves.host is None else {"host": Column.of(np.rint(curves.host))}
    return {**_curve(curves.total, times), "kinds": kinds, **host}


def _groups(timeline: Timeline) -> list[int]:
    """The group that each rank is drawn with: where stages have replicas, the ranks of the same stages."""
    if all(len(ranks) == 1 for ranks in timeline.replicas.values()):
        return [0] * timeline.num_ranks
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(stages), len(numbers)) for stages in timeline.stages]


def _codes(ops: Ints, numbered: Iterable[str], names: Sequence[str]) -> Column:
    """The positions of these ops among ``names``."""
    table = np.array([names.index(op) if op in names else -1 for op in numbered])
    return Column.of(table[ops])


def _compute_columns(computes: Events, chunk_of: Mapping[int, int]) -> dict[str, Column]:
    instructions = computes.instructions
    chunks = np.zeros(int(instructions.stages.max(initial=0)) + 1, np.int64)
    chunks[list(chunk_of)] = [*chunk_of.values()]
    return {
        "rank": Column.of(computes.ranks),
        "phase": _codes(instructions.ops, OPS, _PHASES),
        "stage": Column.of(instructions.stages),
        "chunk": Column.of(chunks[instructions.stages]),
        "microbatch": Column.of(instructions.microbatches),
        "segment": Column.of(instructions.segments),
        "version": Column.of(instructions.versions),
    }


def _collective_columns(timeline: Timeline, found: Attribution) -> dict[str, object]:
    """Collectives and copies as columns: ``last`` is the number of the same on the rank that came last.

    ``came`` is when the rank of each was free to arrive, and ``words`` an index into ``told``, the
    descriptions. Those of a rank that overlap are drawn in different rows: ``row``.
    """
    is_overlapped = timeline.columns.is_overlapped
    numbers = np.cumsum(is_overlapped) - 1
    overlapped = timeline.overlapped
    told: dict[str, int] = {}

    def words(event: Event) -> int:
        ranks = ", ".join(map(str, collective_ranks(timeline, event)))
        between = "" if event.is_copy else f"\nbetween ranks {ranks}"
        return told.setdefault(payload_description(timeline, event) + between, len(told))

    return {
        "rank": Column.of(overlapped.ranks),
        "op": _codes(overlapped.instructions.ops, OPS, _BESIDE),
        "stage": Column.of(overlapped.instructions.stages),
        "bucket": Column.of(overlapped.instructions.buckets),
        "microbatch": Column.of(overlapped.instructions.microbatches),
        "model_collective": Column.of(overlapped.instructions.model_collectives),
        "last": Column.of(numbers[found.last[is_overlapped]]),
        "row": Column.of(overlap_rows(overlapped)),
        "words": Column.of([words(event) for event in overlapped]),
        "told": list(told),
    }


def _message_columns(messages: Events) -> dict[str, Column]:
    links, numbers = messages.instructions.links, messages.instructions.link_numbers

    def of_link(codes: Sequence[int]) -> Column:
        return Column.of(np.array([*codes, -1])[numbers])

    return {
        "rank": Column.of(messages.ranks),
        "peer": Column.of(messages.instructions.peers),
        "payload": of_link([_PAYLOADS.index(link.payload) for link in links]),
        "source": of_link([link.source for link in links]),
        "target": of_link([link.target for link in links]),
        "microbatch": Column.of(messages.instructions.microbatches),
    }
