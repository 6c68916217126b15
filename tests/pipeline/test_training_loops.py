"""Random training loops: a pipeline trains as plain PyTorch does.

``python tests/helpers/random_training_loops.py --seed N --ranks R`` does one of them alone, which
failures name.
"""

from collections.abc import Mapping

import pytest
from random_training_loops import (
    ONE_PROCESS_SEEDS,
    TWO_RANKS_SEEDS,
    Result,
    draw,
    run,
    run_on_two_ranks,
)

pytestmark = pytest.mark.slow


def require_equal(result: Result, ranks: int) -> None:
    script = "PYTHONPATH=. python tests/helpers/random_training_loops.py"
    again = f"{script} --shrink --ranks {ranks} --seed {result.seed}"
    assert result.kind == "equal", f"{result.kind} {result.detail}\n{again}\n{draw(result.seed, ranks)}"


@pytest.mark.parametrize("seed", ONE_PROCESS_SEEDS)
def test_a_pipeline_in_one_process_trains_as_the_unsplit_model(seed: int) -> None:
    require_equal(run(draw(seed, 1)), 1)


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, list[Result]]:
    ranks = run_on_two_ranks(TWO_RANKS_SEEDS, tmp_path_factory.mktemp("ranks"))
    return {results[0].seed: [*results] for results in zip(*ranks, strict=True)}


@pytest.mark.parametrize("seed", TWO_RANKS_SEEDS)
def test_two_processes_train_as_the_unsplit_model(
    found_by_ranks: Mapping[int, list[Result]], seed: int
) -> None:
    for result in found_by_ranks[seed]:
        require_equal(result, 2)
