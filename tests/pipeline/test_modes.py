"""Plain forward returns what the unsplit model returns, in its class; each step drops other values."""

import copy
from typing import Any

import pytest
import torch
from compile_variants import SIZES, TrainingRun, Variant, captured, compiled, pipeline
from huggingface_models import Factory, bert, each, gpt2, gpt2_with_dropout, resnet
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from unsplit_reference import Inputs, unsplit_output

import pipec

pytestmark = pytest.mark.slow

MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def switched(factory: Factory, training: bool) -> tuple[Any, nn.Module, nn.Module, Inputs]:
    """A pipeline and the model it trains, a copy of that model to compare with, and a call without caches."""
    pipe, trained, model = pipeline(factory)
    pipe.train(training)
    inputs = {**model.inputs, "use_cache": False} if factory is gpt2 else model.inputs
    return pipe, trained, copy.deepcopy(trained).train(training), inputs


def assert_same_buffers(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.buffers(), other.buffers()))


@MODES
@pytest.mark.parametrize("factory", each(gpt2, resnet, bert))
def test_plain_forward_returns_what_the_unsplit_model_returns(factory: Factory, training: bool) -> None:
    pipe, trained, unsplit, inputs = switched(factory, training)
    found, expected = pipe(**inputs), unsplit_output(unsplit, inputs, SIZES)
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, pytree.tree_leaves(found), pytree.tree_leaves(expected)))
    assert_same_buffers(trained, unsplit)


def test_every_step_drops_something_else() -> None:
    model = captured(gpt2_with_dropout)
    run = TrainingRun(compiled(model, Variant(2, "1f1b", "none")), model.model)
    assert run.step(model.inputs) != run.step(model.inputs)


def test_what_inference_mode_places_can_be_trained() -> None:
    pipe, _, unsplit, inputs = switched(gpt2, training=False)
    with torch.inference_mode():
        copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        found = pipe(**copies)
    expected = unsplit(**inputs)
    assert found["loss"].item() == pytest.approx(expected.loss.item(), rel=1e-6)
    pipe.train()
    assert pipe.step(**inputs).item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert not any(each.is_inference() for each in pipe.parameters())


def test_microbatches_drop_other_values() -> None:
    pipe = pipec.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), devices=2, microbatches=2)
    first, second = pipe(torch.ones(8, 8)).chunk(2)
    assert not torch.equal(first == 0, second == 0)
