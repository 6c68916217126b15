"""Steps that fail say where and why, stop all ranks, and leave no trace."""

import contextlib
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from instruction_hooks import before_each
from torch import Tensor, nn

import pipec
from pipec.errors import ExecutionError
from pipec.ir import Instruction, Op
from pipec.runtime.step import interpreter
from pipec.runtime.step.interpreter import Interpreter
from pipec.runtime.step.linker import Linker
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.step_results import StepResults

pytestmark = pytest.mark.filterwarnings("ignore:batch norms")

X = torch.linspace(-1, 1, 20).view(10, 2)


def compiled(devices: int = 1) -> pipec.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(2, 2), nn.BatchNorm1d(2))))
    return pipec.compile(model, devices, loss_fn=F.mse_loss, microbatches=5, schedule="1f1b")


def failing_once(error: BaseException) -> Callable[[RankState, Instruction], None]:
    """Raises ``error`` in the first backward of rank 1, after three microbatches have run forward there."""
    errors = iter([error])

    def fail(rank: RankState, instruction: Instruction) -> None:
        if rank.number == 1 and instruction.op is Op.BACKWARD:
            for each in errors:
                raise each

    return fail


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=repr)
def test_a_failing_rank_stops_all_and_the_pipeline_works_again_afterwards(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers are as before the step."""
    expected = compiled(3)
    expected.step(X, target=X)
    monkeypatch.setattr(Linker, "link", before_each(failing_once(error)))
    pipe = compiled(3)
    before = [each.clone() for each in pipe.buffers()]
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ExecutionError
    with pytest.raises(kind) as caught:
        pipe.step(X, target=X)
    assert all(map(torch.equal, before, pipe.buffers()))
    if kind is ExecutionError:
        first, heading, *instructions = str(caught.value).splitlines()
        place = r"rank 1, stage 1, microbatch 0, backward: ValueError: broken "
        assert re.fullmatch(place + r"\(test_runtime.py, line \d+, in fail\)", first)
        assert (heading, len(instructions)) == ("last instructions of rank 1:", 5)
        assert instructions[-1].split() == ["11", "backward", "stage", "1", "mb", "0"]
        assert caught.value.__cause__ is error
    pipe.zero_grad()
    pipe.step(X, target=X)
    assert all(map(torch.equal, pipe.buffers(), expected.buffers()))
    for own, other in zip(pipe.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize(
    ("owner", "method", "place"),
    [(Interpreter, "begin_step", "preparing"), (StepResults, "of_batch", "finishing")],
)
def test_an_error_before_the_first_and_after_the_last_instruction_says_so(
    owner: type, method: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, lambda *_: exec("raise KeyError('x')"))
    with pytest.raises(ExecutionError, match=f"rank 0, {place} the step: KeyError: 'x'"):
        compiled().step(X, target=X)


def test_instructions_run_with_their_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels and extensions ask for it, and a step may be made on any thread."""
    current, seen = list[object](), list[Any]()

    @contextlib.contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.append("another")

    monkeypatch.setattr(interpreter, "current_device", current_device)
    monkeypatch.setattr(Linker, "link", before_each(lambda *_: seen.append([*current])))
    compiled().step(X, target=X)
    assert seen
    assert all(each == [torch.device("cpu")] for each in seen)
    assert current[1:] == ["another"]


def failing(output: Tensor, target: Tensor) -> Tensor:
    raise RuntimeError("the loss is not to be had")


def test_an_error_shows_the_frames_of_the_script_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipec")
    pipe = pipec.compile(nn.Linear(2, 2), devices=1, loss_fn=failing)
    with pytest.raises(pipec.InputError, match="the loss is not to be had") as caught:
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    shown = traceback.format_exception(caught.value)
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    assert not any("torch/_dynamo" in line for line in shown)
    assert sum(each.count("\n") for each in shown) < 20
    logged = next(record for record in caplog.records if record.exc_info)
    assert logged.levelno == logging.DEBUG
