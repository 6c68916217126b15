"""A pipeline returns for a batch what the unsplit model returns, as it is then, or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward_modules import Pair
from constant_batch import constant_front_ends
from slow_params import slow_but
from torch import Tensor, nn

import pipec
from pipec.capture import tracer
from pipec.errors import InputError

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
    torch.testing.assert_close(pipec.compile(model, devices=2, microbatches=3)(x), expected)


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


@pytest.mark.slow
def test_a_step_keeps_logs_and_returns_the_output(tmp_path: Path) -> None:
    pair = Pair(Model(lambda y: {"y": y, "mean": y.mean(0)}), loss_and_logs, microbatches=3)
    x, target = torch.randn(2, ROWS, WIDTH)
    (loss, logs), output = pair.loss(x, target=target)
    loss.backward()
    for step in (pair.pipe.step, pair.pipe.eval_step):
        found = step(x, target=target, outputs=True)
        torch.testing.assert_close([*found, pair.pipe.logs], [loss, output, logs])
        assert list(pair.pipe.logs) == list(logs)
        pair.pipe._steps.logs = {}
    pair.check_gradients()
    pair.pipe.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    loaded.step(x, target=target)
    torch.testing.assert_close(loaded.logs, logs)


@pytest.mark.parametrize("weight", [None, "rows"])
def test_what_a_step_returns_besides_the_loss_has_no_gradient(weight: str | None) -> None:
    """The loss that a model returns is among its outputs once more, and others depend on parameters."""
    losses = Model(lambda y: {"loss": y.square().mean(), "y": y, "mean": y.mean()})
    pair, x = Pair(losses, devices=1, microbatch_weight=weight), torch.randn(ROWS, WIDTH)
    loss, output = pair.pipe.step(x, outputs=True)
    expected = pair.unsplit(x)
    expected["loss"].backward()
    torch.testing.assert_close([loss, output["y"]], [expected["loss"].detach(), expected["y"].detach()])
    torch.testing.assert_close(output["loss"], loss)
    pair.check_gradients()


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


class Gained(nn.Linear):
    """Multiplies by an attribute, and doubles its result where it finds that gradients are disabled."""

    def __init__(self, has_gradients: Callable[[Tensor], Any] = lambda x: True) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain, self.drop, self.has_gradients = 2.0, nn.Dropout(0.0), has_gradients

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        found = found if self.has_gradients(found) else found * 2
        return self.drop(found) * self.gain


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda model: setattr(model, "gain", 3.0),
    "a probability": lambda model: setattr(model.drop, "p", 1.0),
    "the mode": lambda model: model.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_evaluation_sees_what_changed_since_a_step_and_since_an_evaluation(name: str) -> None:
    pair, x = Pair(Gained(), nn.functional.mse_loss, devices=1), torch.randn(ROWS, WIDTH)
    pair.step(x, target=x)
    for change in (CHANGES[name], lambda model: setattr(model, "gain", 4.0)):
        change(pair.model)
        change(pair.unsplit)
        pair.evaluate(x, target=x)


@pytest.mark.parametrize(
    "has_gradients",
    [
        lambda x: torch.is_grad_enabled(),
        lambda x: x.requires_grad,
        lambda x: getattr(x, "".join(["requires_", "grad"])),
        lambda x: not x.is_leaf,
    ],
    ids=["is_grad_enabled", "requires_grad", "getattr", "is_leaf"],
)
def test_code_that_asks_for_gradients_finds_none_in_an_evaluation(has_gradients: Any) -> None:
    pair, x = Pair(Gained(has_gradients), nn.functional.mse_loss, devices=1), torch.randn(ROWS, WIDTH)
    pair.step(x, target=x)
    pair.evaluate(x, target=x)
