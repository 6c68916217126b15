"""Sweeps, and a proof by one run, find what the plain way finds: times, faults and messages."""

import random
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from bare_programs import lower, verify_programs
from broken_programs import Edit, edits, golden_steps, verdict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipec.ir import Op, Program
from pipec.programs import task_times
from pipec.programs.dependence import Dependence
from pipec.programs.lower import chain_links
from pipec.programs.task_times import AVAILABLE_AT_START, Deadlock, TaskInputs, run_tasks
from pipec.schedules import make_schedule
from pipec.schedules.workload import Workload
from pipec.timeline.simulate import simulate

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "v-min")


def edge_coloring_order() -> object:
    """Every time is found in rounds, of one cell of each resource."""
    return patch.object(task_times, "_sweep", lambda *_: None)


def wait_by_wait() -> object:
    """That ranks finish is found by moving each of them past one wait at a time."""
    return patch("pipec.programs.rules.deadlock_rules._certainly_finish", lambda *_: False)


@st.composite
def cells(draw: st.DrawFn) -> tuple[np.ndarray, TaskInputs, list[int], list[int]]:
    """Some resources with cells that read each other, perhaps in a ring."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    total = sum(counts)
    durations = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.5, 0.1]), min_size=total, max_size=total))
    number = st.integers(0, max(total - 1, 0))
    pairs = draw(st.lists(st.tuples(number, number | st.just(AVAILABLE_AT_START)), max_size=total))
    readers, producers = np.array(pairs, np.int32).reshape(-1, 2).T if total else np.empty((2, 0), np.int32)
    groups = [0, *sorted(draw(st.sets(st.integers(1, len(counts) - 1)) if len(counts) > 1 else st.just(())))]
    return np.array(durations), TaskInputs(readers, producers), [0, *np.cumsum(counts).tolist()], groups


@settings(max_examples=75)
@given(cells())
@example((np.zeros(2), TaskInputs(np.array([0, 1]), np.array([1, 0])), [0, 1, 2], [0, 1]))
def test_sweeps_find_the_times_of_rounds(given_cells: tuple) -> None:
    found = run_tasks(*given_cells)
    with edge_coloring_order():
        expected = run_tasks(*given_cells)
    if isinstance(expected, Deadlock):
        assert isinstance(found, Deadlock)
        assert found.tasks.tolist() == expected.tasks.tolist()
    else:
        assert not isinstance(found, Deadlock)
        assert found.starts.tolist() == expected.starts.tolist()
        assert found.ends.tolist() == expected.ends.tolist()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_run_in_sweeps(name: str) -> None:
    schedule = make_schedule(name, 4, 12, Workload.uniform(4))
    links = chain_links(schedule.num_stages)
    costs = Workload.uniform(4).costs(schedule, links)
    with patch.object(task_times, "_run_in_rounds", side_effect=AssertionError("a run did not settle")):
        programs = lower(schedule, links)
        with patch(
            "pipec.programs.rules.deadlock_rules.stalled_ranks",
            side_effect=AssertionError("no order was found"),
        ):
            verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
        timeline = simulate(programs, costs)
    with edge_coloring_order():
        assert lower(schedule, links) == programs
        assert simulate(programs, costs).events == timeline.events


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_of_neighbours_need_no_search_where_a_pipeline_turns_round(name: str) -> None:
    schedule = make_schedule(name, 6, 12, Workload.uniform(6))
    links = chain_links(schedule.num_stages)
    with patch.object(Dependence, "_are_near", lambda _, others, __: np.zeros(others.size, bool)):
        searched = lower(schedule, links)
    assert lower(schedule, links) == searched


def test_where_gpipe_turns_round_nothing_is_searched() -> None:
    schedule = make_schedule("gpipe", 6, 12, Workload.uniform(6))
    with patch.object(Dependence, "_lead_to", return_value=np.empty(0, bool)) as search:
        lower(schedule, chain_links(schedule.num_stages))
    assert search.call_args.args[0].size == 0


@pytest.mark.parametrize("name", golden_steps())
def test_faults_are_those_of_the_plain_way(name: str) -> None:
    step = golden_steps()[name]
    programs = step.programs()
    of_messages = [x for x in edits(programs, step.plan.links) if edited(programs, x) in (Op.SEND, Op.RECV)]
    for each in random.Random(0).sample(of_messages, min(len(of_messages), 30)):
        broken = each.applied_to(programs, step.plan.links)
        found = verdict(step, broken)
        with edge_coloring_order(), wait_by_wait():
            assert verdict(step, broken) == found


def edited(programs: Sequence[Program], edit: Edit) -> Op:
    return programs[edit.rank].instructions[edit.number].op
