"""Denoising models of the diffusers library, and one written here. Noise is an argument."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import model, perceptron
from zoo.model_case import Case, Inputs, Rows, batch, integers, normal, uniform


def sample_loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["sample"], target)


def diffuser(name: str, batch: Callable[[int], Inputs], batched: Any = None, **options: Any) -> Case:
    """The case of a diffusers model. Classes are never dropped, which would be a draw."""

    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**options)
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        return model

    return Case(name, make, batch, sample_loss, batched=batched)


def noisy(*shape: int, name: str = "sample", **more: Rows) -> Callable[[int], Inputs]:
    """Images, or what else has ``shape``, with the noise that was added as the target."""
    arguments = {name: normal(*shape), "timestep": integers(1000), "target": normal(*shape)}
    return batch(**arguments, **more)


latent = functools.partial(noisy, 4, 8, 8, name="hidden_states")


def frequencies() -> Tensor:
    return nn.Buffer(10000.0 ** -torch.linspace(0, 1, 16))


@model(frequencies=frequencies, layers=lambda: perceptron(32, 32, 32, activation=nn.SiLU))
def sinusoidal_time(self, time: Tensor) -> Tensor:
    angles = time[:, None] * self.frequencies
    return self.layers(torch.cat([angles.sin(), angles.cos()], -1))


@model(
    kept=lambda: nn.Buffer(torch.linspace(0.999, 0.98, 100).cumprod(0)),
    time=sinusoidal_time,
    first=lambda: nn.Conv2d(3, 32, 3, padding=1),
    down=lambda: nn.Conv2d(32, 32, 3, stride=2, padding=1),
    blocks=lambda: nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3)),
    norms=lambda: nn.ModuleList(nn.GroupNorm(4, 32) for _ in range(3)),
    up=lambda: nn.ConvTranspose2d(32, 32, 4, stride=2, padding=1),
    last=lambda: nn.Conv2d(64, 3, 3, padding=1),
)
def denoiser(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """The loss of a diffusion model itself: noise is added by a schedule, and predicted (Ho et al., 2020)."""
    kept = self.kept[time][:, None, None, None]
    noisy = kept.sqrt() * image + (1 - kept).sqrt() * noise
    embedded = self.time(time.float())[..., None, None]
    wide = self.first(noisy)
    hidden = self.down(F.silu(wide))
    for block, norm in zip(self.blocks, self.norms, strict=True):
        hidden = hidden + block(F.silu(norm(hidden + embedded)))
    return F.mse_loss(self.last(torch.cat([wide, self.up(hidden)], 1)), noise)


def reconstructed(rows: int) -> Inputs:
    return dict.fromkeys(("sample", "target"), torch.randn(rows, 3, 16, 16))


def places(rows: int) -> Tensor:
    return torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(3.0))


TEXT = {"encoder_hidden_states": normal(5, 16)}
POOLED = {"pooled_projections": normal(16)}
PLACES = {"img_ids": places, "txt_ids": lambda rows: torch.zeros(5, 3)}
FLUX = batch(hidden_states=normal(9, 4), **TEXT, **POOLED, timestep=uniform(), **PLACES, target=normal(9, 4))

SMALL = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
UNET = {"sample_size": 8, "attention_head_dim": 8, **SMALL}
ATTENDING = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CONDITIONED = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
}
AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    **SMALL,
}
CHANNELS = {"in_channels": 4, "out_channels": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
TWO_LAYERS = {"num_layers": 2, "sample_size": 8, **HEADS}
WAVE = {"sample_size": 32, "extra_in_channels": 32, "block_out_channels": (16, 32, 32), "layers_per_block": 1}
CLASSES = {"in_channels": 4, "num_embeds_ada_norm": 1000, "norm_num_groups": 4}
CAPTIONS = {"cross_attention_dim": 32, "caption_channels": 16, "use_additional_conditions": False}
JOINT = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
PATCHES = {"patch_size": 2, "caption_projection_dim": 32, "pos_embed_max_size": 8}
SINGLE = {"in_channels": 4, "num_layers": 1, "num_single_layers": 2, "axes_dims_rope": (4, 4, 8)}
SHARED = {"img_ids": None, "txt_ids": None}

CASES = (
    diffuser("UNet2DModel", noisy(3, 8, 8), in_channels=3, out_channels=3, **ATTENDING, **UNET),
    diffuser("UNet2DConditionModel", noisy(4, 8, 8, **TEXT), **CONDITIONED, **CHANNELS, **UNET),
    diffuser("UNet1DModel", noisy(4, 32), **CHANNELS, **WAVE),
    diffuser("AutoencoderKL", reconstructed, **AUTOENCODER),
    diffuser("VQModel", reconstructed, num_vq_embeddings=16, **AUTOENCODER),
    diffuser("DiTTransformer2DModel", latent(class_labels=integers(1000)), **CLASSES, **TWO_LAYERS),
    diffuser("PixArtTransformer2DModel", latent(**TEXT), **CAPTIONS, **CHANNELS, **TWO_LAYERS),
    diffuser("SD3Transformer2DModel", latent(**TEXT, **POOLED), **PATCHES, **JOINT, **CHANNELS, **TWO_LAYERS),
    diffuser("FluxTransformer2DModel", FLUX, batched=SHARED, **SINGLE, **JOINT, **HEADS),
    Case("Denoiser", denoiser, batch(image=normal(3, 8, 8), noise=normal(3, 8, 8), time=integers(100))),
)
