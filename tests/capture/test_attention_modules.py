"""Attention modules of torch evaluate by the calls that they make in training, not by one fused call."""

from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn

import pipec

ROWS, LENGTH, WIDTH = 6, 5, 8
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(LENGTH) >= torch.tensor([5, 3, 1, 4, 2, 5])[:, None]
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options) for _ in range(2)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, padding)
        return x


class Attention(nn.Module):
    def __init__(self, average: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.average = nn.Linear(WIDTH, WIDTH), average
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y, weights = self.attention(x, x, x, padding, average_attn_weights=self.average)
        return self.last(y), weights


def distance(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output if isinstance(output, Tensor) else output[0], target)


@pytest.mark.parametrize(
    ("options", "masks"),
    [
        slow({}, {"padding": PADDING, "mask": CAUSAL}),
        slow({"norm_first": True, "activation": "gelu"}, {"padding": PADDING}),
        slow({}, {"mask": CAUSAL}),
        slow({"layer_norm_eps": 1e-2}, {}),
    ],
)
def test_layers_evaluate_on_the_stages_of_training(options: dict[str, Any], masks: dict[str, Tensor]) -> None:
    """The cuts are inside layers: a stage has fewer weights than one."""
    model = Layers(**options)
    batched = {"x": 0, "mask": None, "padding": 0}
    pipe = pipec.compile(
        model, 4, loss_fn=distance, microbatches=3, batched={name: batched[name] for name in ("x", *masks)}
    )
    pipe.step(x=X, **masks, target=X)
    model.eval()
    with torch.no_grad():
        expected = model(X, **masks)
        torch.testing.assert_close(pipe(x=X, **masks), expected)
        torch.testing.assert_close(pipe.eval_step(x=X, **masks, target=X), distance(expected, X))


@pytest.mark.parametrize("average", [True, slow(False)])
def test_attention_returns_its_weights(average: bool) -> None:
    model = Attention(average)
    pipe = pipec.compile(model, 2, loss_fn=distance, microbatches=2)
    pipe.step(X, PADDING, target=X)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe(X, PADDING), model(X, PADDING))
