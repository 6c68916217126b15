"""What pipec does, on one tiny model: every schedule trains with the loss and gradients of eager torch."""

import functools

import pytest
import torch
from torch import nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec
from pipec.programs.verify import verify
from pipec.schedules import ASYNCHRONOUS_SCHEDULES, SCHEDULES, SEARCHED_SCHEDULES

X, Y = torch.randn(8, 8), torch.randn(8, 8)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
mse = nn.functional.mse_loss


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES])
def test_a_step_equals_eager_torch(schedule: str) -> None:
    """Asynchronous schedules update in their programs. With one mini-batch in flight no update is late."""
    model, eager = tiny_model(), tiny_model()
    updates = schedule in ASYNCHRONOUS_SCHEDULES
    options = {"optimizer": SGD} if updates else {"microbatches": 4}
    pipe = pipec.compile(model, devices=2, loss_fn=mse, schedule=schedule, **options)
    loss = pipe.step(X, target=Y)
    assert pipe.plan.schedule == schedule
    verify(pipe.plan, pipe.programs)
    sizes = [len(X) // pipe.plan.num_microbatches] * pipe.plan.num_microbatches
    expected = unsplit_step(lambda x, y: mse(eager(x), y), {"x": X, "y": Y}, sizes, eager)
    if updates:
        SGD(eager.parameters()).step()
        eager.zero_grad()
    assert_equal(StepResult.of(loss, model), StepResult.of(expected, eager))
