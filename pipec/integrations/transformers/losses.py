"""Losses that a Trainer computes of the model's output and the labels, as ``loss_fn`` of a pipeline.

Their target is ``{"labels": ..., "num_items_in_batch": ...}``: the labels, and the number of items in all
batches of an update, by which the loss is divided, or None.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Target = Mapping[str, Any]


def target_of(inputs: dict[str, Any], num_items_in_batch: Tensor | None) -> Target:
    """The target for these inputs, whose labels it takes."""
    return {"labels": inputs.pop("labels", None), "num_items_in_batch": num_items_in_batch}


def given_loss(function: Callable[..., Tensor], output: Any, target: Target) -> Tensor:
    """That of ``compute_loss_func``."""
    return function(output, target["labels"], num_items_in_batch=target["num_items_in_batch"])


def smoothed_loss(smoother: Callable[..., Tensor], shift_labels: bool, output: Any, target: Target) -> Tensor:
    """That of ``label_smoothing_factor``."""
    return smoother(output, target["labels"], shift_labels, num_items_in_batch=target["num_items_in_batch"])
