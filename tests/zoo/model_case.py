"""What a model in the zoo is: how it is made, what it is called with, and what is expected of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Inputs = dict[str, Any]
"""The keyword arguments of ``step``. Where there is a loss function, ``target`` is among them."""

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """One architecture, small enough to train in a moment.

    Attributes:
        batch: makes a mini-batch of so many rows. It draws from torch's default generator.
        refused: the cause, one of ``causes.CAUSES``, if pipec is known to refuse the model.
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
