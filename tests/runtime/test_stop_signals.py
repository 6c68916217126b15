"""Signals, NaN and lost ranks end a script: all ranks follow at the same step, can save, and go on later."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_restart_script
import pytest
import torch
from delayed_gradients import SGD, assert_same, batches, delayed, pipeline
from resumable_training import batches as words_of
from resumable_training import start
from torch import Tensor
from worker_processes import run_lines

import pipec
from pipec.runtime.processes import stop_signals
from pipec.runtime.processes.stop_signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    STOP_SIGNALS.uninstall()


def test_sigterm_ends_a_stream_when_every_stage_has_made_the_same_updates() -> None:
    """In one process. What was begun has losses, which come before the end."""
    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    seen: list[Any] = []
    pipe.before_stop(lambda: seen.append((pipe.num_steps, [x.clone() for x in pipe.parameters()])))
    losses: list[Tensor] = []

    def train() -> None:
        for loss in pipe.stream(batches(20)):
            losses.append(loss)
            if len(losses) == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    assert len(losses) < 10
    assert losses == [reference.feed(batch) for batch in batches(len(losses))]
    assert_same(pipe, reference)
    ((num_steps, parameters),) = seen
    assert num_steps == len(losses)
    assert all(map(torch.equal, parameters, pipe.parameters()))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it comes at the same moment, as launchers and schedulers may both send it."""
    pipe = pipeline(2)
    pipe.before_stop(lambda: None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert STOP_SIGNALS.pending == signal.SIGTERM
    monkeypatch.setattr(stop_signals, "FORCED_EXIT_SECONDS", 0.0)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_forked_process_ends_as_any_other() -> None:
    """Such as a worker of a DataLoader, which its parent terminates."""
    pipeline(2).before_stop(lambda: None)
    forked, here = os.pipe()
    child = os.fork()
    if not child:
        os.write(here, b"!")
        signal.pause()
    os.read(forked, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not STOP_SIGNALS.pending


def test_a_handler_of_the_script_stays() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    pipe = pipeline(2)
    pipe.before_stop(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(list(pipe.stream(batches(2)))) == 2
    assert noted == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, before)


def test_signals_act_at_once_while_a_rank_compiles_and_are_noted_again_afterwards() -> None:
    """One that was noted before is not forgotten."""
    pipeline(2).before_stop(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    with STOP_SIGNALS.uninstalled():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert STOP_SIGNALS.pending == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


# three processes over gloo: one script does all, one thing after the other, because they are slow to start


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, TESTS)
import torch, pipec
import optimizer_reference
from tests.pipeline import test_updates
from tests.pipeline.test_updates import GOOD, KINDS, NAN_LOSS
from delayed_gradients import *
from tests.pipeline.test_asynchronous import Fails as FailsOnce
rank = int(os.environ["RANK"])

def raised(call):
    try:
        call()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return error

def are_those_of(pipe, reference, count):
    while len(reference.history) <= count:
        reference.feed(given[len(reference.history) - 1])
    own = pipe.local_state_dict()
    return all(torch.equal(own[name], reference.history[count][name]) for name in own)

def made(schedule, **options):
    pipe = pipeline(3, SGD, schedule, timeout=240.0, **options)
    return pipe, delayed(pipe, SGD, model())

given = list(batches(40))

# Steps that are skipped on all ranks, one of which has shares of the optimizer's state.
options = dict(devices=3, replicas=(2, 1), on_nan="skip", shard="optimizer", timeout=240.0)
pipe, plain = optimizer_reference.pair(test_updates.model, **options)
for kind, batch in zip(KINDS, test_updates.batches(*KINDS)):
    pipe.step(**batch)
    if kind is GOOD:
        plain.step(**batch)
held = pipe.local_state_dict()
near = all(torch.allclose(p, dict(plain.model.named_parameters())[n], rtol=1e-9) for n, p in held.items())
print("skipped", pipe.num_skipped, near)

# A part of the batch that one replica alone has passed, and whose loss is NaN.
options = dict(stages=1, batch="local", on_nan="raise", optimizer=torch.optim.AdamW, timeout=240.0)
pipe = pipec.compile(test_updates.model(), 3, microbatches=6, **options)
good, bad = test_updates.batches(GOOD, NAN_LOSS)
pipe.step(**good)
before = [p.clone() for p in pipe.parameters()]
error = raised(lambda: pipe.step(**(bad if rank == 1 else good)))
same = all(map(torch.equal, before, pipe.parameters()))
print("local", type(error).__name__, str(error).split(".")[0], same, pipe.step(**good) > 0)

# A stream without a flush whose seventh loss is NaN.
pipe, reference = made("pipedream", on_nan="raise")
bad = [*given[:6], (given[6][0] * float("nan"), given[6][1]), *given[7:]]
losses = []
error = raised(lambda: losses.extend(pipe.stream(bad)))
print("nan", type(error).__name__, str(error).split(".")[0], len(losses), are_those_of(pipe, reference, 6))

# Ctrl-C at one rank while its stream is under way.
pipe, reference = made("pipedream")
losses = []
def interrupted():
    for loss in pipe.stream(given):
        losses.append(loss)
        if len(losses) == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
error = raised(interrupted)
print("interrupt", type(error).__name__, error, are_those_of(pipe, reference, len(losses)))
print("saved", len(pipe.full_state_dict(all_ranks=True)) == len(reference.history[0]))
default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("goes on", default, len(list(pipe.stream(given[:3]))))

# SIGTERM at one rank in a loop over steps.
pipe = pipec.compile(model(), 3, loss_fn=LOSS, microbatches=2, timeout=240.0)
pipe.before_stop(lambda: print("before", pipe.num_steps, len(pipe.full_state_dict(all_ranks=True)) > 0))
def terminated():
    for number, (x, y) in enumerate(given):
        if number == 5 and rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        pipe.step(x, target=y)
error = raised(terminated)
print("terminated", type(error).__name__, error.code, pipe.step(*given[0][:1], target=given[0][1]) > 0)

# An optimizer that raises in the middle of an update of one stage.
pipe = pipeline(3, FailsOnce, timeout=240.0)
error = raised(lambda: list(pipe.stream(given)))
print("failed", "the learning rate is negative" in str(error), error.__notes__[0].split(",")[0])

# A rank that dies while its stream is under way.
pipe, reference = made("pipedream-vertical-sync")
def killed():
    for number, loss in enumerate(pipe.stream(given)):
        if number == 8 and rank == 1:
            Path(SCRATCH, "error_1").write_text("")  # as a script that ends
            sys.stdout.flush()
            os._exit(0)
error = raised(killed)
count = int(error.__notes__[0].removeprefix("the parameters and buffers are those after ").split()[0])
died = "rank 1: its process died" in str(error)
print("killed", type(error).__name__, died, count, are_those_of(pipe, reference, count))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The lines of each rank."""
    scratch, tests = tmp_path_factory.mktemp("stops"), Path(__file__).parents[2]
    return run_lines(f"TESTS, SCRATCH = {str(tests)!r}, {str(scratch)!r}\n{SCRIPT}", 3, scratch)


NAN = r"NonFiniteError step {} \(the first is 0\): the loss of microbatch {} is NaN \(rank {}, stage {}\)"
SAID = {
    "skipped": "2 True",
    "local": NAN.format(1, 4, 1, 0) + r" True tensor\(True\)",
    "nan": NAN.format(6, 0, 2, 2) + " 6 True",
    "interrupt": r"KeyboardInterrupt rank 1 was sent SIGINT; all ranks have made \d+ steps True",
    "saved": "True",
    "goes on": "True 3",
    "before": "5 True",
    "terminated": r"SystemExit 143 tensor\(True\)",
    "failed": "True no version of the weights is held by all stages",
    "killed": r"TransportError True \d+ True",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAID)
def test_all_ranks_end_at_the_same_step_and_say_why(printed: list[list[str]], kind: str) -> None:
    """Ranks that outlive another one have the same version of the weights."""
    lines = [[line for line in each if line.startswith(f"{kind} ")] for each in printed]
    if kind == "killed":
        assert lines.pop(1) == []
    assert lines == [lines[0]] * len(lines)
    (said,) = lines[0]
    assert re.fullmatch(f"{kind} {SAID[kind]}", said), said


# runs that go on by themselves


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
        for words in words_of(0, 6):
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
    (words,) = words_of(0, 1)
    checkpoints.resume(run.pipe, scheduler=run.scheduler)
    run.step(words)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.pipe.eval_step(words)
    assert "step 1 is not saved, because the script has not come to" in "".join(said)
    assert not tmp_path.joinpath("step-00000001").exists()
