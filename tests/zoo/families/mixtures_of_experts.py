"""Mixtures of experts, of the transformers library and written out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import linears, model, perceptron
from zoo.model_case import Case, batch, integers, normal
from zoo.tiny_transformers import decoder, transformer, translated

WIDTH = 32


def experts() -> nn.ModuleList:
    return nn.ModuleList(perceptron(WIDTH, WIDTH, WIDTH, activation=nn.GELU) for _ in range(4))


@model(dense=bool, gate=lambda dense: nn.Linear(WIDTH, 4), experts=lambda dense: experts())
def best_two(self, x: Tensor) -> Tensor:
    """Four experts, the best two of which count for a row. ``dense`` asks all of them."""
    scores, chosen = self.gate(x).softmax(-1).topk(2)
    result = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        share = torch.where(chosen == index, scores, 0.0).sum(-1)
        if self.dense:
            result = result + share[..., None] * expert(x)
        else:
            rows = share.nonzero().flatten()
            result = result.index_add(0, rows, share[rows][:, None] * expert(x[rows]))
    return x + result


def mixture(dense: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), best_two(dense), best_two(dense), nn.Linear(WIDTH, 3))


@model(
    embed=lambda: nn.Linear(8, WIDTH),
    slots=lambda: nn.Parameter(torch.randn(WIDTH, 4, 3) / 8),
    experts=lambda: linears(4, WIDTH, WIDTH),
    head=lambda: nn.Linear(WIDTH, 3),
)
def soft_mixture(self, x: Tensor) -> Tensor:
    """Every slot of an expert is a weighted mean of all tokens (Puigcerver et al., 2023)."""
    hidden = self.embed(x)
    scores = torch.einsum("btd,dns->btns", hidden, self.slots)
    slots = torch.einsum("btns,btd->bnsd", scores.softmax(1), hidden)
    done = torch.stack([expert(slots[:, k]).relu() for k, expert in enumerate(self.experts)], 1)
    combine = scores.flatten(2).softmax(-1).view_as(scores)
    return self.head(torch.einsum("btns,bnsd->btd", combine, done).mean(1))


VECTORS = batch(input=normal(8), target=integers(3))
SWITCH = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}

CASES = (
    decoder("MixtralForCausalLM"),
    decoder("Qwen2MoeForCausalLM"),
    decoder("Qwen3MoeForCausalLM"),
    decoder("OlmoeForCausalLM", pad_token_id=0),
    decoder("DeepseekV3ForCausalLM", q_lora_rank=None, num_key_value_heads=4),
    decoder("GptOssForCausalLM", pad_token_id=0),
    decoder("JetMoeForCausalLM", refused="a value becomes a number or a size"),
    transformer(
        "SwitchTransformersForConditionalGeneration",
        translated,
        refused="a branch on values",
        by_microbatch=True,
        **SWITCH,
    ),
    Case("Dense experts", lambda: mixture(dense=True), VECTORS, F.cross_entropy),
    Case("Sparse experts", lambda: mixture(dense=False), VECTORS, F.cross_entropy),
    Case("Soft mixture", soft_mixture, batch(x=normal(6, 8), target=integers(3)), F.cross_entropy),
)
