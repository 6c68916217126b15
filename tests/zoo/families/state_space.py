"""State-space models and linear attention, of the transformers library and written out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Apply, Residual, linears, model, turned
from zoo.model_case import Case, batch, integers, normal
from zoo.tiny_transformers import decoder

WIDTH, STATES, HEADS = 32, 4, 4


@model(
    step=lambda: nn.Parameter(torch.rand(WIDTH) - 4),
    decay=lambda: nn.Parameter(torch.rand(WIDTH, STATES)),
    frequency=lambda: nn.Parameter(torch.arange(STATES).repeat(WIDTH, 1) * 3.0),
    output=lambda: nn.Parameter(torch.randn(WIDTH, STATES, 2)),
    skip=lambda: nn.Parameter(torch.randn(WIDTH)),
)
def long_convolution(self, x: Tensor) -> Tensor:
    """A diagonal state space, applied as a convolution by Fourier transforms (Gu et al., S4D, 2022)."""
    length = x.shape[-1]
    rate = torch.complex(-self.decay.exp(), self.frequency) * self.step.exp()[:, None]
    powers = (rate[..., None] * torch.arange(length)).exp()
    kernel = torch.einsum("dn,dnl->dl", torch.view_as_complex(self.output), powers).real
    spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length] + x * self.skip[:, None]


def s4d() -> nn.Module:
    def block() -> nn.Module:
        convolved = [turned(), long_convolution(), turned()]
        return Residual(*convolved, nn.GELU(), nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())

    last = [Apply(lambda x: x.mean(1)), nn.Linear(WIDTH, 3)]
    return nn.Sequential(nn.Linear(4, WIDTH), block(), block(), block(), *last)


@model(
    embed=lambda: nn.Linear(4, WIDTH),
    qkv=lambda: linears(2, WIDTH, 3 * WIDTH),
    norms=lambda: nn.ModuleList(nn.GroupNorm(HEADS, WIDTH) for _ in range(2)),
    head=lambda: nn.Linear(WIDTH, 3),
)
def retention(self, x: Tensor) -> Tensor:
    """Linear attention with a decay over time, in its parallel form (Sun et al., 2023)."""
    hidden = self.embed(x)
    time = torch.arange(x.shape[1])
    rates = 1 - 2.0 ** (-5 - torch.arange(HEADS))
    distance = (time[:, None] - time).clamp(min=0)
    decay = (rates[:, None, None] ** distance) * (time[:, None] >= time)
    for qkv, norm in zip(self.qkv, self.norms, strict=True):
        q, k, v = qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT * decay) @ v
        flat = mixed.transpose(1, 2).flatten(2)
        hidden = hidden + norm(flat.flatten(0, 1)).view_as(flat)
    return self.head(hidden.mean(1))


MAMBA = {"state_size": 4, "time_step_rank": 4, "expand": 1}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_chunk_size": 4}
NUMBERS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
DIMENSIONS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}

CASES = (
    decoder("MambaForCausalLM", **MAMBA),
    decoder("FalconMambaForCausalLM", **MAMBA),
    decoder("Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=16, expand=2, chunk_size=4),
    decoder("RwkvForCausalLM", attention_hidden_size=32),
    decoder("BambaForCausalLM", num_hidden_layers=2, attn_layer_indices=[1], **BAMBA),
    decoder("RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=32, attention_window_size=8),
    decoder("Qwen3NextForCausalLM", **NUMBERS, **DIMENSIONS),
    Case("S4D", s4d, batch(input=normal(12, 4), target=integers(3)), F.cross_entropy),
    Case("Retention", retention, batch(x=normal(12, 4), target=integers(3)), F.cross_entropy),
)
