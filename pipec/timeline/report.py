"""A timeline as plain data for other programs: figures of merit, waits, the critical path and events."""

from pipec.timeline.attribution import attribute_waits, critical_path
from pipec.timeline.events import Event, Timeline
from pipec.timeline.rank_times import RankTime, rank_times
from pipec.timeline.steady_state import steady_state

MOST_EVENTS = 100_000
"""The limit for listing all events; a larger step has only its sums and its critical path."""


def timeline_report(timeline: Timeline) -> dict[str, object]:
    """Figures of merit, waits of ranks, the critical path, and all events up to ``MOST_EVENTS``."""
    found = attribute_waits(timeline)
    report: dict[str, object] = {
        "unit": timeline.unit,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_rate": timeline.bubble_rate,
        "peak_in_flight": list(timeline.peak_in_flight),
        "replicas": [
            [timeline.global_rank(rank) for rank in timeline.replicas[stage]]
            for stage in sorted(timeline.replicas)
        ],
        "waits": [_rank_data(timeline, *each) for each in enumerate(rank_times(timeline, found))],
        "critical_path": [
            _event_data(timeline, timeline.events[index]) for index in critical_path(timeline, found)
        ],
        "num_events": len(timeline.events),
    }
    if steady := steady_state(timeline):
        report["steady"] = {"time": steady.batch_interval, "bubble_rate": steady.bubble_rate}
    if len(timeline.events) <= MOST_EVENTS:
        report["events"] = [_event_data(timeline, event) for event in timeline.events]
    if timeline.representatives:
        names = "ranks", "counts", "num_replicas"
        report["representatives"] = {name: getattr(timeline.representatives, name) for name in names}
    return report


def _rank_data(timeline: Timeline, rank: int, time: RankTime) -> dict[str, object]:
    return {
        "rank": timeline.global_rank(rank),
        "busy": time.busy,
        "waiting": time.waiting,
        "unattributed_idle": time.unattributed_idle,
        "trailing_idle": time.trailing_idle,
        "for": [
            {
                "rank": timeline.global_rank(each.rank),
                "stage": each.stage,
                "what": each.what,
                "time": each.time,
            }
            for each in time.waits
        ],
    }


_OPTIONAL_FIELDS = ("bucket", "segment", "model_collective", "version")


def _event_data(timeline: Timeline, event: Event) -> dict[str, object]:
    instruction = event.instruction
    return {
        "rank": timeline.global_rank(event.rank),
        "op": instruction.op,
        "stage": instruction.stage,
        "microbatch": instruction.microbatch,
        **{name: number for name in _OPTIONAL_FIELDS if (number := getattr(instruction, name)) >= 0},
        "start": event.start,
        "end": event.end,
    }
