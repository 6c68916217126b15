"""Timelines as Chrome trace events: JSON that Perfetto and chrome://tracing open.

The format is the "Trace Event Format" of Chromium. Its times are in microseconds; they are rounded to
whole nanoseconds, as Perfetto stores them. A timeline whose unit is not the second has a millisecond for
each of its units.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from pipec.errors import InputError
from pipec.ir.columns import Floats
from pipec.timeline.attribution import attribute_waits
from pipec.timeline.curves import MemoryCurves, in_flight_over_time
from pipec.timeline.events import Event
from pipec.viz.drawn_steps import DrawnStep
from pipec.viz.labels import (
    NAMES,
    collective_ranks,
    event_labels,
    lane_name,
    overlap_rows,
    payload_description,
)

MOST_EVENTS = 500_000
"""The most events of a trace that viewers open."""

_NANOSECONDS = {"s": 1e9}
_NANOSECONDS_OF_A_UNIT = 1e6


def chrome_trace(steps: Sequence[DrawnStep]) -> str:
    """The JSON text: a process per step under its name, a track per rank, a slice per compute and update.

    Below the track of a rank is one for its collectives and copies, or several if some of them overlap.
    An arrow leads from the compute before a send to the compute that reads the message. A message that is
    read after the step, a result or the gradient of a borrowed weight, has no arrow. Counters show how many
    microbatches are in flight on each rank, and its bytes by category where a step's ``memory`` gives them:
    those of the device, and those in host memory.

    Raises:
        InputError: the steps have so many events that no viewer opens them.
    """
    if (count := sum(len(step.timeline.events) for step in steps)) > MOST_EVENTS:
        raise InputError(
            f"a trace of {count:,} events; viewers open some {MOST_EVENTS:,} at most: draw .html, which "
            "shows all of them, or a step of fewer microbatches or ranks"
        )
    events = [
        event for process, step in enumerate(steps, start=1) for event in _Process(process, step).events()
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


class _Process:
    """One step. Tracks are numbered from 1, because viewers take thread 0 for the system's idle one."""

    def __init__(self, number: int, step: DrawnStep) -> None:
        self._name = step.name
        self._timeline = timeline = step.timeline
        self._memory = step.memory
        self._number = number
        self._waits = attribute_waits(timeline)
        self._rows = overlap_rows(timeline.overlapped)
        self._nanoseconds = _NANOSECONDS.get(timeline.unit, _NANOSECONDS_OF_A_UNIT)

    def events(self) -> Iterator[dict[str, object]]:
        yield from self._names()
        yield from self._slices()
        yield from self._flows()
        yield from self._counters()

    def _names(self) -> Iterator[dict[str, object]]:
        yield self._event("M", "process_name", args={"name": self._name})
        yield self._event("M", "process_sort_index", args={"sort_index": self._number})
        num_ranks, num_rows = self._timeline.num_ranks, 1 + max(self._rows, default=-1)
        for rank in range(num_ranks):
            name = lane_name(self._timeline, rank)
            yield from self._track(rank, name, rank * (1 + num_rows))
        for rank, row in sorted({*zip(self._timeline.overlapped.ranks.tolist(), self._rows, strict=True)}):
            name = f"rank {self._timeline.global_rank(rank)}, collectives and copies"
            yield from self._track(self._row(rank, row), name, rank * (1 + num_rows) + 1 + row)

    def _track(self, number: int, name: str, order: int) -> Iterator[dict[str, object]]:
        yield self._event("M", "thread_name", number, args={"name": name})
        yield self._event("M", "thread_sort_index", number, args={"sort_index": order})

    def _row(self, rank: int, row: int) -> int:
        """The track of the collectives and copies of a rank. Those that overlap need several."""
        return (1 + row) * self._timeline.num_ranks + rank

    def _slices(self) -> Iterator[dict[str, object]]:
        label = event_labels(self._timeline)
        idle, awaited = self._waits.idle.tolist(), self._waits.awaited.tolist()
        rows = iter(self._rows)
        for index, event in enumerate(self._timeline.events):
            if event.is_blocking:
                args = {**_identity(event), **self._waited(idle[index], awaited[index])}
                yield self._slice(label(event), event, event.rank, args)
            elif event.is_overlapped:
                args = {
                    "phase": NAMES[event.instruction.op],
                    "carries": payload_description(self._timeline, event),
                    "ranks": " ".join(map(str, collective_ranks(self._timeline, event))),
                }
                yield self._slice(label(event), event, self._row(event.rank, next(rows)), args)

    def _slice(self, name: str, event: Event, track: int, args: Mapping[str, object]) -> dict[str, object]:
        start, end = self._time(event.start), self._time(event.end)
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        return self._event("X", name, track, cat=args["phase"], **times, args=args)

    def _waited(self, idle: float, awaited: int) -> dict[str, object]:
        if not idle:
            return {}
        waited: dict[str, object] = {"waited_us": self._time(idle) / 1000}
        if awaited >= 0:
            event = self._timeline.events[awaited]
            last = self._timeline.events[int(self._waits.last[awaited])]
            waited["waited_for"] = (
                f"{NAMES[event.instruction.op]}, to which rank "
                f"{self._timeline.global_rank(last.rank)} came last"
                if event.is_collective
                else NAMES[event.instruction.op]
                if event.is_copy
                else f"{_payload(event)} from rank {self._timeline.global_rank(event.rank)}"
            )
        return waited

    def _flows(self) -> Iterator[dict[str, object]]:
        makers = self._waits.previous.tolist()
        waits, is_message = self._timeline.waits, self._timeline.columns.is_message
        for index, reader in zip(waits.awaited.tolist(), waits.followed_by.tolist(), strict=True):
            maker = makers[index]
            if is_message[index] and min(maker, reader) >= 0:
                yield from self._flow(index, self._timeline.events[maker], self._timeline.events[reader])

    def _flow(self, index: int, maker: Event, reader: Event) -> Iterator[dict[str, object]]:
        """An arrow. Each end binds to the slice that its time lies in, so it is put a nanosecond inside."""
        left = max(self._time(maker.end) - 1, self._time(maker.start))
        read = min(self._time(reader.start) + 1, self._time(reader.end))
        name = _payload(self._timeline.events[index])
        same = {"id": f"{self._number}.{index}", "cat": "message", "bp": "e"}
        yield self._event("s", name, maker.rank, **same, ts=left / 1000)
        yield self._event("f", name, reader.rank, **same, ts=read / 1000)

    def _counters(self) -> Iterator[dict[str, object]]:
        for rank, curve in enumerate(in_flight_over_time(self._timeline)):
            name = f"in flight, rank {self._timeline.global_rank(rank)}"
            for time, amount in curve:
                yield self._event("C", name, ts=self._time(time) / 1000, args={"microbatches": amount})
        for rank, curves in enumerate(self._memory):
            name = f"memory, rank {self._timeline.global_rank(rank)}"
            yield from self._memory_counter(name, curves, curves.by_category)
            if curves.host is not None:
                yield from self._memory_counter(f"host {name}", curves, {"offloaded": curves.host})

    def _memory_counter(
        self, name: str, curves: MemoryCurves, amounts: Mapping[str, Floats]
    ) -> Iterator[dict[str, object]]:
        columns = [held.tolist() for held in amounts.values()]
        for time, *held in zip(curves.total.times.tolist(), *columns, strict=True):
            args = dict(zip(amounts, held, strict=True))
            yield self._event("C", name, ts=self._time(time) / 1000, args=args)

    def _event(self, phase: str, name: str, rank: int = -1, **fields: object) -> dict[str, object]:
        return {"ph": phase, "name": name, "pid": self._number, "tid": rank + 1, **fields}

    def _time(self, time: float) -> int:
        return round(time * self._nanoseconds)


def _identity(event: Event) -> dict[str, object]:
    instruction = event.instruction
    identity: dict[str, object] = {"phase": NAMES[instruction.op], "stage": instruction.stage}
    part = {"segment": instruction.segment} if instruction.segment >= 0 else {}
    return identity | ({"microbatch": instruction.microbatch} if event.is_compute else {}) | part


def _payload(message: Event) -> str:
    link, microbatch = message.instruction.link, message.instruction.microbatch
    assert link
    kind = link.payload.replace("_", " ")
    return kind if microbatch < 0 else f"{kind} of microbatch {microbatch}"
