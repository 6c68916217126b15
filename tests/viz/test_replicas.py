"""Pictures of steps with replicas: who shares a stage, and where collectives and updates stand."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest
from simulated_updates import EVERYTHING, ended

from pipec.ir import Instruction, Op, ShardingLevel
from pipec.timeline.events import Event, Timeline
from pipec.viz import timeline_svg, timeline_text
from pipec.viz.labels import lane_name, overlap_rows, payload_description

SVG = "{http://www.w3.org/2000/svg}"

TEXT = """\
2 replicas
bubble 33.3% of span 9 units, idle 40.9% of makespan 11 units, at most 2 in flight
rank 0, stage 0, 1 of 2 F0 F2 ······B0─── ···B2─── ·····U
                                                   Σ0──
rank 1, stage 0, 2 of 2 F1 F3 ······B1─── ···B3─── ·····U
                                                   Σ0──
rank 2, stage 1, 1 of 2 ···F0 B0─── F2 B2─── ·····U······
                                             Σ1──
rank 3, stage 1, 2 of 2 ···F1 B1─── F3 B3─── ·····U······
                                             Σ1──
                        0  1  2  3  4  5  6  7  8  9  10 11 units
F forward  B backward  U update  Σ gradient reduction  · idle; numbers are microbatches, behind Σ and G buckets
longest wait: rank 0, 3 units for rank 2's gradients, 1.5 units in reduce_grad
critical path: 6 units on rank 3, 3 units on rank 1, 1.5 units in collectives, 0.5 units on rank 0
"""  # noqa: E501


def test_text_has_a_row_for_the_collectives_of_a_rank() -> None:
    assert timeline_text(ended(2, 4, updates=True), "2 replicas") == TEXT


@pytest.mark.parametrize("replicas", [2, (3, 2, 1), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"updates": True}, EVERYTHING])
def test_every_view_draws_every_kind_of_step(
    replicas: int | tuple[int, ...], options: dict[str, object]
) -> None:
    timeline = ended(replicas, 6, **options)
    collectives = Counter(event.instruction.op for event in timeline.events if event.is_collective)
    svg = ElementTree.fromstring(timeline_svg(timeline, "a step"))
    drawn = Counter(rect.get("class") for rect in svg.iter(f"{SVG}rect"))
    for op in (Op.REDUCE_GRAD, Op.GRAD_NORM):
        assert drawn[op] == collectives[op] + (op in collectives), op
    assert "Σ0" in timeline_text(timeline)


def test_a_lane_says_which_replica_of_which_stage_it_is() -> None:
    timeline = ended((3, 2, 1), 6)
    assert [lane_name(timeline, rank) for rank in range(6)] == [
        "rank 0, stage 0, 1 of 3",
        "rank 1, stage 0, 2 of 3",
        "rank 2, stage 0, 3 of 3",
        "rank 3, stage 1, 1 of 2",
        "rank 4, stage 1, 2 of 2",
        "rank 5, stage 2",
    ]
    assert lane_name(ended(1, 2), 1) == "rank 1"


def test_svg_keeps_replicas_together() -> None:
    svg = ElementTree.fromstring(timeline_svg(ended((3, 2, 1), 6)))
    tops = [float(rect.get("y", 0)) for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "lane"]
    apart = [below - above for above, below in pairwise(tops)]
    assert apart[0] == apart[1] == apart[3] < apart[2] == apart[4]


def test_bytes_are_those_that_travel() -> None:
    timeline = ended(2, 4, gradient_dtype="bfloat16", updates=True, shard=ShardingLevel.OPTIMIZER)
    told = {event.instruction.op: payload_description(timeline, event) for event in timeline.overlapped}
    assert told[Op.REDUCE_GRAD] == "bucket 1 of stage 1, 384 B as bfloat16: 1.q and 2 others"
    assert told[Op.UNSHARD] == "bucket 1 of stage 1, 768 B: 1.q and 2 others"


def overlapping() -> Timeline:
    """Two sums that a rank began one after the other, and found over together."""
    sums = [Event(0, Instruction(Op.REDUCE_GRAD, 0, bucket=k), 1.0 + k, 6.0 + k) for k in range(2)]
    later = Event(0, Instruction(Op.GRAD_NORM, -1), 6.5, 8.0)
    return Timeline((Event(0, Instruction(Op.BACKWARD, 0, 0), 0.0, 1.0), *sums, later), (1,))


def test_collectives_that_overlap_hide_no_other() -> None:
    timeline = overlapping()
    assert overlap_rows(timeline.overlapped) == [0, 1, 0]
    svg = ElementTree.fromstring(timeline_svg(timeline))
    tops = {rect.get("y") for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "reduce_grad"}
    assert len(tops) == 3  # two bands, and the legend
    assert timeline_text(timeline).count("Σ0──") == timeline_text(timeline).count("Σ1──") == 1
