"""What a script sees of an error: its own frames, and nothing of what pipec and torch called."""

import logging
import traceback

import pytest
import torch
from torch import nn

import pipec


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is not to be had")


def test_an_error_shows_the_frames_of_the_script_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipec")
    pipe = pipec.compile(nn.Linear(2, 2), devices=1, loss_fn=failing)
    with pytest.raises(pipec.InputError, match="the loss is not to be had") as caught:
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    shown = traceback.format_exception(caught.value)
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    assert not any("torch/_dynamo" in line for line in shown)
    assert sum(each.count("\n") for each in shown) < 20
    logged = next(record for record in caplog.records if record.exc_info)
    assert logged.levelno == logging.DEBUG
