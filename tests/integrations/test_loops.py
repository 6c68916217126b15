"""A loop with Accelerate or with Lightning trains a pipeline as the model.

On any layout it gives the numbers of one device without pipec.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_processes
from classified_rows import assert_close
from worker_processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = {
    name: Path(__file__).parents[1] / "helpers" / f"{name}_script.py" for name in ("accelerate", "lightning")
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (0, {"devices": 2, "microbatches": 2}),
    "2 ranks": (2, {"microbatches": 2, "timeout": 60.0}),
    "4 ranks": (4, {"microbatches": 4, "timeout": 60.0}),
    "2 x 2": (4, {"microbatches": 4, "replicas": 2, "timeout": 60.0}),
    "2 x 2 of a mesh": (4, {"microbatches": 4, "axes": ("dp", "pp"), "timeout": 60.0}),
    "2 pipelines": (4, {"microbatches": 2, "axes": ("of each", "pp"), "timeout": 60.0}),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 800.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a loop prints without pipec."""

    @functools.cache
    def run(loop: str) -> Any:
        folder = tmp_path_factory.mktemp(loop)
        return json.loads(run_ranks(SCRIPTS[loop], 0, folder, [str(folder), "plain"])[0].splitlines()[-1])

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", SCRIPTS)
def test_numbers_are_those_of_one_device(loop: str, layout: str, plain: Any, tmp_path: Path) -> None:
    num_ranks, options = LAYOUTS[layout]
    for printed in run_ranks(SCRIPTS[loop], num_ranks, tmp_path, [str(tmp_path), "pipec", repr(options)]):
        found, expected = json.loads(printed.splitlines()[-1]), plain(loop)
        assert found.keys() == expected.keys()
        for name, of_model in found.items():  # a replica that reads its own rows needs a row
            assert_close(of_model, {run: expected[name][run] for run in of_model}, name)
