"""A model with a tied weight, and training that pipec updates beside the plain script that it must equal."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from forward_modules import model as module
from torch import Tensor, nn, optim
from unsplit_reference import Plain, relative_error

import pipec

ROWS, WIDTH, WORDS = 8, 6, 11
SAME = 1e-9
"""Relative, of numbers in double precision: replicas sum gradients in another order."""

ADAMW = partial(optim.AdamW, lr=0.01, weight_decay=0.1)


@module(
    words=lambda body, is_sparse: nn.Embedding(WORDS, WIDTH, sparse=is_sparse),
    body=lambda body, is_sparse: body,
    head=lambda body, is_sparse: nn.Linear(WIDTH, WORDS),
)
def Words(self: Any, words: Tensor) -> Tensor:
    """Embeds words, and predicts them."""
    logits = self.head(self.body(self.words(words).flatten(0, 1)))
    return nn.functional.cross_entropy(logits, words.flatten())


def untied(body: nn.Module, is_sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Words(body, is_sparse).double()


def model() -> nn.Module:
    """The first and the last stage use the same weights."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    tied = Words(nn.Sequential(*layers), False)
    tied.head.weight = tied.words.weight
    return tied.double()


def batches(count: int, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield {"words": torch.randint(0, WORDS, (rows, 5), generator=generator)}


def pair(
    make: Callable[[], nn.Module] = model, optimizer: Callable[..., Any] = ADAMW, **options: Any
) -> tuple[pipec.Pipeline, Plain]:
    """A pipeline that updates, and the plain script with equal weights."""
    own = make()
    plain = Plain(copy.deepcopy(own), optimizer, options.get("clip_grad_norm"))
    return pipec.compile(own, **{"optimizer": optimizer, "microbatches": 4, **options}), plain


def difference(pipe: pipec.Pipeline, plain: Plain) -> float:
    """The largest relative difference of a parameter."""
    own = dict(pipe.named_parameters())
    return max(relative_error(own[name].detach(), p.detach()) for name, p in plain.model.named_parameters())
