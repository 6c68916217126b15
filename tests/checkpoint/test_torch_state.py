"""Trainings that go from pipec to FSDP2 and plain torch and back, over other numbers of ranks, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_checkpoint_script
from typer.testing import CliRunner
from worker_processes import run_ranks

from pipec.cli import app

SCRIPT = Path(torch_checkpoint_script.__file__)
PIPEC = {
    "one process": (0, {"devices": 2}),
    "2 stages": (2, {}),
    "2 x 2, shard=optimizer": (4, {"replicas": 2, "shard": "optimizer"}),
    "2 x 2, shard=gradients": (4, {"replicas": 2, "shard": "gradients"}),
    "2 x 2, shard=parameters": (4, {"replicas": 2, "shard": "parameters"}),
}


def run(side: str, num_ranks: int, folder: Path, source: Path | str, **options: Any) -> dict[str, Any]:
    given = [json.dumps(options)] if side == "pipec" else []
    run_ranks(SCRIPT, num_ranks, folder.parent, [side, str(folder), str(source), *given])
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def convert(*words: object) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits of weights and of AdamW's state, and the same hyperparameters."""
    assert found["model"].keys() == expected["model"].keys()
    for name, x in expected["model"].items():
        assert torch.equal(found["model"][name], x), name
    states = [each["optim"]["state"] for each in (found, expected)]
    assert states[0].keys() == states[1].keys()
    assert states[1]
    for name, entries in states[1].items():
        assert entries.keys() == states[0][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, x in entries.items():
            assert torch.equal(states[0][name][key], x), (name, key)
    assert found["optim"]["param_groups"] == expected["optim"]["param_groups"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", PIPEC)
def test_a_training_goes_to_torch_and_back(layout: str, tmp_path: Path) -> None:
    num_ranks, options = PIPEC[layout]
    first = run("pipec", num_ranks, tmp_path / "pipec", "-", **options)
    require_same(first["again"], first["trained"])
    convert(tmp_path / "pipec" / "pipec", tmp_path / "converted")
    for source in (tmp_path / "pipec" / "torch", tmp_path / "converted"):
        plain = run("torch", 0, tmp_path / "plain", source)
        require_same(plain["loaded"], first["trained"])
    sharded = run("torch", 3, tmp_path / "sharded", tmp_path / "pipec" / "torch")
    require_same(sharded["loaded"], first["trained"])
    for form in ("torch", "flat"):
        back = tmp_path / f"back from {form}"
        convert(tmp_path / "sharded" / form, back, "--optimizer", "AdamW", "--num-steps", 4)
        again = run("pipec", num_ranks, tmp_path / f"again from {form}", back, **options)
        require_same(again["loaded"], sharded["trained"])
