"""Outputs and losses of a pipeline equal the unsplit model's on the whole batch, or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward_modules import Pair
from batch_cases import WIDTH, Returning
from slow_params import slow_but
from torch import Tensor, nn
from unsplit_reference import relative_error

import pipec
from pipec.errors import InputError, MixedRowsError

ROWS = 6

OF_ALL_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda y: y.amax(0),
    "sqrt": lambda y: (y.sum(1), y.square().mean().sqrt()),
    "softmax": lambda y: y.sum(0).softmax(0),
}
"""Outputs that are rows or sums of them are among ``batch_cases``."""


@pytest.mark.parametrize("call", slow_but(OF_ALL_ROWS, "softmax"))
def test_a_value_of_all_rows_together(call: str, request: pytest.FixtureRequest) -> None:
    """It is computed once, of all rows; a graph for one number of rows alone cannot do that."""
    x, model = torch.randn(ROWS, WIDTH), Returning(OF_ALL_ROWS[call])
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(pipec.compile(model, devices=2, microbatches=2)(x), expected)
    request.getfixturevalue("constant_batch")
    torch.testing.assert_close(pipec.compile(model, devices=2, microbatches=1)(x), expected)
    with pytest.raises(InputError, match=rf"of all rows together[\s\S]* {call} at test_outputs\.py:"):
        pipec.compile(model, devices=2, microbatches=2)(x)


def loss_and_logs(output: dict[str, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    wrong = (output["y"] - target).square()
    logs = {"rows": wrong.sum(1), "count": (output["y"] > 0).sum(), "loss": wrong.mean()}
    return wrong.mean() + output["y"].abs().sum() / 7, logs


def test_a_step_and_an_evaluation_keep_logs_and_return_the_output(tmp_path: Path) -> None:
    pair = Pair(Returning(lambda y: {"y": y, "mean": y.mean(0)}), loss_and_logs, microbatches=3)
    for number, step in enumerate((pair.pipe.step, pair.pipe.eval_step)):
        x, target = torch.randn(2, ROWS + number, WIDTH)
        (loss, logs), output = pair.loss(x, target=target)
        found = step(x, target=target, outputs=True)
        torch.testing.assert_close([*found, pair.pipe.logs], [loss.detach(), output, logs])
        assert list(pair.pipe.logs) == list(logs)
    pair.pipe.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    loaded.step(x, target=target)
    torch.testing.assert_close(loaded.logs, logs)


@pytest.mark.parametrize("weight", [None, "rows"])
def test_what_a_step_returns_besides_the_loss_has_no_gradient(weight: str | None) -> None:
    """The loss that a model returns is among its outputs once more, and others depend on parameters."""
    losses = Returning(lambda y: {"loss": y.square().mean(), "y": y, "mean": y.mean()})
    pair, x = Pair(losses, devices=1, microbatch_weight=weight), torch.randn(ROWS, WIDTH)
    loss, output = pair.pipe.step(x, outputs=True)
    expected = pair.unsplit(x)
    expected["loss"].backward()
    torch.testing.assert_close([loss, output["y"]], [expected["loss"].detach(), expected["y"].detach()])
    torch.testing.assert_close(output["loss"], loss)
    pair.check_gradients()


def test_outputs_of_all_rows_are_refused_also_where_the_user_says_how_losses_add_up() -> None:
    centred = Returning(lambda y: {"y": y - y.mean(0), "loss": y.square().mean()})
    pipe = pipec.compile(centred, 1, microbatches=2, microbatch_weight="rows")
    with pytest.raises(MixedRowsError, match="all rows together"):
        pipe.step(torch.randn(ROWS, WIDTH), outputs=True)


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        (lambda y: {"size": 3.0}, r"a float as logs\['size'\]; expected \(loss, logs\)"),
        (lambda y: [y.sum()], r"expected \(loss, logs\), where logs is a dict"),
    ],
)
def test_logs_that_cannot_be_kept_are_refused(logs: Any, message: str) -> None:
    x, model = torch.randn(ROWS, WIDTH), Returning(lambda y: y)
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


# losses of microbatches that the user says how to add up


CLASSES, IGNORED = 5, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=random), torch.tensor([1, *[IGNORED] * 3, 2, 4, 0, 1])


def root(x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def counted(x: Tensor, target: Tensor) -> Tensor:
    return (target != IGNORED).sum() + 1


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("rows", [3 / 8, 3 / 8, 2 / 8]), ("sum", [1, 1, 1]), (counted, [2 / 8, 3 / 8, 3 / 8])],
)
def test_the_user_says_how_losses_add_up(
    weight: Any, expected: list[float], tmp_path: Path, said: list[str]
) -> None:
    sizes, (x, y) = [3, 3, 2], batch()
    pair = Pair(model(), root, microbatches=3, microbatch_weight=weight)
    parts = zip(expected, x.split(sizes), y.split(sizes), strict=True)
    total = torch.stack([share * root(pair.unsplit(rows), target) for share, rows, target in parts]).sum()
    total.backward()
    assert relative_error(pair.pipe.step(x, target=y), total) < 1e-6
    pair.check_gradients()
    assert not any(stage.tail for stage in pair.pipe.plan.stages)
    assert weight != "rows" or not said
    pair.pipe.save(tmp_path / "artifact", tensors=True)
    given = {"microbatch_weight": weight} if callable(weight) else {}
    loaded = pipec.load(tmp_path / "artifact", **given)
    assert relative_error(loaded.step(x, target=y), total) < 1e-6
    if given:
        with pytest.raises(InputError, match="with a function as microbatch_weight; pass that to load"):
            pipec.load(tmp_path / "artifact")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("mean", "microbatch_weight is 'mean'; expected one of"),
        (lambda x, target: "much", "returned 'much' for microbatch 0; expected a finite number"),
        (lambda x, target: -1, "returned -1 for microbatch 0; expected a finite number"),
        (lambda x, target: 0, "returned 0 for every microbatch"),
    ],
)
def test_weights_that_are_none_are_refused(weight: Any, message: str) -> None:
    x, y = batch()
    options = {"loss_fn": root, "microbatches": 2, "microbatch_weight": weight}
    with pytest.raises(InputError, match=message):
        pipec.compile(model(), devices=2, **options).step(x, target=y)
