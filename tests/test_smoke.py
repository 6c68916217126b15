"""What pipec does, on one tiny model: every schedule trains with the loss and gradients of eager torch."""

import copy

import pytest
import torch
from torch import nn
from unsplit_reference import StepResult, assert_equal

import pipec
from pipec.programs.verify import verify_plan
from pipec.schedules import SCHEDULES, SEARCHED_SCHEDULES

NUM_MICROBATCHES = 8
X, Y = torch.randn(16, 8), torch.randn(16, 8)


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())))


def eager_step(model: nn.Module) -> StepResult:
    """The same microbatches one after another, their gradients added up."""
    total = torch.zeros(())
    for x, y in zip(X.chunk(NUM_MICROBATCHES), Y.chunk(NUM_MICROBATCHES), strict=True):
        loss = nn.functional.mse_loss(model(x), y) / NUM_MICROBATCHES
        loss.backward()
        total += loss.detach()
    return StepResult.of(total, model)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SEARCHED_SCHEDULES])
def test_a_step_equals_eager_torch(schedule: str, devices: int) -> None:
    model = tiny_model()
    expected = eager_step(copy.deepcopy(model))
    pipe = pipec.compile(
        model, devices, loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=NUM_MICROBATCHES
    )
    loss = pipe.step(X, target=Y)
    assert pipe.plan.schedule == schedule
    verify_plan(pipe.plan, pipe.programs)
    assert_equal(StepResult.of(loss, model), expected)
