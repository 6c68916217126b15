"""Every example runs unchanged, alone and under torchrun, and prints the same losses both ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def results(printed: str) -> list[str]:
    """The lines that tell results: losses and accuracies."""
    return [line for line in printed.splitlines() if "loss" in line or "accuracy" in line]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("huggingface_gpt2.py", ("--steps", "3")), ("resnet_digits.py", ("--epochs", "1"))],
)
def test_one_process_and_four_print_the_same_losses(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    alone, distributed = (
        results(run_script(EXAMPLES / script, arguments, num_ranks, tmp_path)) for num_ranks in (0, 4)
    )
    assert len(alone) == 2, alone
    assert distributed == alone


def test_train_gpt_leaves_the_same_losses_and_an_artifact_a_timeline_and_a_loss_curve(tmp_path: Path) -> None:
    """Started by torchrun itself."""
    script, outputs = EXAMPLES / "train_gpt.py", [tmp_path / "alone", tmp_path / "distributed"]
    alone, distributed = (("--steps", "3", "--output", str(output)) for output in outputs)
    losses = results(run_script(script, alone, 0, tmp_path))
    assert len(losses) == 2, losses
    command, environment = [*TORCHRUN, script, *distributed], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(done.stdout) == losses
    for output in outputs:
        assert (output / "artifact" / "plan.json").is_file()
        for picture in ("timeline.svg", "loss.svg"):
            assert "<svg" in (output / picture).read_text(encoding="utf-8")
