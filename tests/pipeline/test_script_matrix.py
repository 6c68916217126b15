"""What scripts do between steps, with the model's parameters or the pipeline's, on 1 to 4 ranks."""

import functools
import json
from pathlib import Path

import pytest
from slow_params import slow
from training_habits_script import HABITS, SOURCES, plain
from worker_processes import run_ranks

ROUNDING = 1e-6
"""Relative: the model is in double precision, its loss in single."""


@pytest.fixture(scope="module", params=[slow(1), slow(4)], ids=["one process", "4 ranks"])
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each rank prints, in its last line its losses by habit and source."""
    count = request.param
    script = Path(__file__).parents[1] / "helpers" / "training_habits_script.py"
    return run_ranks(script, count if count > 1 else 0, tmp_path_factory.mktemp("ranks"), [str(count)])


expected = functools.cache(plain)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("habit", HABITS)
def test_losses_are_those_of_the_plain_script(losses: list[str], habit: str, source: str) -> None:
    for rank in losses:
        found = json.loads(rank.splitlines()[-1])
        assert found[f"{habit}, {source}"] == pytest.approx(expected(habit), rel=ROUNDING)


def test_every_habit_changes_the_losses() -> None:
    """So that a pipeline which ignored what a script does would not pass."""
    assert len({tuple(expected(habit)) for habit in HABITS}) == len(HABITS)
