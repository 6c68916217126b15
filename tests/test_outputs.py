"""What a pipeline returns for a batch is what the unsplit model returns, or it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.errors import InputError

ROWS, WIDTH = 6, 4


class Model(nn.Module):
    def __init__(self, finish: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.finish = finish

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.last(torch.tanh(self.first(x))))


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: y.exp(),
    "sum": lambda y: y.sum(0),
    "count": lambda y: (y > 0).sum(),
    "mean": lambda y: y.mean(0),
    "sum over the rows": lambda y: y.sum(0) / len(y),
    "sums of sums": lambda y: torch.stack([y.sum(), (2 * y).sum()]).sum(),
    "last": lambda y: y[:, -1],
}


@pytest.mark.parametrize("dynamic", [True, False])
def test_outputs_are_those_of_the_unsplit_model(dynamic: bool) -> None:
    def finish(y: Tensor) -> dict[str, Tensor]:
        return {name: output(y) for name, output in OUTPUTS.items() if dynamic or name != "sum over the rows"}

    x, model = torch.randn(ROWS, WIDTH), Model(finish)
    with torch.no_grad():
        expected = model(x)
    found = pipec.compile(model, devices=2, microbatches=3, dynamic=dynamic)(x)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.allclose(found[name], expected[name], atol=1e-6), name


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda y: y.amax(0),
    "sqrt": lambda y: (y.sum(1), y.square().mean().sqrt()),
    "softmax": lambda y: y.sum(0).softmax(0),
}


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_value_of_all_rows_together_is_refused(call: str, dynamic: bool) -> None:
    x, model = torch.randn(ROWS, WIDTH), Model(REFUSED[call])
    with pytest.raises(InputError, match=f"of all rows together.*: see {call} at test_outputs.py:"):
        pipec.compile(model, devices=2, microbatches=2, dynamic=dynamic)(x)
    with torch.no_grad():
        expected = model(x)
    found = pipec.compile(model, devices=2, microbatches=1, dynamic=dynamic)(x)
    torch.testing.assert_close(found, expected)
