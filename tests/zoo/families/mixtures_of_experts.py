"""Mixtures of experts, of the transformers library and written out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import causal, tiny, translated


def mixture(name: str, refused: str | None = None, **sizes: Any) -> Case:
    return Case(name, tiny(name, **sizes), causal, refused=refused)


class Experts(nn.Module):
    """Four experts, the best two of which count for a row. ``dense`` asks all of them."""

    def __init__(self, dense: bool, width: int = 32) -> None:
        super().__init__()
        self.dense = dense
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
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


class Mixture(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), Experts(dense), Experts(dense), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SoftMixture(nn.Module):
    """Every slot of an expert is a weighted mean of all tokens (Puigcerver et al., 2023)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.slots = nn.Parameter(torch.randn(width, 4, 3) / 8)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        scores = torch.einsum("btd,dns->btns", hidden, self.slots)
        slots = torch.einsum("btns,btd->bnsd", scores.softmax(1), hidden)
        done = torch.stack([expert(slots[:, k]).relu() for k, expert in enumerate(self.experts)], 1)
        combine = scores.flatten(2).softmax(-1).view_as(scores)
        return self.head(torch.einsum("btns,bnsd->btd", combine, done).mean(1))


def vectors(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 8), "target": torch.randint(3, (rows,))}


def tokens(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 6, 8), "target": torch.randint(3, (rows,))}


CASES = (
    mixture("MixtralForCausalLM"),
    mixture("Qwen2MoeForCausalLM"),
    mixture("Qwen3MoeForCausalLM"),
    mixture("OlmoeForCausalLM", pad_token_id=0),
    mixture("DeepseekV3ForCausalLM", q_lora_rank=None, num_key_value_heads=4),
    mixture("GptOssForCausalLM", pad_token_id=0),
    mixture("JetMoeForCausalLM", "a value becomes a number or a size"),
    Case(
        "SwitchTransformersForConditionalGeneration",
        tiny(
            "SwitchTransformersForConditionalGeneration",
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            decoder_start_token_id=0,
        ),
        translated,
        refused="a branch on values",
        by_microbatch=True,
    ),
    Case("Dense experts", lambda: Mixture(dense=True), vectors, F.cross_entropy),
    Case(
        "Sparse experts",
        lambda: Mixture(dense=False),
        vectors,
        F.cross_entropy,
    ),
    Case("Soft mixture", SoftMixture, tokens, F.cross_entropy),
)
