"""What pipec does, on one tiny model: every schedule trains with the loss and gradients of eager torch."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec
from pipec.programs.verify import verify
from pipec.schedules import ASYNCHRONOUS_SCHEDULES, SCHEDULES, SEARCHED_SCHEDULES

NUM_MICROBATCHES = 4
X, Y = torch.randn(8, 8), torch.randn(8, 8)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def eager_step(model: nn.Module, num_microbatches: int) -> StepResult:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    sizes = [len(X) // num_microbatches] * num_microbatches
    return StepResult.of(unsplit_step(loss, {"x": X, "y": Y}, sizes, model), model)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SEARCHED_SCHEDULES])
def test_a_step_equals_eager_torch(schedule: str) -> None:
    model = tiny_model()
    expected = eager_step(copy.deepcopy(model), NUM_MICROBATCHES)
    options = {"schedule": schedule, "microbatches": NUM_MICROBATCHES}
    pipe = pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, **options)
    loss = pipe.step(X, target=Y)
    assert pipe.plan.schedule == schedule
    verify(pipe.plan, pipe.programs)
    assert_equal(StepResult.of(loss, model), expected)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS_SCHEDULES)
def test_one_batch_without_a_flush_equals_eager_torch(schedule: str) -> None:
    """With one mini-batch in flight no update is delayed."""
    model = tiny_model()
    reference = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, schedule=schedule, optimizer=SGD)
    loss = pipe.step(X, target=Y)
    expected = eager_step(reference, pipe.plan.num_microbatches)
    SGD(reference.parameters()).step()
    assert torch.equal(loss, expected.loss)
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
