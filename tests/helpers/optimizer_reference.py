"""Training that pipec updates, and the plain PyTorch script that it must equal."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from split_optimizers import two
from torch import Tensor, nn, optim
from unsplit_reference import relative_error, unsplit_step

import pipec
from pipec.ir.batch_split import split_sizes

ROWS, WIDTH, WORDS = 8, 6, 11
SAME = 1e-9
"""Relative, of numbers in double precision: replicas sum gradients in another order."""


FACTORIES: Mapping[str, Callable[[Any], Any]] = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "adafactor": partial(optim.Adafactor, lr=0.01),
    "muon": two,
}


class Tied(nn.Module):
    """Embeds words and predicts them with the same weights, which the first and the last stage use."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()))
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.body(self.words(words)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().double()


def batches(count: int, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield {"words": torch.randint(0, WORDS, (rows, 5), generator=generator)}


@dataclass
class Plain:
    """The script without pipec: the unsplit model, the factory's optimizers, and the same microbatches."""

    model: nn.Module
    factory: Callable[[Any], Any]
    microbatches: int
    clip: float | None = None
    optimizers: Sequence[optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        made = self.factory(list(self.model.named_parameters()))
        self.optimizers = made if isinstance(made, Sequence) else [made]

    def accumulate(self, batch: Mapping[str, Any]) -> Tensor:
        rows = len(next(iter(batch.values())))
        return unsplit_step(self.model, batch, split_sizes(rows, self.microbatches))

    def update(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def step(self, batch: Mapping[str, Any]) -> Tensor:
        loss = self.accumulate(batch)
        self.update()
        return loss


def pair(
    name: str | Callable[[Any], Any] = "adamw",
    microbatches: int = 4,
    clip: float | None = None,
    make: Any = model,
    **options: Any,
) -> tuple[pipec.Pipeline, Plain]:
    """A pipeline that updates, and the plain script with equal weights."""
    own, factory = make(), FACTORIES[name] if isinstance(name, str) else name
    plain = Plain(copy.deepcopy(own), factory, microbatches, clip)
    pipe = pipec.compile(own, optimizer=factory, microbatches=microbatches, clip_grad_norm=clip, **options)
    return pipe, plain


def difference(pipe: pipec.Pipeline, plain: Plain) -> float:
    """The largest relative difference of a parameter."""
    own = dict(pipe.named_parameters())
    return max(relative_error(own[name].detach(), p.detach()) for name, p in plain.model.named_parameters())
