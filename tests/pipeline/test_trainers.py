"""Loops of other libraries train a pipeline as they train its model: alone, and over two processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "helpers" / "trainers_script.py"
LIBRARIES = {"accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_losses_norms_and_files_are_those_of_the_model(library: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[library])
    arguments = [library, str(tmp_path)]

    def found(num_ranks: int, *more: str) -> list[Any]:
        return [
            json.loads(printed.splitlines()[-1])
            for printed in run_ranks(SCRIPT, num_ranks, tmp_path, [*arguments, *more])
        ]

    expected = found(0, "plain")
    for each in found(0) + found(2):
        assert close(each, expected[0])


def close(found: Any, expected: Any) -> bool:
    """Whether both have the same structure, and the same numbers but for rounding."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == (pytest.approx(expected, rel=2e-3) if isinstance(expected, float) else expected))
