"""Trainers of TRL that compute their loss of the outputs of the model, with a pipeline in its place."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import trl.trainer.utils as trl_utils
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from pipec.errors import InputError
from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.integrations.transformers.trainer import PipelineTrainer, is_peft_model
from pipec.runtime.processes.launch import world


@dataclass(repr=False)
class PipecDPOConfig(PipelineArguments, DPOConfig):  # type: ignore[misc]
    """``DPOConfig`` of TRL with the options of ``pipec.compile``; see ``PipecArguments``."""


class PipecDPOTrainer(PipelineTrainer, DPOTrainer):  # type: ignore[misc]
    """``DPOTrainer`` of TRL whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what a ``DPOTrainer`` takes, with ``PipecDPOConfig`` as ``args``. The reference model is whole in
    each process; with ``precompute_ref_log_probs`` none is needed while the pipeline trains.
    """


@dataclass(repr=False)
class PipecGRPOConfig(PipelineArguments, GRPOConfig):  # type: ignore[misc]
    """``GRPOConfig`` of TRL with the options of ``pipec.compile``; see ``PipecArguments``.

    ``generation_batch_size`` is that of all replicas.
    """

    def __post_init__(self) -> None:
        """As in ``GRPOConfig``, for which there is one process: its batches have the rows of all replicas."""
        replicas = self._num_replicas()
        self.per_device_train_batch_size *= replicas
        self.per_device_eval_batch_size *= replicas
        super().__post_init__()
        self.per_device_train_batch_size //= replicas
        self.per_device_eval_batch_size //= replicas


class PipecGRPOTrainer(PipelineTrainer, GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` of TRL whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what a ``GRPOTrainer`` takes, with ``PipecGRPOConfig`` as ``args``. Completions are generated
    outside of the pipeline, by a copy of the model in each process, into which weights are gathered before.
    vLLM is refused: it would be given the weights of this process's stages alone.
    """

    def _as_pipeline(self, model: nn.Module) -> nn.Module:
        if self.use_vllm:
            raise InputError(
                "use_vllm is set, but a pipeline gives vLLM no weights: leave it out, so that a copy of the "
                "model generates"
            )
        self._generating: Any = model
        if world(self.args.group).is_distributed:
            self._generating = copy.deepcopy(model)
            generating = self._generating.get_base_model() if is_peft_model(model) else self._generating
            vars(generating).pop("forward")  # TRL's patch, which calls that of the model itself
        return super()._as_pipeline(model)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``GRPOTrainer``, by a whole model."""
        if world(self.args.group).is_distributed:
            self.pipe.gather_into(self._generating, all_ranks=True)
            self._generating.train(self.model.training)
        wrapped, self.model_wrapped = self.model_wrapped, self._generating
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model_wrapped = wrapped


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
    made: dict[str, Callable[[], Tensor]] = {
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
        if torch.compiler.is_compiling():
            return _log_probs(*args)
        return _LogProbs._of_trl.apply(*args)


_uses_triton = trl_utils._use_triton


def _selects_tokens(device: torch.device) -> bool:
    """Whether TRL selects the tokens that count: in stages, each row keeps all of its tokens."""
    return not torch.compiler.is_compiling() and bool(_uses_triton(device))


trl_utils._ChunkedLogProbFunction, trl_utils._use_triton = _LogProbs, _selects_tokens
