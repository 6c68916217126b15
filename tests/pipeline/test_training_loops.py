"""Random training loops: what a script does between steps, a pipeline follows as plain PyTorch does.

``python tests/helpers/training_loops.py SEED`` runs one of them alone.
"""

import json
from pathlib import Path

import pytest
import worker_processes
from slow_params import slow_but
from training_loops import difference
from worker_processes import run_ranks

SCRIPT = Path(__file__).parents[1] / "helpers" / "training_loops.py"


@pytest.mark.parametrize("seed", slow_but(range(20), 5, 12, 15, 16, 18))
def test_a_pipeline_in_one_process_trains_as_the_unsplit_model(seed: int) -> None:
    assert not difference(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_train_as_the_unsplit_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 1500.0)
    for printed in run_ranks(SCRIPT, 2, tmp_path, [*map(str, range(10))]):
        found = json.loads(printed.splitlines()[-1])
        assert not any(found.values()), found
