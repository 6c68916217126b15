"""The loss of a step is the loss of the batch, and so are its gradients, whatever the microbatches are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair
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


def check(loss_fn: Loss, microbatches: int) -> pipec.Pipeline:
    """A step and an evaluation have the loss of the unsplit model on the whole batch, and its gradients."""
    pair, (x, y) = Pair(model(), loss_fn, microbatches=microbatches), batch()
    pair.step(x, target=y)
    pair.evaluate(x, target=y)
    return pair.pipe


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("ignored", 2), *(slow("class weights", n) for n in (1, 2, 8)), ("class weights", 3)],
)
def test_a_loss_is_that_of_the_batch_for_any_microbatches(
    name: str, microbatches: int, said: list[str]
) -> None:
    pipe = check(LOSSES[name], microbatches)
    assert not said
    assert name != "ignored" or "def batch_counts(target):" in pipe.source(1), "which can be read"


@pytest.mark.parametrize("name", ["class weights", "several terms"])
def test_either_front_end_shows_how_a_loss_adds_up(name: str) -> None:
    with mock.patch.object(tracer, "FRONT_ENDS", {"make_fx": tracer.FRONT_ENDS["make_fx"]}):
        check(LOSSES[name], 4)


@pytest.mark.usefixtures("constant_batch")
@pytest.mark.parametrize("name", LOSSES)
def test_code_for_one_size_adds_up_counts_of_microbatches(name: str) -> None:
    check(LOSSES[name], 4)


def root(x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def test_a_loss_that_mixes_rows_is_computed_of_all_rows(said: list[str]) -> None:
    pipe = check(root, 2)
    assert "sqrt" in next(stage.tail.location for stage in pipe.plan.stages if stage.tail)
    assert not said


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
    for microbatches in (2, 8):
        pair = Pair(copy.deepcopy(made), microbatches=microbatches)
        expected = pair.step(error=1e-6, **inputs)
    pair.pipe.save(tmp_path / "artifact", tensors=True)
    assert relative_error(pipec.load(tmp_path / "artifact").step(**inputs), expected) < 1e-6
