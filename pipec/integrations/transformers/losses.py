"""Losses that a Trainer computes of the model's output and the labels, as ``loss_fn`` of a pipeline.

Their target is ``{"labels": ..., "num_items_in_batch": ...}``: the labels, and the number of items in all
batches of an update, by which the loss is divided, or None.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
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


def token_loss(delayed: bool, output: Any, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's ``loss_type="nll"``, or if ``delayed`` its ``"dft"``, and what ``SFTTrainer`` logs of the tokens.

    It multiplies the loss of a token by its probability for DFT (https://huggingface.co/papers/2508.05629).
    """
    labels, mask, log_probs = _tokens(output, target)
    losses = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
    if delayed:
        losses = losses * (-losses).exp().detach()
    count = target["num_items_in_batch"]
    count = mask.sum() if count is None else torch.as_tensor(count)
    return losses.sum() / count.clamp(min=1), _metrics(labels, mask, log_probs)


def with_metrics(
    loss: Callable[[Any, Target], Tensor], output: Any, target: Target
) -> tuple[Tensor, dict[str, Tensor]]:
    """Another loss, and what ``SFTTrainer`` logs of the tokens."""
    return loss(output, target), _metrics(*_tokens(output, target))


def _tokens(output: Any, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and whether they count, (rows, tokens - 1), and log-probabilities of the vocabulary."""
    labels = target["labels"][:, 1:]
    return labels, labels != -100, output.logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def _metrics(labels: Tensor, mask: Tensor, log_probs: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens that count: their number, entropies, and how many were the most likely one."""
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return {
        "num_tokens": mask.sum(),
        "entropy": entropy.masked_fill(~mask, 0.0).sum(),
        "num_correct": ((log_probs.argmax(-1) == labels) & mask).sum(),
    }
