"""What a pipeline returns for a batch is what the unsplit model returns, or it is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from constant_batch import constant_front_ends
from slow_params import slow_but
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec
from pipec.capture import tracer
from pipec.errors import InputError
from pipec.runtime.absent_tensors import is_absent

ROWS, WIDTH = 6, 4


class Model(nn.Module):
    def __init__(self, finish: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.finish = finish

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.last(torch.tanh(self.first(x))))


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: y.exp(),
    "sum": lambda y: y.sum(0),
    "count": lambda y: (y > 0).sum(),
    "mean": lambda y: y.mean(0),
    "sum over the rows": lambda y: y.sum(0) / len(y),
    "sums of sums": lambda y: torch.stack([y.sum(), (2 * y).sum()]).sum(),
    "last": lambda y: y[:, -1],
}


@pytest.mark.parametrize("symbolic", [True, False])
def test_outputs_are_those_of_the_unsplit_model(symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(y: Tensor) -> dict[str, Tensor]:
        return {
            name: output(y) for name, output in OUTPUTS.items() if symbolic or name != "sum over the rows"
        }

    monkeypatch.setattr(tracer, "FRONT_ENDS", tracer.FRONT_ENDS if symbolic else constant_front_ends())

    x, model = torch.randn(ROWS, WIDTH), Model(finish)
    with torch.no_grad():
        expected = model(x)
    found = pipec.compile(model, devices=2, microbatches=3)(x)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.allclose(found[name], expected[name], atol=1e-6), name


OF_ALL_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda y: y.amax(0),
    "sqrt": lambda y: (y.sum(1), y.square().mean().sqrt()),
    "softmax": lambda y: y.sum(0).softmax(0),
}


@pytest.mark.parametrize("call", slow_but(OF_ALL_ROWS, "softmax"))
def test_a_value_of_all_rows_together(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed once, of all rows; a graph for one number of rows alone cannot do that."""
    x, model = torch.randn(ROWS, WIDTH), Model(OF_ALL_ROWS[call])
    with torch.no_grad():
        expected = model(x)
    for microbatches, symbolic in ((2, True), (1, False)):
        monkeypatch.setattr(tracer, "FRONT_ENDS", tracer.FRONT_ENDS if symbolic else constant_front_ends())
        found = pipec.compile(model, devices=2, microbatches=microbatches)(x)
        torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match=rf"of all rows together[\s\S]* {call} at test_outputs\.py:"):
        pipec.compile(model, devices=2, microbatches=2)(x)


def loss_and_logs(output: dict[str, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    wrong = (output["y"] - target).square()
    logs = {
        "rows": wrong.sum(1),
        "largest": (output["y"] > 0).sum(),
        "loss": wrong.mean(),
        "positive": (target > 0).sum(),
    }
    return wrong.mean() + output["y"].abs().sum() / 7, logs


def make() -> tuple[Model, Tensor, Tensor]:
    model, random = Model(lambda y: {"y": y, "mean": y.mean(0)}), torch.Generator().manual_seed(1)
    return model, torch.randn(ROWS, WIDTH, generator=random), torch.randn(ROWS, WIDTH, generator=random)


def check_step(pipe: Any, trained: nn.Module) -> None:
    """A step has the loss, the logs, the output and the gradients of the unsplit model."""
    unsplit, x, target = make()
    output = unsplit(x)
    loss, logs = loss_and_logs(output, target)
    loss.backward()
    for step in (pipe.step, pipe.eval_step):
        found, found_output = step(x, target=target, outputs=True)
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(found_output, {name: value.detach() for name, value in output.items()})
        torch.testing.assert_close(pipe.logs, {name: value.detach() for name, value in logs.items()})
        pipe._steps.logs = {}
    for mine, other in zip(trained.parameters(), unsplit.parameters(), strict=True):
        if not is_absent(mine):  # it is of a stage of this process
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.slow
def test_a_step_keeps_logs_and_returns_the_output(tmp_path: Path) -> None:
    model, x, target = make()
    pipe = pipec.compile(model, devices=2, microbatches=3, loss_fn=loss_and_logs)
    check_step(pipe, model)
    pipe.step(x, target=target)
    expected = pipe.logs
    assert list(expected) == ["rows", "largest", "loss", "positive"]
    pipe.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    loaded.step(x, target=target)
    torch.testing.assert_close(loaded.logs, expected)


@pytest.mark.parametrize("weight", [None, "rows"])
def test_what_a_step_returns_besides_the_loss_has_no_gradient(weight: str | None) -> None:
    """The loss that a model returns is among its outputs once more, and others depend on parameters."""
    losses = Model(lambda y: {"loss": y.square().mean(), "y": y, "mean": y.mean()})
    x = torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(losses)
    pipe = pipec.compile(losses, devices=1, microbatches=2, microbatch_weight=weight)
    loss, output = pipe.step(x, outputs=True)
    expected = plain(x)
    expected["loss"].backward()
    torch.testing.assert_close([loss, output["y"]], [expected["loss"].detach(), expected["y"].detach()])
    torch.testing.assert_close(output["loss"], loss)
    for mine, other in zip(losses.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.slow
def test_every_rank_has_the_logs_and_the_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pipec\n"
        "from tests.capture import test_outputs\n"
        "model, _, _ = test_outputs.make()\n"
        "pipe = pipec.compile(model, 2, microbatches=3, loss_fn=test_outputs.loss_and_logs)\n"
        "test_outputs.check_step(pipe, model)\n"
        "print('checked')\n"
    )
    assert run_ranks(script, 2, tmp_path) == ["checked\n"] * 2


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        (lambda y: {"size": 3.0}, r"a float as logs\['size'\]; expected \(loss, logs\)"),
        (lambda y: [y.sum()], r"expected \(loss, logs\), where logs is a dict"),
    ],
)
def test_logs_that_cannot_be_kept_are_refused(logs: Any, message: str) -> None:
    x, model = torch.randn(ROWS, WIDTH), Model(lambda y: y)
    pipe = pipec.compile(model, 2, microbatches=2, loss_fn=lambda y, target: (y.mean(), logs(y)))
    with pytest.raises(InputError, match=message):
        pipe.step(x, target=x)
