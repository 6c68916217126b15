"""The settings of a compilation that all calls of a pipeline share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipec.ir import Precision


@dataclass(frozen=True)
class CompileSettings:
    """The settings that all calls of a pipeline share.

    ``device`` is one of the devices that will run the code; a model on another kind of device is captured as
    if it were on this one. Operators compute in ``precision``, or in the model's own types if it is None.
    ``microbatch_weight`` is recorded in the plan. With ``requires_proof``, losses whose sum is unproven are
    refused. With ``calibrates_cpu``, costs are measured on this CPU.
    """

    loss_fn: Callable[..., Any] | None
    device: torch.device
    precision: Precision | None = None
    microbatch_weight: str = ""
    requires_proof: bool = False
    calibrates_cpu: bool = False
