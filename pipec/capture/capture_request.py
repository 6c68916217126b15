"""A call of a model to capture, and how."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.capture.model_loss import LossPath
from pipec.ir import Mode, Variable

CPU = torch.device("cpu")

Timed = Callable[[str], AbstractContextManager[None]]
"""Measures a block, which is a step of this name."""


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """A call of a model to capture.

    Attributes:
        call: One microbatch. A symbolic batch is traced with at least two rows, because torch traces a
            dimension of size one as a constant.
        canonical: Maps every name of a tied tensor to the one that the graph uses.
        device: The model is traced as if it were there, wherever its tensors are.
        rewrite_loss: Let the losses of microbatches, averaged by their rows, be that of the batch. Else the
            graph is of the loss as the model has it.
        may_have_tail: Let what mixes rows run once, of the rows of all microbatches.
        loss_path: Where the loss is in what the model returns, as the user says; None: it is found.
        outputs: Return the model's output besides the loss.
        variables: Other sizes, and numbers, that are to be symbolic as well. Dynamo alone can do that.
        num_replicas: How many replicas take part in the model's own collectives. None if that differs by
            stage, or is not known; a model with collectives is then refused.
        batch: The mini-batch of the call, if there is more of it. Its values decide the branches that ask for
            those of arguments.
        timed: Measures each step of the capture, by its name.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    mode: Mode
    call: ModelCall
    canonical: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = CPU
    rewrite_loss: bool = True
    may_have_tail: bool = False
    loss_path: LossPath | None = None
    outputs: bool = False
    variables: Sequence[Variable] = ()
    num_replicas: int | None = 1
    batch: ModelCall | None = None
    timed: Timed = lambda step: nullcontext()

    @property
    def has_loss(self) -> bool:
        return self.mode is not Mode.FORWARD

    @property
    def adds_up(self) -> bool:
        """Whether the graph is rewritten so that the results of microbatches add up."""
        return self.rewrite_loss or not self.has_loss

    @property
    def whole_batch(self) -> ModelCall:
        return self.batch or self.call
