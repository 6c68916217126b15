"""Two lines on what bounds a step: the longest wait of a rank, and the critical path."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipec.ir import Payload
from pipec.timeline.attribution import Attribution, critical_path, critical_path_times
from pipec.timeline.events import Event, Timeline
from pipec.timeline.rank_times import RankTime, RankWait, rank_times
from pipec.viz.labels import format_duration

_MAX_PARTS = 3
"""The number of largest parts of a sum that are listed; the others are added up."""

_NEGLIGIBLE = 5e-4
"""Parts below this share of the makespan are not listed."""


def bottleneck_lines(timeline: Timeline, found: Attribution) -> list[str]:
    """The two lines. A step that takes no time has none.

    ``found`` is the result of ``attribute_waits`` for the timeline.
    """
    if not timeline.makespan:
        return []
    times = rank_times(timeline, found)
    longest = max(range(len(times)), key=lambda rank: times[rank].waiting + times[rank].unattributed_idle)
    waited = _description(timeline, _waited(timeline, longest, times[longest]))
    path = _description(timeline, _critical(timeline, critical_path(timeline, found)))
    return [
        f"longest wait: rank {timeline.global_rank(longest)}, {waited}" if waited else "longest wait: none",
        f"critical path: {path}",
    ]


_Parts = Mapping[str, float]
"""Times by what they are spent on."""


def _waited(timeline: Timeline, rank: int, time: RankTime) -> _Parts:
    parts: dict[str, float] = defaultdict(float)
    for wait in time.waits:
        parts[_reason(timeline, rank, wait)] += wait.time
    parts["with all it needs there"] = time.unattributed_idle
    return parts


def _reason(timeline: Timeline, rank: int, wait: RankWait) -> str:
    other = timeline.global_rank(wait.rank)
    if isinstance(wait.what, Payload):
        return f"for rank {other}'s {wait.what.replace('_', ' ')}s"
    return f"in {wait.what}" if wait.rank == rank else f"until rank {other} came to {wait.what}"


def _critical(timeline: Timeline, path: Sequence[int]) -> _Parts:
    parts: dict[str, float] = defaultdict(float)
    for index, time in zip(path, critical_path_times(timeline, path), strict=True):
        parts[_place(timeline, timeline.events[index])] += time
    parts["idle"] = timeline.makespan - sum(parts.values())
    return parts


def _place(timeline: Timeline, event: Event) -> str:
    if event.is_blocking:
        return f"on rank {timeline.global_rank(event.rank)}"
    if event.is_copy:
        return "in copies"
    return "in collectives" if event.is_collective else "in messages"


def _description(timeline: Timeline, parts: _Parts) -> str:
    """``9 units for rank 1's gradients, 3 units ...``: longest first."""
    counted = [part for part in parts.items() if part[1] > _NEGLIGIBLE * timeline.makespan]
    listed = sorted(counted, key=lambda part: -part[1])
    if len(listed) > _MAX_PARTS + 1:
        listed[_MAX_PARTS:] = [("elsewhere", sum(time for _, time in listed[_MAX_PARTS:]))]
    return ", ".join(f"{format_duration(time, timeline)} {what}" for what, time in listed)
