"""Three processes over gloo that are interrupted, meet numbers that are not finite, and lose one of them.

One script does all of that, one thing after the other, because processes are slow to start.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, TESTS)
import torch, pipec
import optimizer_reference
from tests.pipeline import test_on_nan
from tests.pipeline.test_on_nan import GOOD, KINDS, NAN_LOSS
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
        reference.step(given[len(reference.history) - 1])
    own = pipe.local_state_dict()
    return all(torch.equal(own[name], reference.history[count][name]) for name in own)

def made(schedule, lag, **options):
    pipe, plain = pipeline(3, SGD, schedule, timeout=240.0, **options), model()
    return pipe, Delayed(plain, SGD, stages_of(pipe.plan), 3, lag, losses_in(pipe.plan.num_microbatches))

given = list(batches(40))

# Steps that are skipped on all ranks, one of which has shares of the optimizer's state.
options = dict(devices=3, replicas=(2, 1), on_nan="skip", shard="optimizer", timeout=240.0)
pipe, plain = optimizer_reference.pair("adamw", make=test_on_nan.model, **options)
for kind, batch in zip(KINDS, test_on_nan.batches(*KINDS)):
    pipe.step(**batch)
    if kind is GOOD:
        plain.step(batch)
held = pipe.local_state_dict()
near = all(torch.allclose(p, dict(plain.model.named_parameters())[n], rtol=1e-9) for n, p in held.items())
print("skipped", pipe.num_skipped, near)

# A part of the batch that one replica alone has passed, and whose loss is NaN.
options = dict(stages=1, batch="local", on_nan="raise", optimizer=torch.optim.AdamW, timeout=240.0)
pipe = pipec.compile(test_on_nan.model(), 3, microbatches=6, **options)
good, bad = test_on_nan.batches(GOOD, NAN_LOSS)
pipe.step(**good)
before = [p.clone() for p in pipe.parameters()]
error = raised(lambda: pipe.step(**(bad if rank == 1 else good)))
same = all(map(torch.equal, before, pipe.parameters()))
print("local", type(error).__name__, str(error).split(".")[0], same, pipe.step(**good) > 0)

# A stream without a flush whose seventh loss is NaN.
pipe, reference = made("pipedream", stashed, on_nan="raise")
bad = [*given[:6], (given[6][0] * float("nan"), given[6][1]), *given[7:]]
losses = []
error = raised(lambda: losses.extend(pipe.stream(bad)))
print("nan", type(error).__name__, str(error).split(".")[0], len(losses), are_those_of(pipe, reference, 6))

# Ctrl-C at one rank while its stream is under way.
pipe, reference = made("pipedream", stashed)
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
pipe, reference = made("pipedream-vertical-sync", vertical)
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
def printed(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sequence[str]]:
    """The lines of each rank, without what pipec logs, which rank 0 alone does."""
    scratch, tests = tmp_path_factory.mktemp("stops"), Path(__file__).parents[2]
    script = scratch / "script.py"
    script.write_text(f"TESTS, SCRATCH = {str(tests)!r}, {str(scratch)!r}\n{SCRIPT}")
    texts = run_ranks(script, 3, scratch)
    return [[line for line in each.splitlines() if not line.startswith("pipec: ")] for each in texts]


def lines(printed: Sequence[Sequence[str]], kind: str) -> list[list[str]]:
    return [[line for line in each if line.startswith(kind)] for each in printed]


def test_all_ranks_skip_the_same_steps(printed: Sequence[Sequence[str]]) -> None:
    assert lines(printed, "skipped") == [["skipped 2 True"]] * 3


def test_all_ranks_refuse_what_one_replica_passed(printed: Sequence[Sequence[str]]) -> None:
    said = "step 1 (the first is 0): the loss of microbatch 4 is NaN (rank 1, stage 0) True tensor(True)"
    assert lines(printed, "local") == [[f"local NonFiniteError {said}"]] * 3


def test_all_ranks_end_before_a_loss_that_is_nan(printed: Sequence[Sequence[str]]) -> None:
    said = "step 6 (the first is 0): the loss of microbatch 0 is NaN (rank 2, stage 2)"
    assert lines(printed, "nan") == [[f"nan NonFiniteError {said} 6 True"]] * 3


def test_ctrl_c_at_one_rank_ends_all_at_the_same_mini_batch(printed: Sequence[Sequence[str]]) -> None:
    (first,), *others = lines(printed, "interrupt")
    said = r"rank 1 was sent SIGINT; all ranks have made \d+ steps True"
    assert re.fullmatch(rf"interrupt KeyboardInterrupt {said}", first)
    assert others == [[first]] * 2
    assert lines(printed, "saved") == [["saved True"]] * 3
    assert lines(printed, "goes on") == [["goes on True 3"]] * 3


def test_sigterm_at_one_rank_ends_all_before_the_same_step(printed: Sequence[Sequence[str]]) -> None:
    assert lines(printed, "before") == [["before 5 True"]] * 3
    assert lines(printed, "terminated") == [["terminated SystemExit 143 tensor(True)"]] * 3


def test_all_ranks_say_why_an_optimizer_failed_on_one(printed: Sequence[Sequence[str]]) -> None:
    assert lines(printed, "failed") == [["failed True no version of the weights is held by all stages"]] * 3


def test_a_rank_that_dies_leaves_the_others_a_version_that_all_held(printed: Sequence[Sequence[str]]) -> None:
    """Of the ranks that live, the same one, with the bits of the reference."""
    first, died, last = lines(printed, "killed")
    assert not died
    assert first == last
    assert re.fullmatch(r"killed TransportError True (\d+) True", first[0])
