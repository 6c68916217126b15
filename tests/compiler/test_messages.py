"""What a compilation says: why it was made, and where results differ from the unsplit model's."""

import pytest
import torch
from torch import nn

import pipec


@pytest.mark.slow
def test_a_switch_to_eval_mode_is_named(said: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    pipe = pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, microbatches=1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    pipe.step(x, target=y)
    assert not said
    pipe.eval()
    pipe.step(x, target=y)
    model[1].train()
    pipe.step(x, target=y)
    assert said == [
        "recompiling: training of model changed from True to False, and 4 more",
        "recompiling: training of model.1 changed from False to True",
    ]


def test_batch_norms_that_see_a_microbatch_alone_are_warned_of_once(said: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    pipe = pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, microbatches=2)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    for _ in range(2):
        pipe.step(x, target=y)
    (warning,) = said
    assert "batch norms (1 of them) take their statistics of each microbatch" in warning
    assert "GroupNorm" in warning
