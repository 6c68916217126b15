"""Attention in evaluations, where eager torch has one operator that reads all weights, and without caches."""

import copy
from typing import Any

import pytest
import torch
from huggingface_models import each, gpt2, llama, t5
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.errors import InputError

ROWS, LENGTH, WIDTH = 6, 5, 8
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(LENGTH) >= torch.tensor([5, 3, 1, 4, 2, 5])[:, None]
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, padding)
        return x


class Attention(nn.Module):
    """Returns its weights, too."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.first, self.last, self.average = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), average
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y, weights = self.attention(x, x, x, padding, average_attn_weights=self.average)
        return self.last(y), weights


def distance(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output if isinstance(output, Tensor) else output[0], target)


@pytest.mark.parametrize(
    ("make", "masks", "devices"),
    [
        slow(Layers, {"padding": PADDING, "mask": CAUSAL}, 4),
        slow(lambda: Layers(norm_first=True, activation="gelu"), {"padding": PADDING}, 4),
        slow(Layers, {"mask": CAUSAL}, 4),
        slow(lambda: Layers(layer_norm_eps=1e-2), {}, 4),
        (lambda: Attention(True), {"padding": PADDING}, 2),
        slow(lambda: Attention(False), {"padding": PADDING}, 2),
    ],
)
def test_modules_evaluate_on_the_stages_of_training(
    make: Any, masks: dict[str, Tensor], devices: int
) -> None:
    """The cuts of four stages are inside layers: a stage has fewer weights than one."""
    torch.manual_seed(0)
    model = make()
    batched = {"x": 0} | {name: None if name == "mask" else 0 for name in masks}
    pipe = pipec.compile(model, devices, loss_fn=distance, microbatches=3, batched=batched)
    pipe.step(x=X, **masks, target=X)
    model.eval()
    with torch.no_grad():
        expected = model(X, **masks)
        torch.testing.assert_close(pipe(x=X, **masks), expected)
        torch.testing.assert_close(pipe.eval_step(x=X, **masks, target=X), distance(expected, X))


@pytest.mark.slow
@pytest.mark.parametrize("factory", each(gpt2, llama, t5))
def test_no_pipeline_makes_a_cache_of_keys_and_values(factory: Any) -> None:
    """Caches of Hugging Face's models are for generating text: training copies nothing into one."""
    made, inputs = factory()
    unsplit = copy.deepcopy(made).eval()
    pipe = pipec.compile(made.eval(), devices=2, microbatches=2)
    found = pipe(**inputs)
    with torch.no_grad():
        expected = unsplit(**inputs, use_cache=False)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    assert made.config.use_cache
    with pytest.raises(InputError, match="use_cache=True asks for a cache"):
        pipe(**inputs, use_cache=True)
    if factory is gpt2:
        pipe.train().prepare(**inputs)
        for stage in range(2):
            forward = pipe.source(stage).partition("def forward(")[2].partition("def backward(")[0]
            assert "torch.cat(" not in forward
