"""Trainers of transformers and TRL train a pipeline as they train its model on one device.

Losses, norms of gradients, rates, metrics, weights and the state of the optimizer are compared.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import worker_processes
from worker_processes import run_script

pytest.importorskip("trl")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "helpers" / "transformers_script.py"
LAYOUTS = {"alone": (0, 1), "2 ranks": (2, 1), "4 ranks": (4, 1), "2x2 replicas": (4, 2)}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 600.0)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a case prints without pipec, and the folder that it writes."""

    @functools.cache
    def run(case: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(case)
        return json.loads(
            run_script(SCRIPT, [case, str(folder), "plain"], 0, folder).splitlines()[-1]
        ), folder

    return run


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, layout) for case in ("llama", "bert") for layout in LAYOUTS),
        *(("sft", layout) for layout in LAYOUTS),
        *(
            (case, layout)
            for case in ("packed", "padding_free", "experts")
            for layout in ("alone", "2x2 replicas")
        ),
        ("adapters", "4 ranks"),
        *((case, "2 pipelines") for case in ("bert", "grpo")),
        *((case, layout) for case in ("distilled", "dpo", "grpo") for layout in LAYOUTS),
    ],
)
def test_a_trainer_is_the_same_with_a_pipeline(case: str, layout: str, plain: Any, tmp_path: Path) -> None:
    expected, folder = plain(case)
    num_ranks, how = (LAYOUTS | {"2 pipelines": (4, "groups")})[layout]
    printed = run_script(SCRIPT, [case, str(tmp_path), str(how)], num_ranks, tmp_path)
    in_float32 = case in ("dpo", "grpo", "packed", "padding_free", "experts")  # as logs of TRL are
    rounding = 1e-6 if in_float32 else 1e-9
    assert json.loads(printed.splitlines()[-1]) == approximately(expected, rounding)
    require_same_files(tmp_path, folder, rounding)


def require_same_files(found: Path, expected: Path, rounding: float = 1e-9) -> None:
    """The same files of checkpoints and models, with the same tensors."""
    names = {
        path.relative_to(expected)
        for pattern in ("*/*.safetensors", "*/optimizer.pt", "*/*.json", "*/*.pth")
        for path in expected.glob(pattern)
    }
    assert names
    for name in names:
        assert (found / name).exists(), name
        if name.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(found / name)
            torch.testing.assert_close(
                tensors, safetensors.torch.load_file(expected / name), rtol=1e-6, atol=10 * rounding
            )
        if name.suffix == ".pt":
            states = [torch.load(folder / name)["state"] for folder in (found, expected)]
            torch.testing.assert_close(*states, rtol=1e-6, atol=1e-8)


def approximately(expected: Any, rounding: float = 1e-9) -> Any:
    """It equals the same structure with the same numbers but for rounding."""
    match expected:
        case dict():
            return {name: approximately(each, rounding) for name, each in expected.items()}
        case list():
            return [approximately(each, rounding) for each in expected]
        case float():
            return pytest.approx(expected, rel=1e-6, abs=rounding)
    return expected
