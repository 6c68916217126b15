"""What a model in the zoo is: how it is made, what it is called with, and what is expected of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
"""The keyword arguments of ``step``. Where there is a loss function, ``target`` is among them."""

Rows = Callable[[int], Any]
"""Makes an argument of so many rows. It draws from torch's default generator."""

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """One architecture, small enough to train in a moment.

    Attributes:
        batch: makes a mini-batch of so many rows.
        refused: the cause, one of ``refusal_causes.CAUSES``, if pipec is known to refuse the model.
        batched: as of ``pipec.compile``.
        by_microbatch: the model mixes the rows of a batch, as contrastive losses do, so that what eager torch
            makes of the microbatches in turn is right, and not what it makes of the batch. Of a model with
            BatchNorm that is known.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Inputs]
    loss_fn: Loss | None = None
    refused: str | None = None
    batched: Mapping[str, int | None] | None = None
    by_microbatch: bool = False


def batch(**arguments: Rows) -> Callable[[int], Inputs]:
    """Makes mini-batches of these arguments."""
    return lambda rows: {name: make(rows) for name, make in arguments.items()}


def normal(*shape: int) -> Rows:
    """Numbers of a normal distribution, ``shape`` of them in a row."""
    return lambda rows: torch.randn(rows, *shape)


def uniform(*shape: int) -> Rows:
    """Numbers from 0 to 1."""
    return lambda rows: torch.rand(rows, *shape)


def integers(limit: int, *shape: int) -> Rows:
    """Numbers of classes, tokens or places."""
    return lambda rows: torch.randint(limit, (rows, *shape))


def bits(*shape: int) -> Rows:
    """Zeros and ones, as floats."""
    return lambda rows: torch.randint(2, (rows, *shape)).float()
