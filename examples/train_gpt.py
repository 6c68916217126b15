"""Train a byte-level GPT on the source of Python's standard library, on four pipeline stages.

python examples/train_gpt.py                            # every stage in this process
torchrun --nproc-per-node 4 examples/train_gpt.py       # one stage per process: the same losses
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from stdlib_text import load_bytes, sample
from torch import Tensor, nn

import pipec

BATCH, CONTEXT = 32, 128


class Block(nn.Module):
    """Attention and an MLP, each normalised first and added to what came in."""

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


class GPT(nn.Module):
    """``int64[batch, context]`` bytes in, ``f32[batch, context, 256]`` logits of the next byte out."""

    def __init__(self, num_layers: int = 6, width: int = 128, num_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def example() -> pipec.Example:
    """For the command line: ``pipec plan examples/train_gpt.py:example --devices 4``."""
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
    return pipec.Example(GPT(), (tokens,), target=tokens, loss_fn=next_byte_loss)


RECORDED = 5
"""The number of last steps that the page shows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", type=Path, help="folder for the artifact and the page")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, validation = load_bytes()
    generator = torch.Generator().manual_seed(0)

    pipe = pipec.compile(GPT(), devices=4, loss_fn=next_byte_loss, schedule="1f1b", microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    losses = []

    def step() -> None:
        text = sample(train, BATCH, CONTEXT + 1, generator)
        loss = pipe.step(text[:, :-1], target=text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 1:
            pipec.log(pipe.plan)
        if len(losses) % 20 == 1:
            pipec.log(f"step {len(losses) - 1:4}  loss {losses[-1]:.6f}")

    recorded = min(RECORDED, args.steps - 1)
    for _ in range(args.steps - recorded):
        step()
    with pipe.trace() as trace:
        for _ in range(recorded):
            step()

    text = sample(validation, 4 * BATCH, CONTEXT + 1, generator)
    validation_loss = pipe.eval_step(text[:, :-1], target=text[:, 1:])
    pipec.log(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, validation loss {validation_loss:.6f}")

    if args.output:
        pipe.save(args.output / "artifact")
        pipe.visualize(args.output / "page.html", trace)
        pipec.log(f"open {args.output / 'page.html'} in a browser: the planned and the measured step")


if __name__ == "__main__":
    main()
