"""Schedules: the closed forms of the literature. docs/schedules.md draws every one, word by word."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from compile_variants import TrainingRun, captured, cut_evenly, generated
from huggingface_models import ROWS, encoder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unsplit_reference import StepResult, assert_equal, unsplit_step

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Schedule
from pipec.ir.batch_split import split_sizes
from pipec.programs.lower import chain_links
from pipec.schedules import (
    ASYNCHRONOUS_SCHEDULES,
    SCHEDULES,
    SEARCHED_SCHEDULES,
    forward_only,
    make_schedule,
)
from pipec.schedules.named import LOOPED_SCHEDULES
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate


def played(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1, message: float = 0) -> Timeline:
    """The verified programs of a plain chain; costs are those of a stage."""
    links = chain_links(schedule.num_stages)
    programs = lower(schedule, links)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
    costs = uniform_costs(
        schedule.num_stages, forward=f, backward_input=b, backward_weight=w, links=links, message=message
    )
    return simulate(programs, costs)


def test_every_schedule_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    for name in (*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES):
        assert re.search(rf"[`\"]{name}[`\"]", page), name


def test_a_suffix_is_the_number_of_stages_per_rank() -> None:
    for name, make in LOOPED_SCHEDULES.items():
        for v in (1, 2, 3):
            assert make_schedule(f"{name}-v{v}", 2, 4) == make(2, 4, v)
        assert (make(2, 4, 3).name, make(2, 4, 2).name) == (f"{name}-v3", name)


REFUSALS = {
    ("interleaved-1f1b-v0", 2, 4): "'interleaved-1f1b-v0' needs num_chunks of at least 1, got 0",
    ("zb-v-v3", 2, 4): "'zb-v' takes no suffix, but 'zb-v-v3' has one .* take interleaved-1f1b-v3 or",
    ("1F1B ", 4, 8): r"unknown schedule '1F1B '; did you mean '1f1b'\? known .* gpipe, 1f1b",
    ("wave", 4, 8): r"unknown schedule 'wave'; known schedules: gpipe, .*zb-1p, zb-2p",
    ("gpipe", 0, 8): "'gpipe' needs num_ranks of at least 1",
    ("gpipe", 4, 0): "'gpipe' needs num_microbatches of at least 1",
    ("interleaved-1f1b", 4, 10): "multiple of the 4 ranks, got 10; take 8",
    ("dualpipe-v", 4, 7): "twice as many microbatches as its 4 ranks, got 7; take 8 or more",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_names_and_counts_that_make_no_schedule_are_refused(arguments: tuple[str, int, int]) -> None:
    with pytest.raises(InputError, match=REFUSALS[arguments]):
        make_schedule(*arguments)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 20), st.floats(0, 1))
def test_every_schedule_is_complete_and_waits_for_no_message_that_never_comes(
    name: str, p: int, m: int, message: float
) -> None:
    """The verifier refuses missing and doubled computes."""
    assume((name != "interleaved-1f1b" or m % p == 0) and (name != "dualpipe-v" or m >= 2 * p))
    schedule = make_schedule(name, p, m)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
    assert played(schedule, 2, 3, 1, message).makespan >= m * (2 + 3 + 1) * schedule.num_stages / p
    forwards = [[cell for cell in cells if cell.phase is Phase.FORWARD] for cells in schedule.orders]
    assert [[*order] for order in forward_only(schedule).orders] == forwards


Form = Callable[[int, int, int, int, int, int], float]
"""A span or a peak of p, m, F, B, W and a rank."""

CLOSED_FORMS: dict[str, tuple[Form, Form]] = {
    "gpipe": (lambda p, m, f, b, w, s: (m + p - 1) * (f + b + w), lambda p, m, f, b, w, s: m),
    "1f1b": (lambda p, m, f, b, w, s: (m + p - 1) * (f + b + w), lambda p, m, f, b, w, s: min(p - s, m)),
    **{
        f"interleaved-1f1b-v{v}": (
            lambda p, m, f, b, w, s, v=v: (v * m + p - 1) * (f + b + w),
            lambda p, m, f, b, w, s, v=v: min(2 * (p - s - 1) + (v - 1) * p + 1, v * m),
        )
        for v in (1, 2, 3)
    },
    **{
        f"looped-bfs-v{v}": (
            lambda p, m, f, b, w, s, v=v: (v * m + p - 1) * (f + b + w),
            lambda p, m, f, b, w, s, v=v: v * m,
        )
        for v in (1, 2, 3)
    },
    "zb-h1": (
        lambda p, m, f, b, w, s: m * (f + b + w) + (p - 1) * (f + b - w),
        lambda p, m, f, b, w, s: p,
    ),
    "zb-h2": (
        lambda p, m, f, b, w, s: m * (f + b + w) + (p - 1) * (f + b - 2 * w),
        lambda p, m, f, b, w, s: 2 * p - 1,
    ),
}


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", CLOSED_FORMS)
@given(st.integers(1, 8), st.integers(0, 16), st.tuples(*[st.integers(1, 9)] * 3))
def test_spans_and_microbatches_in_flight_have_their_closed_forms(
    name: str, p: int, more: int, each: tuple[int, int, int]
) -> None:
    least = {"gpipe": 1, "1f1b": 1}.get(name, 2 * p - 1 if "zb" in name else p)
    m, (f, b, w) = least + more, each
    m -= m % p if "interleaved" in name else 0
    assume("zb" not in name or w <= min(f, b))
    span, peak = CLOSED_FORMS[name]
    timeline = played(make_schedule(name, p, m), f, b, w)
    assert timeline.span == span(p, m, f, b, w, 0)
    assert "zb" in name or timeline.makespan == timeline.span
    assert list(timeline.peak_in_flight) == [peak(p, m, f, b, w, s) for s in range(p)]
    if name in ("gpipe", "1f1b"):
        assert timeline.bubble_rate == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_v_has_no_bubble_at_unit_cost_and_the_memory_of_1f1b(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 3 * p + 2):
        timeline = played(make_schedule("zb-v", p, m))
        assert (timeline.span, timeline.bubble_rate) == (6 * m, 0)
        assert timeline.makespan == 6 * m + p - 1
        assert list(timeline.peak_in_flight) == [2 * p] * p


@pytest.mark.parametrize("p", range(1, 13))
def test_v_half_and_v_min_hold_half_and_a_third_of_the_microbatches(p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        for name, peak in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
            assert max(played(make_schedule(name, p, m)).peak_in_flight) == 2 * peak


@pytest.mark.parametrize(("name", "makespan"), [("v-min", 59), ("v-half", 53), ("zb-v", 51)])
def test_v_schedules_reach_the_proven_optimum(name: str, makespan: int) -> None:
    """Proved by constraint programming for p = 4, m = 8 under the memory of each, at unit cost."""
    assert played(make_schedule(name, 4, 8)).makespan == makespan


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("each", [(1, 1, 1), (2, 2, 1), (5, 5, 3)])
def test_dualpipe_v_one_cell_after_the_other(p: int, each: tuple[int, int, int]) -> None:
    f, b, w = each
    for m in (2 * p, 2 * p + 1, 4 * p):
        timeline = played(make_schedule("dualpipe-v", p, m), *each)
        assert timeline.span == 2 * m * (f + b + w) + (p - 1) * (f + b - w)
        assert list(timeline.peak_in_flight) == [2 * p + 1] * p


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("each", [(1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 5, 2)])
def test_dualpipe_v_with_overlapped_pairs(p: int, each: tuple[int, int, int]) -> None:
    """The published bubble, (p-1)(F&B + BW - 3W) in chunk times, where a pair takes F + B + W."""
    f, b, w = each
    for m in (2 * p, 2 * p + 1, 4 * p):
        makespan = overlapped_makespan(make_schedule("dualpipe-v", p, m), f, b, w)
        assert makespan == 2 * m * (f + b + w) + (p - 1) * ((f + b + w) + (b + w) - 3 * w)


def overlapped_makespan(schedule: Schedule, f: int, b: int, w: int) -> int:
    """The makespan if F of one stage and B, W of the other are one cell, whose results leave at its end."""
    seconds = {Phase.FORWARD: f, Phase.BACKWARD_INPUT: b, Phase.BACKWARD_WEIGHT: w}
    queues = [list(blocks(cells)) for cells in schedule.orders]
    clock, end = [0] * schedule.num_ranks, dict[Compute, int]()
    while any(queues):
        before = len(end)
        for rank, queue in enumerate(queues):
            while queue and all(needed in end or needed in queue[0] for needed in inputs(queue[0], schedule)):
                block = queue.pop(0)
                arrived = [end[needed] for needed in inputs(block, schedule) if needed in end]
                clock[rank] = max([clock[rank], *arrived]) + sum(seconds[cell.phase] for cell in block)
                end.update(dict.fromkeys(block, clock[rank]))
        assert len(end) > before
    return max(clock)


def blocks(cells: Sequence[Compute]) -> Iterator[list[Compute]]:
    """Each cell on its own, but F directly before B and W of the other stage with these.

    Once the forwards are done, W directly after its B is a whole backward with it.
    """
    forwards = sum(cell.phase is Phase.FORWARD for cell in cells)
    place = 0
    while place < len(cells):
        kinds = [(cell.phase, cell.stage) for cell in cells[place : place + 3]]
        backward = [(Phase.BACKWARD_INPUT, kinds[-1][1]), (Phase.BACKWARD_WEIGHT, kinds[-1][1])]
        size = 1
        if kinds[0][0] is Phase.FORWARD and kinds[1:] == backward and kinds[0][1] != kinds[1][1]:
            size = 3
        elif not forwards and place + 1 < len(cells) and is_whole(*cells[place : place + 2]):
            size = 2
        forwards -= kinds[0][0] is Phase.FORWARD
        yield list(cells[place : place + size])
        place += size


def is_whole(first: Compute, second: Compute) -> bool:
    same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
    return same and (first.phase, second.phase) == (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def inputs(block: Sequence[Compute], schedule: Schedule) -> Iterator[Compute]:
    for cell in block:
        if cell.phase is Phase.FORWARD and cell.stage:
            yield Compute(Phase.FORWARD, cell.stage - 1, cell.microbatch)
        elif cell.phase is Phase.BACKWARD_INPUT:
            last = cell.stage == schedule.num_stages - 1
            yield Compute(Phase.FORWARD if last else cell.phase, cell.stage + (not last), cell.microbatch)


ANY_LOOPED = [f"{name}-v{v}" for name in LOOPED_SCHEDULES for v in (1, 2, 3)]
NAMES = sorted({*SCHEDULES, *SEARCHED_SCHEDULES, *ANY_LOOPED} - LOOPED_SCHEDULES.keys())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_steps_of_any_counts_of_ranks_microbatches_and_stages_have_the_bits_of_autograd(
    name: str, p: int, m: int, recompute: bool
) -> None:
    """Microbatches differ in size where the rows do not divide, and many have a single row."""
    assume(not name.startswith("interleaved-1f1b") or m % p == 0)
    assume(name != "dualpipe-v" or m >= 2 * p)
    model, sizes = captured(encoder), split_sizes(ROWS, m)
    schedule = make_schedule(name, p, m)
    artifact = generated(cut_evenly(model, schedule.num_stages, recompute), schedule)
    run, unsplit = TrainingRun(artifact, model.model), copy.deepcopy(model.model)
    found = StepResult.of(run.step(model.inputs, sizes), run.model)
    assert_equal(found, StepResult.of(unsplit_step(unsplit, model.inputs, sizes), unsplit))
