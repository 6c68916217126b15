"""The text the examples learn: the source of Python's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def load_bytes() -> tuple[Tensor, Tensor]:
    """Training and validation bytes, ``uint8[n]`` each: nine tenths of the text, and the rest."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    split = len(text) * 9 // 10
    return text[:split], text[split:]


def sample(text: Tensor, batch: int, context: int, generator: torch.Generator) -> Tensor:
    """``int64[batch, context]``: windows of ``text`` that start at random places."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    return text[starts + torch.arange(context)].long()
