"""Timelines as one self-contained page to explore: zoom, hover, arrows, curves and the critical path.

The page is ``page/page.html``, into which its style, its scripts and the timelines as JSON are put. Waits and
the critical path are worked out here. The page only draws, and looks up what is under the pointer.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from pipec.ir import Payload, Phase
from pipec.ir.text import PHASE_LETTERS
from pipec.timeline.attribution import Curve, critical_path, memory_over_time, waits
from pipec.timeline.events import Event, Timeline
from pipec.viz.checks import check_timelines
from pipec.viz.labels import NAMES, chunks, summary

_PHASES = tuple(NAMES)
_PAYLOADS = tuple(Payload)

_FILES = ("style.css", "timeline.js", "words.js", "drawing.js", "pointing.js")
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
    them or the microbatches in flight, as the reader likes.

    Raises:
        InputError: the timelines have different units, or ``memory`` does not fit them.
    """
    memory = memory or {}
    check_timelines(timelines, memory)
    rounded = _rounding(max(timeline.makespan for timeline in timelines.values()))
    data = {
        "unit": next(iter(timelines.values())).unit,
        "phases": [{"key": phase, "name": NAMES[phase], "letter": PHASE_LETTERS[phase]} for phase in _PHASES],
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
    """The timeline as columns of numbers. Computes and messages are numbered apart, in the order of events.

    ``cause`` is the number of the message that a compute waited for, ``maker`` that of the compute before a
    message; -1 stands for none.
    """
    found = waits(timeline)
    path = critical_path(timeline, found)
    is_compute = timeline.columns.is_compute.tolist()
    place = [*_places(is_compute), -1]
    return {
        "name": name,
        "summary": summary(timeline),
        "makespan": rounded(timeline.makespan),
        "peaks": timeline.peak_in_flight,
        "computes": {
            **_compute_columns(tuple(timeline.computes), chunks(timeline), rounded),
            "cause": [place[index] for index in found.messages[timeline.columns.is_compute].tolist()],
        },
        "messages": {
            **_message_columns(tuple(timeline.messages), rounded),
            "maker": [place[index] for index in found.previous[~timeline.columns.is_compute].tolist()],
        },
        "critical": {
            "computes": [place[index] for index in path if is_compute[index]],
            "messages": [place[index] for index in path if not is_compute[index]],
        },
        "curves": {
            "inFlight": [_curve_columns(curve, rounded) for curve in memory_over_time(timeline)],
            **({"memory": [_curve_columns(curve, rounded) for curve in memory]} if memory else {}),
        },
    }


def _places(is_compute: Iterable[bool]) -> Iterator[int]:
    """The number of each event among its kind: two computes and a message have 0, 1 and 0."""
    count = {True: 0, False: 0}
    for kind in is_compute:
        yield count[kind]
        count[kind] += 1


def _compute_columns(
    computes: Sequence[Event], chunk_of: Mapping[int, int], rounded: _Round
) -> dict[str, object]:
    return {
        "rank": [event.rank for event in computes],
        "phase": [_PHASES.index(_phase(event)) for event in computes],
        "stage": [event.instruction.stage for event in computes],
        "chunk": [chunk_of[event.instruction.stage] for event in computes],
        "microbatch": [event.instruction.microbatch for event in computes],
        **_times(computes, rounded),
    }


def _phase(event: Event) -> Phase:
    assert event.instruction.op.phase
    return event.instruction.op.phase


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
