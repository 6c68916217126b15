"""State-space models and linear attention, of the transformers library and written out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import causal, tiny


def model(name: str, refused: str | None = None, **sizes: Any) -> Case:
    return Case(name, tiny(name, **sizes), causal, refused=refused)


class LongConvolution(nn.Module):
    """A diagonal state space, applied as a convolution by Fourier transforms (Gu et al., S4D, 2022)."""

    def __init__(self, width: int = 32, states: int = 4) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.rand(width) - 4)
        self.decay = nn.Parameter(torch.rand(width, states))
        self.frequency = nn.Parameter(torch.arange(states).repeat(width, 1) * 3.0)
        self.output = nn.Parameter(torch.randn(width, states, 2))
        self.skip = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        rate = torch.complex(-self.decay.exp(), self.frequency) * self.step.exp()[:, None]
        powers = (rate[..., None] * torch.arange(length)).exp()
        kernel = torch.einsum("dn,dnl->dl", torch.view_as_complex(self.output), powers).real
        spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length] + x * self.skip[:, None]


class S4D(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(LongConvolution(width) for _ in range(3))
        self.mixers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            mixed = mixer(F.gelu(layer(hidden.mT).mT))
            hidden = hidden + F.glu(mixed)
        return self.head(hidden.mean(1))


class Retention(nn.Module):
    """Linear attention with a decay over time, in its parallel form (Sun et al., 2023)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(4, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(heads, width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        time = torch.arange(x.shape[1])
        rates = 1 - 2.0 ** (-5 - torch.arange(self.heads))
        distance = (time[:, None] - time).clamp(min=0)
        decay = (rates[:, None, None] ** distance) * (time[:, None] >= time)
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            q, k, v = qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = (q @ k.mT * decay) @ v
            flat = mixed.transpose(1, 2).flatten(2)
            hidden = hidden + norm(flat.flatten(0, 1)).view_as(flat)
        return self.head(hidden.mean(1))


def series(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 12, 4), "target": torch.randint(3, (rows,))}


CASES = (
    model("MambaForCausalLM", state_size=4, time_step_rank=4, expand=1),
    model("FalconMambaForCausalLM", state_size=4, time_step_rank=4, expand=1),
    model("Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=16, expand=2, chunk_size=4),
    model("RwkvForCausalLM", attention_hidden_size=32),
    model(
        "BambaForCausalLM",
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_chunk_size=4,
    ),
    model("RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=32, attention_window_size=8),
    model(
        "Qwen3NextForCausalLM",
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    Case("S4D", S4D, series, F.cross_entropy),
    Case("Retention", Retention, series, F.cross_entropy),
)
