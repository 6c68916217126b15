"""Timelines as one self-contained page to explore: zoom, hover, arrows, curves and the critical path.

The page is ``page/page.html``, into which its style, its scripts and the timelines as JSON are put. Waits and
the critical path are worked out here. The page only draws, and looks up what is under the pointer.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources

import numpy as np

from pipec.ir import Payload
from pipec.timeline.attribution import Attribution, Curve, attribute_waits, critical_path, in_flight_over_time
from pipec.timeline.events import Event, Timeline
from pipec.viz import drawing_checks
from pipec.viz.bottleneck import bottleneck_lines
from pipec.viz.drawing_checks import check_timelines, num_events
from pipec.viz.labels import (
    BLOCKING_NAMES,
    COLLECTIVE_NAMES,
    COPY_NAMES,
    LETTERS,
    NAMES,
    chunk_indices,
    collective_ranks,
    lane_name,
    overlap_rows,
    payload_description,
    replica_label,
    summary,
)
from pipec.viz.svg import timeline_svg

_PHASES, _BESIDE = tuple(BLOCKING_NAMES), (*COLLECTIVE_NAMES, *COPY_NAMES)
_PAYLOADS = tuple(Payload)

_FILES = ("style.css", "timeline.js", "labels.js", "drawing.js", "interaction.js")
"""The files next to ``page.html`` that it is filled with."""

_DIGITS = 7
"""Decimal digits of the longest time that the page keeps."""

_Round = Callable[[float], float]


def timeline_html(
    timelines: Mapping[str, Timeline],
    title: str = "",
    memory: Mapping[str, Sequence[Curve]] | None = None,
) -> str:
    """The page, as text: the timelines under their names, on one axis of time. Deterministic.

    ``memory[name][rank]`` are the bytes that a rank holds over time. Where they are given, the page shows
    them or the microbatches in flight, as the reader likes. Of very many events the page is an overview.

    Raises:
        InputError: the timelines have different units, or ``memory`` does not fit them.
    """
    memory = memory or {}
    check_timelines(timelines, memory)
    if num_events(timelines) > drawing_checks.MOST_EVENTS:
        return _overview(timelines, title)
    rounded = _rounding(max(timeline.makespan for timeline in timelines.values()))
    data = {
        "unit": next(iter(timelines.values())).unit,
        "phases": [{"key": op, "name": BLOCKING_NAMES[op], "letter": LETTERS[op]} for op in _PHASES],
        "ops": [
            {"key": op, "name": NAMES[op], "letter": LETTERS[op], "copies": op in COPY_NAMES}
            for op in _BESIDE
        ],
        "payloads": [payload.replace("_", " ") for payload in _PAYLOADS],
        "timelines": [
            _timeline_data(name, timeline, memory.get(name, ()), rounded)
            for name, timeline in timelines.items()
        ],
    }
    shown = "".join(filter(str.isprintable, title)) or "timeline"
    parts = {"title": escape(shown), "data": _json_in_html(data)}
    parts |= {name.partition(".")[0]: _file(name) for name in _FILES}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _overview(timelines: Mapping[str, Timeline], title: str) -> str:
    """A page of pictures, of events that are too many for a page to explore."""
    pictures = (
        f"<h2>{escape(name)}</h2>\n{timeline_svg(timeline)}"
        f"<p>{escape(' · '.join(bottleneck_lines(timeline)))}</p>"
        for name, timeline in timelines.items()
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *pictures])
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n{body}\n'


def _file(name: str) -> str:
    return resources.files("pipec.viz").joinpath("page", name).read_text(encoding="utf-8")


def _json_in_html(data: object) -> str:
    """JSON without the characters that could end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _rounding(longest: float) -> _Round:
    digits = _DIGITS - math.ceil(math.log10(longest)) if longest else 0

    def rounded(time: float) -> float:
        short = float(round(time, digits))
        return int(short) if short.is_integer() else short

    return rounded


def _timeline_data(
    name: str, timeline: Timeline, memory: Sequence[Curve], rounded: _Round
) -> dict[str, object]:
    """The timeline as columns of numbers.

    Computes and updates are numbered together, messages apart, and collectives with copies, each in the order
    of events. ``cause`` is the number of the message that a compute waited for, ``collective`` that of the
    collective, and ``maker`` that of the compute before a message; -1 stands for none.
    """
    found, events = attribute_waits(timeline), timeline.columns
    kinds = {
        "computes": events.is_blocking,
        "messages": events.is_message,
        "collectives": events.is_overlapped,
    }
    places = {kind: np.append(np.where(mask, np.cumsum(mask) - 1, -1), -1) for kind, mask in kinds.items()}
    path = critical_path(timeline, found)

    def numbers(kind: str, indices: Iterable[int]) -> list[int]:
        """The numbers of these events among those of a kind, -1 for others."""
        chosen: list[int] = places[kind][list(indices)].tolist()
        return chosen

    awaited = found.awaited[events.is_blocking].tolist()
    return {
        "name": name,
        "summary": summary(timeline),
        "makespan": rounded(timeline.makespan),
        "peaks": timeline.peak_in_flight,
        "names": [lane_name(timeline, rank) for rank in range(timeline.num_ranks)],
        "numbers": [timeline.global_rank(rank) for rank in range(timeline.num_ranks)],
        "replicas": [replica_label(timeline, rank) for rank in range(timeline.num_ranks)],
        "groups": _groups(timeline),
        "computes": {
            **_compute_columns(tuple(timeline.blocking), chunk_indices(timeline), rounded),
            "cause": numbers("messages", awaited),
            "collective": numbers("collectives", awaited),
        },
        "messages": {
            **_message_columns(tuple(timeline.messages), rounded),
            "maker": numbers("computes", found.previous[events.is_message].tolist()),
        },
        "collectives": _collective_columns(timeline, found, rounded),
        "critical": {kind: [number for number in numbers(kind, path) if number >= 0] for kind in kinds},
        "curves": {
            "inFlight": [_curve_columns(curve, rounded) for curve in in_flight_over_time(timeline)],
            **({"memory": [_curve_columns(curve, rounded) for curve in memory]} if memory else {}),
        },
    }


def _groups(timeline: Timeline) -> list[int]:
    """The group that each rank is drawn with: where stages have replicas, the ranks of the same stages."""
    if all(len(ranks) == 1 for ranks in timeline.replicas.values()):
        return [0] * timeline.num_ranks
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(stages), len(numbers)) for stages in timeline.stages]


def _compute_columns(
    computes: Sequence[Event], chunk_of: Mapping[int, int], rounded: _Round
) -> dict[str, object]:
    return {
        "rank": [event.rank for event in computes],
        "phase": [_PHASES.index(event.instruction.op) for event in computes],
        "stage": [event.instruction.stage for event in computes],
        "chunk": [chunk_of.get(event.instruction.stage, 0) for event in computes],
        "microbatch": [event.instruction.microbatch for event in computes],
        "segment": [event.instruction.segment for event in computes],
        "version": [event.instruction.version for event in computes],
        **_times(computes, rounded),
    }


def _collective_columns(timeline: Timeline, found: Attribution, rounded: _Round) -> dict[str, object]:
    """Collectives and copies as columns: ``last`` is the number of the same on the rank that came last.

    ``came`` is when the rank of each was free to arrive, and ``words`` an index into ``told``, the
    descriptions. Those of a rank that overlap are drawn in different rows: ``row``.
    """
    is_overlapped = timeline.columns.is_overlapped
    numbers = np.cumsum(is_overlapped) - 1
    came = np.append(timeline.columns.ends, 0.0)[found.previous[is_overlapped]]
    events = tuple(timeline.overlapped)
    told: dict[str, int] = {}

    def words(event: Event) -> int:
        ranks = ", ".join(map(str, collective_ranks(timeline, event)))
        between = "" if event.is_copy else f"\nbetween ranks {ranks}"
        return told.setdefault(payload_description(timeline, event) + between, len(told))

    return {
        "rank": [event.rank for event in events],
        "op": [_BESIDE.index(event.instruction.op) for event in events],
        **{
            name: [getattr(event.instruction, name) for event in events]
            for name in ("bucket", "microbatch", "model_collective")
        },
        "last": numbers[found.last[is_overlapped]].tolist(),
        "came": [rounded(time) for time in came.tolist()],
        "row": overlap_rows(timeline.overlapped),
        "words": [words(event) for event in events],
        "told": list(told),
        **_times(events, rounded),
    }


def _message_columns(messages: Sequence[Event], rounded: _Round) -> dict[str, object]:
    links = [event.instruction.link for event in messages if event.instruction.link]
    return {
        "rank": [event.rank for event in messages],
        "peer": [event.instruction.peer for event in messages],
        "payload": [_PAYLOADS.index(link.payload) for link in links],
        "source": [link.source for link in links],
        "target": [link.target for link in links],
        "microbatch": [event.instruction.microbatch for event in messages],
        **_times(messages, rounded),
    }


def _times(events: Iterable[Event], rounded: _Round) -> dict[str, list[float]]:
    return {
        "start": [rounded(event.start) for event in events],
        "end": [rounded(event.end) for event in events],
    }


def _curve_columns(curve: Curve, rounded: _Round) -> dict[str, list[float]]:
    return {"time": [rounded(time) for time, _ in curve], "amount": [amount for _, amount in curve]}
