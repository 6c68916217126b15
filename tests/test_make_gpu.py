"""``make gpu`` takes an interpreter as it is, without pip and network, and is not green if nothing ran."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make_gpu(python: Path | str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        ["make", "gpu", f"PYTHON={python}", "VENV="],
        cwd=ROOT,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_missing_packages_are_named(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    done = make_gpu(tmp_path / "bin" / "python")
    assert done.returncode != 0
    assert "lacks torch, numpy, " in done.stderr
    assert "pip" not in done.stdout


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = make_gpu(sys.executable)
    assert done.returncode != 0
    assert "there is no CUDA device here" in done.stderr


@pytest.mark.slow
def test_a_run_of_skipped_tests_is_not_green() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/cuda/test_gpu_memory.py", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "3 skipped" in done.stdout
