"""A loop with Accelerate trains a pipeline as the model: on any layout, with the numbers of one device."""

import json
from pathlib import Path
from typing import Any

import pytest
from classified_rows import assert_close
from worker_processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "helpers" / "accelerate_script.py"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (0, {"devices": 2, "microbatches": 2}),
    "2 ranks": (2, {"microbatches": 2, "timeout": 60.0}),
    "4 ranks": (4, {"microbatches": 4, "timeout": 60.0}),
    "2 x 2": (4, {"microbatches": 4, "replicas": 2, "timeout": 60.0}),
    "2 x 2, local": (4, {"microbatches": 4, "replicas": 2, "timeout": 60.0, "batch": "local"}),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    return json.loads(run_ranks(SCRIPT, 0, folder, [str(folder), "plain"])[0].splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_one_device(layout: str, expected: Any, tmp_path: Path) -> None:
    num_ranks, options = LAYOUTS[layout]
    for printed in run_ranks(SCRIPT, num_ranks, tmp_path, [str(tmp_path), "pipec", repr(options)]):
        found = json.loads(printed.splitlines()[-1])
        assert_close(found, {name: expected[name] for name in found})
