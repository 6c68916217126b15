"""A run that was ended goes on by itself: after a rank that was killed, a signal, and on other devices."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import elastic_restart_script
import pytest
from resumable_training import batches, start

import pipec
from pipec.runtime.processes.stop_signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    STOP_SIGNALS.uninstall()


@pytest.mark.slow
def test_a_run_that_lost_a_rank_goes_on_by_itself_and_then_on_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    """Two stages, of which one is killed after step 3; then all in one process. The bits are those of one."""
    script = Path(elastic_restart_script.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [str(script), str(tmp_path / "lost"), "5", "1", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--max-restarts=3", *given], capture_output=True, text=True, timeout=150, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert f"goes on after step 2, from {tmp_path / 'lost' / 'step-00000002'}" in done.stdout + done.stderr
    # Step 3 is made twice; the rank that lives may be ended before it prints the first of them.
    assert [int(number) for number, _ in losses(done.stdout)] in ([1, 2, 3, 3, 4, 5], [1, 2, 3, 4, 5])
    elastic_restart_script.train(tmp_path / "lost", 7)
    assert "goes on after step 4" in "".join(said)
    capsys.readouterr()
    elastic_restart_script.train(tmp_path / "whole", 7)
    whole = dict(losses(capsys.readouterr().out))
    for number, loss in losses(done.stdout):
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole[number]), rel=1e-12)


def losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d+) (\S+)$", printed, re.MULTILINE)


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    whole = start("1 stage").train(0, 6)
    first = start("1 stage")
    checkpoints = pipec.CheckpointManager(tmp_path, every=100)
    seen: list[float] = []

    def train() -> None:
        for words in batches(0, 6):
            seen.append(first.step(words))
            checkpoints.step(first.pipe, scheduler=first.scheduler, extra={"seen": len(seen)})
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    second = start("1 stage", seed=7)
    extra = pipec.CheckpointManager(tmp_path, every=100).resume(second.pipe, scheduler=second.scheduler)
    assert extra == {"seen": 3}
    assert seen + second.train(3, 6) == whole


def test_a_step_that_the_script_has_not_completed_is_not_saved(tmp_path: Path, said: list[str]) -> None:
    """The signal is followed by an evaluation between ``step`` and ``checkpoints.step``."""
    run = start("1 stage")
    checkpoints = pipec.CheckpointManager(tmp_path, every=100)
    (words,) = batches(0, 1)
    checkpoints.resume(run.pipe, scheduler=run.scheduler)
    run.step(words)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.pipe.eval_step(words)
    assert "step 1 is not saved, because the script has not come to" in "".join(said)
    assert not tmp_path.joinpath("step-00000001").exists()
