"""Denoising models of the diffusers library, and one written here. Noise is an argument."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs


def diffusers(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**options)
        return model

    return make


def sample_loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["sample"], target)


def noisy(channels: int, *size: int, **more: Any) -> Callable[[int], Inputs]:
    """Images, or what else has ``size``, with the noise that was added as the target. ``more`` by row."""

    def batch(rows: int) -> Inputs:
        return {
            "sample": torch.randn(rows, channels, *size),
            "timestep": torch.randint(1000, (rows,)),
            "target": torch.randn(rows, channels, *size),
            **{name: torch.randn(rows, *shape) for name, shape in more.items()},
        }

    return batch


def latent(channels: int, *size: int, **more: Any) -> Callable[[int], Inputs]:
    """The same for transformers, which name it otherwise."""

    def batch(rows: int) -> Inputs:
        inputs = noisy(channels, *size, **more)(rows)
        inputs["hidden_states"] = inputs.pop("sample")
        return inputs

    return batch


class SinusoidalTime(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(10000.0 ** -torch.linspace(0, 1, width // 2))
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        return self.layers(torch.cat([angles.sin(), angles.cos()], -1))


class Denoiser(nn.Module):
    """The loss of a diffusion model itself: noise is added by a schedule, and predicted (Ho et al., 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.kept = nn.Buffer(torch.linspace(0.999, 0.98, 100).cumprod(0))
        self.time = SinusoidalTime(width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.up = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kept = self.kept[time][:, None, None, None]
        noisy = kept.sqrt() * image + (1 - kept).sqrt() * noise
        embedded = self.time(time.float())[..., None, None]
        wide = self.first(noisy)
        hidden = self.down(F.silu(wide))
        for block, norm in zip(self.blocks, self.norms, strict=True):
            hidden = hidden + block(F.silu(norm(hidden + embedded)))
        return F.mse_loss(self.last(torch.cat([wide, self.up(hidden)], 1)), noise)


def drawn(rows: int) -> Inputs:
    image, noise = torch.randn(2, rows, 3, 8, 8)
    return {"image": image, "noise": noise, "time": torch.randint(100, (rows,))}


def dit() -> nn.Module:
    """Classes are never dropped, which would be a draw."""
    model = diffusers(
        "DiTTransformer2DModel",
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
        **HEADS,
    )()
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


SMALL = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}

CASES = (
    Case(
        "UNet2DModel",
        diffusers(
            "UNet2DModel",
            sample_size=8,
            in_channels=3,
            out_channels=3,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **SMALL,
        ),
        noisy(3, 8, 8),
        sample_loss,
    ),
    Case(
        "UNet2DConditionModel",
        diffusers(
            "UNet2DConditionModel",
            sample_size=8,
            in_channels=4,
            out_channels=4,
            attention_head_dim=8,
            cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            **SMALL,
        ),
        noisy(4, 8, 8, encoder_hidden_states=(5, 16)),
        sample_loss,
    ),
    Case(
        "UNet1DModel",
        diffusers(
            "UNet1DModel",
            sample_size=32,
            in_channels=4,
            out_channels=4,
            extra_in_channels=32,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
        ),
        noisy(4, 32),
        sample_loss,
    ),
    Case(
        "AutoencoderKL",
        diffusers(
            "AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            **SMALL,
        ),
        lambda rows: {"sample": (image := torch.randn(rows, 3, 16, 16)), "target": image},
        sample_loss,
    ),
    Case(
        "VQModel",
        diffusers(
            "VQModel",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            num_vq_embeddings=16,
            **SMALL,
        ),
        lambda rows: {"sample": (image := torch.randn(rows, 3, 16, 16)), "target": image},
        sample_loss,
    ),
    Case(
        "DiTTransformer2DModel",
        dit,
        lambda rows: {**latent(4, 8, 8)(rows), "class_labels": torch.randint(1000, (rows,))},
        sample_loss,
    ),
    Case(
        "PixArtTransformer2DModel",
        diffusers(
            "PixArtTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            cross_attention_dim=32,
            caption_channels=16,
            use_additional_conditions=False,
            **HEADS,
        ),
        latent(4, 8, 8, encoder_hidden_states=(5, 16)),
        sample_loss,
    ),
    Case(
        "SD3Transformer2DModel",
        diffusers(
            "SD3Transformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            **HEADS,
        ),
        latent(4, 8, 8, encoder_hidden_states=(5, 16), pooled_projections=(16,)),
        sample_loss,
    ),
    Case(
        "FluxTransformer2DModel",
        diffusers(
            "FluxTransformer2DModel",
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
            **HEADS,
        ),
        lambda rows: {
            "hidden_states": torch.randn(rows, 9, 4),
            "encoder_hidden_states": torch.randn(rows, 5, 16),
            "pooled_projections": torch.randn(rows, 16),
            "timestep": torch.rand(rows),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(3.0)),
            "txt_ids": torch.zeros(5, 3),
            "target": torch.randn(rows, 9, 4),
        },
        sample_loss,
        batched={"img_ids": None, "txt_ids": None},
    ),
    Case("Denoiser", Denoiser, drawn),
)
