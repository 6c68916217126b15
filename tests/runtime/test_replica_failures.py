"""A replica that fails, or comes with other data, another plan or optimizer: named."""

from pathlib import Path

import pytest
from worker_processes import new_store, printing, run_main, start_ranks

SCRIPT = Path(__file__).parents[1] / "helpers" / "replica_failure_script.py"

pytestmark = pytest.mark.slow


def outputs(scratch: Path, *how: str) -> list[str]:
    """What each of two ranks prints."""
    store, printed = new_store(), [scratch / f"printed_{rank}" for rank in range(2)]
    ranks = start_ranks(printing, [(path, run_main, SCRIPT, how) for path in printed], scratch, store.port)
    try:
        for rank in ranks:
            rank.join(200)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        return [path.read_text() for path in printed]
    finally:
        for rank in ranks:
            rank.kill()


DIFFERENT = {
    "learning rate": "optimizers that differ:",
    "optimizer": "different arguments to pipec.compile:",
    "plan": "microbatches: 2 on rank 0; 4 on rank 1",
    "rows": "rows: 24 on rank 0; 12 on rank 1",
}


def test_ranks_that_differ_are_told_so(tmp_path: Path) -> None:
    for printed in outputs(tmp_path, *DIFFERENT):
        _, *errors = printed.split("InputError: ")
        assert len(errors) == len(DIFFERENT), printed
        for error, said in zip(errors, DIFFERENT.values(), strict=True):
            assert said in error


def test_a_replica_that_fails_in_a_collective_tells_the_others_why(tmp_path: Path) -> None:
    survivor, failed = outputs(tmp_path, "collective")
    assert failed.startswith("ExecutionError: ")
    assert "ValueError: broken" in failed
    assert survivor.startswith("TransportError: ")
    assert "ValueError: broken" in survivor
