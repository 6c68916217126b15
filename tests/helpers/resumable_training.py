"""A training that stops and goes on: a small model with dropout, tied weights and a buffer, in any layout."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import pipec

WORDS, WIDTH, ROWS = 11, 10, 8

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "1 stage": {"devices": 1},
    "2 stages": {"devices": 2},
    "4 stages": {"devices": 4},
    "2 stages, zb-h1": {"devices": 2, "schedule": "zb-h1"},
    "2 replicas": {"devices": 2, "stages": 1},
    "2 replicas, shard=optimizer": {"devices": 2, "stages": 1, "shard": "optimizer"},
    "2 replicas, shard=parameters": {"devices": 2, "stages": 1, "shard": "parameters"},
    "2 stages, own optimizer": {"devices": 2, "outside": True},
    "2 replicas, own optimizer": {"devices": 2, "stages": 1, "outside": True},
}


class Net(nn.Module):
    """Embeds words, mixes them under dropout, and predicts them with the weights that embedded them."""

    def __init__(self, width: int = WIDTH, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, WORDS)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("offset", torch.randn(width))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.body(self.words(words) + self.offset))
        return nn.functional.cross_entropy(logits, words)


def decayed(named: Any, chosen: Any = lambda _, parameter: parameter.ndim >= 2) -> optim.Optimizer:
    """AdamW in two groups, of which the chosen parameters decay."""
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if chosen(name, parameter)]
    others = [parameter for name, parameter in named if not chosen(name, parameter)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return optim.AdamW(groups, lr=0.01)


@dataclass
class Run:
    """A pipeline with an optimizer, its own or one of the script, and an LR schedule."""

    pipe: pipec.Pipeline
    optimizer: optim.Optimizer | None
    scheduler: optim.lr_scheduler.LRScheduler

    def train(self, first: int, last: int) -> list[float]:
        """The losses of these steps."""
        return [self.step(words) for words in batches(first, last)]

    def step(self, words: Tensor) -> float:
        loss = self.pipe.step(words)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss)

    @property
    def training_state(self) -> dict[str, Any]:
        """What the methods of checkpoints are passed."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, directory: Path, **more: Any) -> None:
        self.pipe.save_checkpoint(directory, **self.training_state, **more)

    def load(self, directory: Path) -> Any:
        return self.pipe.load_checkpoint(directory, **self.training_state)


def start(
    layout: str,
    seed: int = 0,
    factory: Any = decayed,
    dtype: torch.dtype = torch.float64,
    model: Any = Net,
    **more: Any,
) -> Run:
    torch.manual_seed(seed)
    options = dict(LAYOUTS[layout])
    outside, made = options.pop("outside", False), model().to(dtype)
    given = {} if outside else {"optimizer": factory}
    pipe = pipec.compile(made, microbatches=2, **options, **given, **more)
    optimizer = factory(list(made.named_parameters())) if outside else None
    schedule = functools.partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40)
    return Run(pipe, optimizer, schedule(optimizer or pipe.optimizer))


def batches(first: int, last: int) -> Iterator[Tensor]:
    for number in range(first, last):
        yield torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(number))
