"""Lowering: programs as text, and whatever the schedule and the links, they verify and need few buffers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from broken_programs import golden_steps
from example_schedules import result_link, skip_links, tied_links, v_gpipe, value
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.ir import Link, ModelCollective, Op, Payload, Phase, Program, Schedule
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.lower import chain_links
from pipec.schedules import SCHEDULES, dualpipe_v, forward_only, interleaved_1f1b, make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.simulate import simulate


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


@settings(max_examples=20, deadline=None)
@given(linked_schedules())
def test_any_schedule_with_any_links_verifies_and_needs_few_buffers(
    case: tuple[Schedule, tuple[Link, ...], list[int]],
) -> None:
    schedule, links, _ = case
    checked(forward_only(schedule), [x for x in links if x.payload in (Payload.ACTIVATION, Payload.WEIGHT)])
    for program in checked(*case):
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


def test_a_step_of_many_instructions_is_lowered_and_verified() -> None:
    programs = checked(make_schedule("1f1b", 100, 300), chain_links(100))
    assert sum(len(program.instructions) for program in programs) == 10 * 100 * 300 - 6 * 300


# model collectives run between segments


def test_a_segment_begins_when_the_last_replica_has_reached_its_collective() -> None:
    """Stage 1 waits for three collectives of each of its two microbatches a rank; stage 0 has none."""
    step = golden_steps()["model collectives"]
    segments = {key: [1 / count] * count for key, count in step.plan.segments.items()}
    costs = replace(uniform_costs(2), segments=segments)
    without = simulate(step.programs(), costs).makespan
    times = {(1, number): 5.0 for number in range(3)}
    timeline = simulate(step.programs(), replace(costs, model_collectives=times))
    assert timeline.makespan == pytest.approx(without + 2 * 3 * 5.0)
    for event in timeline.computes:
        if event.instruction.segment > 0:
            ends = [each.end for each in timeline.overlapped if each.rank == event.rank]
            assert any(end == pytest.approx(event.start) for end in ends)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_one_order_of_collectives_where_every_stage_has_some(
    name: str, replicas: int
) -> None:
    """Also where a rank has several stages, with the same ranks as replicas."""
    schedule = replicate_schedule(functools.partial(SCHEDULES[name], 2), 4 * replicas, replicas)
    phases = {Phase(op) for order in schedule.orders for op in {cell.phase for cell in order}}
    backward = Phase.BACKWARD if Phase.BACKWARD in phases else Phase.BACKWARD_INPUT
    kinds = (Op.ALL_GATHER, Phase.FORWARD), (Op.ALL_REDUCE, Phase.FORWARD), (Op.REDUCE_SCATTER, backward)
    of_each = tuple(ModelCollective(op, phase, 1, value(f"{op}_1", "b", 8)) for op, phase in kinds)
    stages, links = range(schedule.num_stages), chain_links(schedule.num_stages)
    parts = {(stage, phase): 2 for stage in stages for phase in (Phase.FORWARD, backward)}
    step = {"segments": parts, "model_collectives": dict.fromkeys(stages, of_each), "recompute": stages}
    programs = lower(schedule, links, **step)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, **step)
    costs = replace(
        uniform_costs(schedule.num_stages, links=links, message=0.5),
        segments=dict.fromkeys(parts, (0.5, 0.5)),
        model_collectives={(stage, number): 0.25 for stage in stages for number in range(len(of_each))},
    )
    found = [event for event in simulate(programs, costs).columns if event.instruction.model_collective >= 0]
    assert len(found) == len(of_each) * schedule.num_stages * schedule.num_microbatches
