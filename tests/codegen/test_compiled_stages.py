"""Generated functions are plain enough that ``torch.compile`` takes each as one graph."""

import types

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.artifact.artifact import load_stage_module
from pipec.runtime.step import execution

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)
FUNCTIONS = ("forward", "recompute", "backward", "backward_input", "backward_weight")


def compiled_module(stage: int, source: str) -> types.ModuleType:
    """The module with functions that break if they are more than one graph."""
    module = load_stage_module(stage, source)
    for name in FUNCTIONS:
        if hasattr(module, name):
            setattr(module, name, torch.compile(getattr(module, name), fullgraph=True, backend="eager"))
    return module


def trained(schedule: str, recompute: str) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    pipe = pipec.compile(
        model,
        ["cpu"] * 2,
        schedule=schedule,
        recompute=recompute,
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
    )
    return pipe.step(X, target=Y), [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
def test_each_function_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They return dicts and empty the lists they are given, and still do so when they are compiled."""
    plain = trained("zb-h1", "full")
    monkeypatch.setattr(execution, "load_stage_module", compiled_module)
    torch.testing.assert_close(trained("zb-h1", "full"), plain, rtol=0, atol=0)
