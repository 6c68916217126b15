"""The loss of a step is the loss of the batch, and so are its gradients, whatever the microbatches are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import bert, each, gpt2, t5
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import relative_error

import pipec
from pipec.capture import tracer
from pipec.errors import InputError

CLASSES, IGNORED, ROWS = 5, 3, 8
WEIGHTS = torch.tensor([0.2, 1.5, 0.7, 0.4, 1.1])

Loss = Callable[[Tensor, Tensor], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch() -> tuple[Tensor, Tensor]:
    """The first two of four microbatches have one target that counts; the second and third of eight none."""
    random = torch.Generator().manual_seed(1)
    target = torch.tensor([1, IGNORED, IGNORED, IGNORED, 2, 4, 0, 1])
    return torch.randn(ROWS, 4, generator=random), target


def masked(x: Tensor, y: Tensor) -> Tensor:
    mask = (y != IGNORED).float()
    return (F.cross_entropy(x, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def several_terms(x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(x, y, ignore_index=IGNORED)
    loss += 0.1 * x.abs().sum() + x.square().mean()
    return loss + 0.5


LOSSES: dict[str, Loss] = {
    "ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED),
    "class weights": nn.CrossEntropyLoss(WEIGHTS, ignore_index=IGNORED, label_smoothing=0.1),
    "masked mean": masked,
    "several terms": several_terms,
    "stacked rows": lambda x, y: torch.stack([x, x * x, x * 2]).sum((0, 2)).mean(),
}
"""Others are in ``batch_cases``."""


def check(loss_fn: Loss, microbatches: int, **options: Any) -> pipec.Pipeline:
    """A step and an evaluation have the loss of the unsplit model on the whole batch, and its gradients."""
    unsplit, trained, (x, y) = model(), model(), batch()
    expected = loss_fn(unsplit(x), y)
    expected.backward()
    pipe = pipec.compile(trained, devices=2, loss_fn=loss_fn, microbatches=microbatches, **options)
    assert relative_error(pipe.step(x, target=y), expected) < 1e-6
    for found, wanted in zip(trained.parameters(), unsplit.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 1e-6  # type: ignore[arg-type]
    assert relative_error(pipe.eval_step(x, target=y), expected) < 1e-6
    return pipe


@pytest.mark.parametrize("microbatches", [slow(1), slow(2), 3, slow(8)])
def test_a_loss_is_that_of_the_batch_for_any_microbatches(microbatches: int, said: list[str]) -> None:
    check(LOSSES["class weights"], microbatches)
    assert not said


@pytest.mark.parametrize("name", ["class weights", "several terms"])
def test_either_front_end_shows_how_a_loss_adds_up(name: str) -> None:
    with mock.patch.object(tracer, "FRONT_ENDS", {"make_fx": tracer.FRONT_ENDS["make_fx"]}):
        check(LOSSES[name], 4)


@pytest.mark.usefixtures("constant_batch")
@pytest.mark.parametrize("name", ["ignored", "class weights", "masked mean", "several terms", "stacked rows"])
def test_code_for_one_size_adds_up_counts_of_microbatches(name: str) -> None:
    check(LOSSES[name], 4)


def test_what_is_counted_of_the_batch_can_be_read() -> None:
    pipe = check(LOSSES["ignored"], 2)
    source = pipe.source(1)
    assert "def batch_counts(target):" in source
    assert "loss = nll_loss_forward_0 / to_copy" in source


class FixedRows(nn.Module):
    """It makes a constant of the batch, so that microbatches of other sizes are compiled apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            pass
        return self.layers(x)


@pytest.mark.slow
def test_a_count_over_microbatches_that_are_compiled_apart_is_refused() -> None:
    x, y = batch()
    pipe = pipec.compile(FixedRows(), devices=2, loss_fn=LOSSES["ignored"], microbatches=3)
    with pytest.raises(InputError, match="3 microbatches of 3 and 2 rows are compiled apart"):
        pipe.step(x, target=y)


def root(x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def test_a_loss_that_mixes_rows_is_computed_of_all_rows_or_on_request_of_microbatches(
    said: list[str],
) -> None:
    (x, y), net = batch(), model()
    expected = root(copy.deepcopy(net)(x), y).detach()
    pipe = pipec.compile(net, devices=2, loss_fn=root, microbatches=2)
    torch.testing.assert_close(pipe.step(x, target=y), expected)
    assert "sqrt" in next(stage.tail.location for stage in pipe.plan.stages if stage.tail)
    rows = pipec.compile(model(), devices=2, loss_fn=root, microbatches=2, microbatch_weight="rows")
    rows.step(x, target=y)
    assert not any(stage.tail for stage in rows.plan.stages)
    assert not said


def mean_of_microbatches(loss_fn: Loss, weights: list[float], sizes: list[int]) -> tuple[nn.Module, Tensor]:
    """The unsplit model after the mean of the microbatches' losses with these weights, and that mean."""
    unsplit, (x, y) = model(), batch()
    losses = [
        loss_fn(unsplit(rows), target) for rows, target in zip(x.split(sizes), y.split(sizes), strict=True)
    ]
    total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
    total.backward()
    return unsplit, total


def counted(x: Tensor, target: Tensor) -> Tensor:
    return (target != IGNORED).sum() + 1


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("rows", [3 / 8, 3 / 8, 2 / 8]), ("sum", [1, 1, 1]), (counted, [2 / 8, 3 / 8, 3 / 8])],
)
def test_the_user_says_how_losses_add_up(weight: Any, expected: list[float], tmp_path: Path) -> None:
    sizes, (x, y) = [3, 3, 2], batch()
    unsplit, total = mean_of_microbatches(root, expected, sizes)
    options = {"loss_fn": root, "microbatches": 3, "microbatch_weight": weight}
    pipe = pipec.compile(trained := model(), devices=2, **options)
    assert relative_error(pipe.step(x, target=y), total) < 1e-6
    for found, wanted in zip(trained.parameters(), unsplit.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 1e-6  # type: ignore[arg-type]
    pipe.save(tmp_path / "artifact", tensors=True)
    given = {"microbatch_weight": weight} if callable(weight) else {}
    loaded = pipec.load(tmp_path / "artifact", **given)
    assert relative_error(loaded.step(x, target=y), total) < 1e-6
    if given:
        with pytest.raises(
            InputError, match="compiled with a function as microbatch_weight; pass that to load"
        ):
            pipec.load(tmp_path / "artifact")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("mean", "microbatch_weight is 'mean'; expected one of 'rows', 'sum' or a function"),
        (lambda x, target: "much", "returned 'much' for microbatch 0; expected a finite number"),
        (lambda x, target: -1, "returned -1 for microbatch 0; expected a finite number"),
        (lambda x, target: 0, "returned 0 for every microbatch"),
    ],
)
def test_weights_that_are_none_are_refused(weight: Any, message: str) -> None:
    (x, y), options = batch(), {"loss_fn": masked, "microbatches": 2, "microbatch_weight": weight}
    with pytest.raises(InputError, match=message):
        pipec.compile(model(), devices=2, **options).step(x, target=y)


@pytest.mark.slow
@pytest.mark.parametrize("factory", each(gpt2, bert, t5))
def test_ragged_padding_makes_no_difference(factory: Any, tmp_path: Path) -> None:
    """Hugging Face's models, with rows of 1 to all tokens; also once saved and loaded."""
    made, inputs = factory()
    labels = inputs["labels"]
    lengths = torch.tensor([1, 2, 99, 3, 99, 5, 1, 4])[:, None]
    inputs = {**inputs, "labels": labels.masked_fill(torch.arange(labels.shape[1]) >= lengths, -100)}
    unsplit = copy.deepcopy(made)
    expected = unsplit(**inputs).loss
    expected.backward()
    total = torch.cat([x.grad.flatten() for x in unsplit.parameters()]).norm()  # type: ignore[union-attr]
    for microbatches in (2, 8):
        trained = copy.deepcopy(made)
        pipe = pipec.compile(trained, devices=2, microbatches=microbatches)
        assert relative_error(pipe.step(**inputs), expected) < 1e-6
        for found, wanted in zip(trained.parameters(), unsplit.parameters(), strict=True):
            error = (found.grad - wanted.grad).norm()  # type: ignore[operator]
            assert error < 1e-6 * max(wanted.grad.norm(), 1e-3 * total)  # type: ignore[union-attr]
    pipe.save(tmp_path / "artifact", tensors=True)
    assert relative_error(pipec.load(tmp_path / "artifact").step(**inputs), expected) < 1e-6
