"""Trainers of TRL that compute their loss of the outputs of the model, with a pipeline in its place."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import trl.trainer.utils as trl_utils
from torch import Tensor
from trl import DPOConfig, DPOTrainer

from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.integrations.transformers.trainer import PipelineTrainer


@dataclass(repr=False)
class PipecDPOConfig(PipelineArguments, DPOConfig):  # type: ignore[misc]
    """``DPOConfig`` of TRL with the options of ``pipec.compile``; see ``PipecArguments``."""


class PipecDPOTrainer(PipelineTrainer, DPOTrainer):  # type: ignore[misc]
    """``DPOTrainer`` of TRL whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what a ``DPOTrainer`` takes, with ``PipecDPOConfig`` as ``args``. The reference model is whole in
    each process; with ``precompute_ref_log_probs`` none is needed while the pipeline trains.
    """


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: Collection[str] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> tuple[Tensor | None, ...]:
    """What TRL's ``ChunkedLogProbFunction`` computes of N tokens in pieces, which stages cannot run, at once.

    Args:
        hidden: (N, features), multiplied by ``weight`` (vocabulary, features) and ``scale``.
        targets: (N,)
        outputs: which of the results, each (N,), are computed besides the log-probabilities of the targets.
    """
    logits = F.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    plain, plain_log_p = logits.detach(), log_p.detach()
    made = {
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: (2 * plain_log_p).logsumexp(-1),
        "mean_logits": lambda: plain.mean(-1),
        "is_top1": lambda: plain.argmax(-1) == targets,
    }
    found = log_p.gather(1, targets[:, None])[:, 0]
    return found, *(make() if name in outputs else None for name, make in made.items())


class _LogProbs:
    """Stands for TRL's function, which computes everywhere but in what is captured for stages."""

    _of_trl: Any = trl_utils._ChunkedLogProbFunction

    @staticmethod
    def apply(*args: Any) -> Any:
        return _log_probs(*args) if torch.compiler.is_compiling() else _LogProbs._of_trl.apply(*args)


_uses_triton = trl_utils._use_triton


def _selects_tokens(device: torch.device) -> bool:
    """Whether TRL selects the tokens that count: in stages, each row keeps all of its tokens."""
    return not torch.compiler.is_compiling() and bool(_uses_triton(device))


trl_utils._ChunkedLogProbFunction, trl_utils._use_triton = _LogProbs, _selects_tokens
