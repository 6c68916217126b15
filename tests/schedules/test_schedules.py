"""Schedules: the closed forms of the literature, and replicas. docs/schedules.md draws them, word by word."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from bare_programs import uniform_costs, verified
from compile_variants import assert_same_bits, captured, cut_evenly, generated
from huggingface_models import ROWS, encoder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from symbolic_steps import make_step

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Schedule, ShardingLevel
from pipec.ir.batch_split import split_sizes
from pipec.ir.stream import window
from pipec.programs.lower import chain_links
from pipec.programs.rank_memory import in_flight, peak_in_flight
from pipec.schedules import (
    ASYNCHRONOUS_SCHEDULES,
    SCHEDULES,
    SEARCHED_SCHEDULES,
    format_orders,
    forward_only,
    make_schedule,
    parse_orders,
)
from pipec.schedules.named import LOOPED_SCHEDULES
from pipec.schedules.replicated import adjacent_pipelines, replicate_schedule, round_robin
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate


def played(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1, message: float = 0) -> Timeline:
    """The verified programs of a plain chain; costs are those of a stage."""
    costs = {"forward": f, "backward_input": b, "backward_weight": w, "message": message}
    links = chain_links(schedule.num_stages)
    return simulate(verified(schedule), uniform_costs(schedule.num_stages, links=links, **costs))


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
    """The verifier refuses missing and doubled computes. Orders are written and read back."""
    assume((name != "interleaved-1f1b" or m % p == 0) and (name != "dualpipe-v" or m >= 2 * p))
    schedule = make_schedule(name, p, m)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
    assert played(schedule, 2, 3, 1, message).makespan >= m * (2 + 3 + 1) * schedule.num_stages / p
    forwards = [[cell for cell in cells if cell.phase is Phase.FORWARD] for cells in schedule.orders]
    assert [[*order] for order in forward_only(schedule).orders] == forwards
    assert parse_orders(format_orders(schedule), name) == schedule


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


def num_overlapped(order: Sequence[Compute]) -> int:
    """Forwards directly before both halves of a backward of the other stage, which may overlap with them."""
    phases = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]
    threes = zip(order, order[1:], order[2:], strict=False)
    return sum([x.phase for x in each] == phases and each[0].stage != each[1].stage for each in threes)


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("each", [(1, 1, 1), (2, 2, 1), (5, 5, 3)])
def test_dualpipe_v(p: int, each: tuple[int, int, int]) -> None:
    """One cell after the other. The published bubble is smaller: all but warmup and cooldown overlaps."""
    f, b, w = each
    for m in (2 * p, 2 * p + 1, 4 * p):
        schedule = make_schedule("dualpipe-v", p, m)
        timeline = played(schedule, *each)
        assert timeline.span == 2 * m * (f + b + w) + (p - 1) * (f + b - w)
        assert list(timeline.peak_in_flight) == [2 * p + 1] * p
        expected = [2 * (m - 2 * p) + p + 1 + rank for rank in range(p)]
        assert [*map(num_overlapped, schedule.orders)] == expected


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
    assert_same_bits(artifact, model, sizes=sizes)


# replicas, whatever their placement and the end of their step

seconds = st.integers(0, 5).map(float)


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(2, 4), seconds, seconds, seconds, seconds)
def test_data_parallelism_takes_its_computes_and_what_comes_behind(
    rounds: int, replicas: int, reduce: float, norm: float, update: float, gather: float
) -> None:
    count = max(rounds * replicas - 1, replicas)
    schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 1), count, replicas)
    price = {"reduce_grad": reduce, "grad_norm": norm, "update": update, "unshard": gather}

    def makespan(**options: object) -> float:
        step = make_step(schedule, **options)  # type: ignore[arg-type]
        programs = step.programs()
        endings = {(x.op, x.stage, x.bucket): price.get(x.op, 0.0) for p in programs for x in p.instructions}
        return simulate(programs, replace(uniform_costs(1), sync_times=endings)).makespan

    assert makespan() == 3 * rounds + reduce
    assert makespan(updates=True) == 3 * rounds + reduce + update
    assert makespan(updates=True, clips=True) == 3 * rounds + reduce + norm + update
    assert makespan(updates=True, shard=ShardingLevel.OPTIMIZER) == 3 * rounds + reduce + update + gather
    assert makespan(updates=True, shard=ShardingLevel.PARAMETERS) >= gather + 3 * rounds + reduce + update


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_round_robin_on_equal_numbers_is_1f1b_lifted(stages: int, replicas: int, rounds: int) -> None:
    several = round_robin(rounds * replicas, [replicas] * stages)
    other = replicate_schedule(functools.partial(make_schedule, "1f1b", stages), rounds * replicas, replicas)
    assert several.placement == other.placement
    assert [*map(list, several.orders)] == [*map(list, other.orders)]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 12))
def test_round_robin_keeps_a_window_of_microbatches_in_flight(replicas: list[int], more: int) -> None:
    schedule = round_robin(max(replicas) + more, replicas)
    programs = verified(schedule)
    limits = [window(stage, replicas) for stage, number in enumerate(replicas) for _ in range(number)]
    assert all(found <= most for found, most in zip(map(peak_in_flight, programs), limits, strict=True))
    first = [k for k, program in enumerate(programs) if schedule.placement[0][0] == program.rank]
    needed = min(limits[0], ceil(schedule.num_microbatches / replicas[0]))
    assert int(in_flight(programs[first[0]].instructions).max()) == needed


def test_a_replica_without_a_microbatch_is_refused() -> None:
    with pytest.raises(InputError, match="a stage has 3 replicas, which need a microbatch each"):
        round_robin(2, [3, 1])


@given(st.integers(1, 4), st.integers(1, 4))
def test_side_by_side_puts_the_ranks_of_a_pipeline_next_to_each_other(replicas: int, num_ranks: int) -> None:
    acting = adjacent_pipelines(num_ranks, replicas)
    assert sorted(rank for ranks in acting for rank in ranks) == list(range(replicas * num_ranks))
    for pipeline in zip(*acting, strict=True):
        assert list(pipeline) == list(range(pipeline[0], pipeline[0] + num_ranks))
    assert adjacent_pipelines(3, 2) == ((0, 3), (1, 4), (2, 5))
