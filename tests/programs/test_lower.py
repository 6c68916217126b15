"""Lowering: programs as text, and whatever the schedule and the links, they verify and need few buffers."""

from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from bare_programs import lower, verify_programs
from broken_programs import golden_steps
from example_schedules import result_link, skip_links, tied_links, v_gpipe
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.ir import Link, Op, Payload, Program, Schedule
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.dependence import Dependence
from pipec.programs.lower import chain_links
from pipec.schedules import SCHEDULES, dualpipe_v, forward_only, interleaved_1f1b, make_schedule


@pytest.mark.parametrize("name", golden_steps())
def test_programs_of_every_kind_of_step(name: str, golden: Callable[[str, str], None]) -> None:
    """As text, which reads back to the same program."""
    step = golden_steps()[name]
    texts = [*map(format_program, step.programs())]
    golden("\n".join(texts), f"programs/{name.replace(' ', '_')}.txt")
    assert [parse_program(text, step.plan.links) for text in texts] == list(step.programs())


def checked(schedule: Schedule, links: Sequence[Link], recompute: Sequence[int] = ()) -> tuple[Program, ...]:
    programs = lower(schedule, links, recompute)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, recompute=recompute)
    return programs


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    make = draw(st.sampled_from([*SCHEDULES.values(), v_gpipe]))
    num_ranks, num_microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 32))
    if make is interleaved_1f1b:
        num_microbatches = num_ranks * (1 + num_microbatches % 4)
    return make(num_ranks, max(num_microbatches, 2 * num_ranks) if make is dualpipe_v else num_microbatches)


@st.composite
def linked_schedules(draw: st.DrawFn) -> tuple[Schedule, tuple[Link, ...], list[int]]:
    """A schedule with a chain, some skip connections, tied weights and a result, in any order."""
    schedule = draw(schedules())
    stages = range(schedule.num_stages)
    pairs = st.lists(st.sampled_from([(i, j) for i in stages for j in stages if i < j] or [None]), max_size=4)
    skips = [link for pair in {*draw(pairs)} - {None} for link in skip_links(*pair)]
    ties = [link for pair in {*draw(pairs)} - {None} for link in tied_links(*pair)]
    links = [*chain_links(schedule.num_stages), *skips, *ties, result_link(schedule.num_stages - 1)]
    recompute = draw(st.lists(st.sampled_from(stages), unique=True))
    return schedule, tuple(draw(st.permutations(links))), recompute


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(linked_schedules())
def test_any_schedule_with_any_links_verifies(case: tuple[Schedule, tuple[Link, ...], list[int]]) -> None:
    schedule, links, recompute = case
    checked(schedule, links, recompute)
    forward = tuple(link for link in links if link.payload in (Payload.ACTIVATION, Payload.WEIGHT))
    checked(forward_only(schedule), forward)


@settings(max_examples=20, deadline=None)
@given(linked_schedules())
def test_buffers_are_as_few_as_can_be(case: tuple[Schedule, tuple[Link, ...], list[int]]) -> None:
    for program in lower(*case):
        live: dict[Link, set[int]] = {}
        peak: dict[Link, int] = {}
        slots: dict[Link, set[int]] = {}
        for each in program.instructions:
            if each.op is Op.FREE:
                for link, microbatches in live.items():
                    if link.target == each.stage:
                        microbatches.discard(each.microbatch)
            elif each.link and each.slot >= 0:
                live.setdefault(each.link, set()).add(each.microbatch)
                slots.setdefault(each.link, set()).add(each.slot)
                peak[each.link] = max(peak.get(each.link, 0), len(live[each.link]))
        assert {link: set(range(count)) for link, count in peak.items()} == slots


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "v-min"])
def test_messages_of_neighbours_need_no_search_where_a_pipeline_turns_round(name: str) -> None:
    schedule = make_schedule(name, 6, 12)
    links = chain_links(schedule.num_stages)
    with patch.object(Dependence, "_are_near", lambda _, others, __: np.zeros(others.size, bool)):
        searched = lower(schedule, links)
    assert lower(schedule, links) == searched


def test_a_step_of_many_instructions_is_lowered_and_verified() -> None:
    programs = checked(make_schedule("1f1b", 100, 300), chain_links(100))
    assert sum(len(program.instructions) for program in programs) == 10 * 100 * 300 - 6 * 300
