"""Schedules: who computes what in which order, as the literature draws them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipec.errors import InputError
from pipec.ir import Phase, Schedule
from pipec.schedules import SCHEDULES, forward_only, make_schedule


def order(schedule: Schedule, rank: int) -> str:
    letters = {Phase.FORWARD: "F", Phase.BACKWARD: "B"}
    return " ".join(f"{letters[cell.phase]}{cell.microbatch}" for cell in schedule.orders[rank])


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    schedule = make_schedule("gpipe", 2, 3)
    assert schedule.placement == (0, 1)
    assert order(schedule, 0) == order(schedule, 1) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    schedule = make_schedule("1f1b", 4, 6)
    assert order(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert order(schedule, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"
    assert order(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_1f1b_with_fewer_microbatches_than_ranks_is_gpipe_on_early_ranks() -> None:
    assert order(make_schedule("1f1b", 4, 2), 0) == "F0 F1 B0 B1"


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 32))
def test_each_rank_computes_its_own_stage_once_per_phase_and_microbatch(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    schedule = make_schedule(name, num_ranks, num_microbatches)
    assert schedule.name == name
    for rank, cells in enumerate(schedule.orders):
        expected = {(phase, mb) for phase in ("forward", "backward") for mb in range(num_microbatches)}
        assert {(cell.phase, cell.microbatch) for cell in cells} == expected
        assert len(cells) == len(expected)
        assert {cell.stage for cell in cells} == {rank}


def test_forward_only_drops_the_backwards_and_keeps_the_order() -> None:
    schedule = forward_only(make_schedule("1f1b", 4, 6))
    assert order(schedule, 0) == order(schedule, 3) == "F0 F1 F2 F3 F4 F5"


def test_an_unknown_name_lists_the_known_ones_and_suggests_the_closest() -> None:
    with pytest.raises(
        InputError, match=r"unknown schedule '1F1b '; did you mean '1f1b'\? known .* gpipe, 1f1b"
    ):
        make_schedule("1F1b ", 4, 8)
    with pytest.raises(InputError, match=r"unknown schedule 'wave'; known schedules: gpipe, 1f1b"):
        make_schedule("wave", 4, 8)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "what"),
    [(0, 8, "num_ranks"), (4, 0, "num_microbatches"), (-1, 8, "num_ranks")],
)
def test_counts_below_one_are_refused(num_ranks: int, num_microbatches: int, what: str) -> None:
    with pytest.raises(InputError, match=f"'gpipe' needs {what} of at least 1"):
        make_schedule("gpipe", num_ranks, num_microbatches)
