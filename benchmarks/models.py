"""The models that the benchmarks measure: a GPT and a ResNet-50 to cut by hand, and a U-Net."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification


class Embedding(nn.Module):
    """``int64[batch, context]`` tokens to ``f32[batch, context, width]``."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Causal attention and an MLP, each normalised first and added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(heads.transpose(1, 2).flatten(2))


def gpt(width: int, vocabulary: int, context: int, num_layers: int = 8) -> nn.Sequential:
    """Embedding, ``num_layers`` blocks of heads 32 wide, final norm, output layer."""
    return nn.Sequential(
        Embedding(vocabulary, context, width),
        *(Block(width, width // 32) for _ in range(num_layers)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)),
    )


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``f32[batch, context, vocabulary]`` logits against ``int64[batch, context]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def resnet50(scale: float) -> nn.Sequential:
    """The first convolution, 16 blocks of three with batch norm, and the output layer for 1,000 classes.

    ``f32[batch, 3, height, width]`` images to ``f32[batch, 1000]`` (He et al., CVPR 2016). All widths are
    ``scale`` times those of the paper.
    """
    sizes = [int(scale * width) for width in (256, 512, 1024, 2048)]
    config = ResNetConfig(num_labels=1000, embedding_size=int(scale * 64), hidden_sizes=sizes)
    whole = ResNetForImageClassification(config)
    blocks = [block for stage in whole.resnet.encoder.stages for block in stage.layers]
    return nn.Sequential(
        whole.resnet.embedder, *blocks, nn.Sequential(whole.resnet.pooler, *whole.classifier)
    )


class ConvBlock(nn.Module):
    """Two 3 x 3 convolutions, each normalised and activated; height and width stay."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(8, num_out), nn.SiLU()),
            *(nn.Conv2d(num_out, num_out, 3, padding=1), nn.GroupNorm(8, num_out), nn.SiLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """``f32[batch, 3, height, width]`` images to images (Ronneberger et al., MICCAI 2015).

    Each of ``depth`` levels halves height and width and doubles the channels, ``width`` at first; on the way
    up each reads what its counterpart on the way down made.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(map(ConvBlock, [3, *channels], channels))
        self.middle = ConvBlock(channels[-1], channels[-1])
        self.up = nn.ModuleList(ConvBlock(2 * size, max(width, size // 2)) for size in reversed(channels))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)
