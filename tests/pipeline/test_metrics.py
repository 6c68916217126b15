"""What loggers get of a pipeline."""

import torch
from torch import nn

import pipec

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def made() -> pipec.Pipeline:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    return pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=4, on_nan="skip")


def test_metrics_are_those_of_the_plan_and_of_the_steps() -> None:
    pipe, target = made(), torch.ones(8, 3)
    assert pipec.metrics(pipe) == {"steps": 0, "skipped_steps": 0}
    with pipe.trace() as trace:
        pipe.step(ROWS, target=target)
        pipe.step(ROWS * torch.inf, target=target)
    found = pipec.metrics(pipe)
    sent = sum(value.numel() for value in (torch.empty(8, 6), torch.empty(8, 6))) * 4
    losses = 4 * 4  # of each microbatch, to rank 0
    assert found["steps"] == 2
    assert found["skipped_steps"] == 1
    assert sent <= found["bytes_sent"] <= sent + 2 * losses
    assert found["predicted_seconds"] == pipe.simulate().makespan
    assert found["predicted_idle_share"] == pipe.simulate().bubble_rate
    assert [found[f"peak_bytes/rank_{rank}"] for rank in (0, 1)] == [x.peak_bytes for x in pipe.memory()]
    assert 0 < found["step_seconds"] < 60
    traced = pipec.metrics(pipe, trace)
    assert traced["idle_share"] == trace.median_step().bubble_rate
    assert traced["step_seconds"] == trace.median_step().makespan
