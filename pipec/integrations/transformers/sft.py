"""``SFTTrainer`` of TRL with a pipeline in place of its model.

TRL computes its loss outside of the model, of what a patched ``forward`` returns. A pipeline computes the
loss within the step. So the patch is taken off, and the same losses and metrics are computed here.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from trl import SFTConfig, SFTTrainer

from pipec.errors import InputError
from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.integrations.transformers.trainer import PipelineTrainer, Target, is_peft_model, target_of


@dataclass(repr=False)
class PipecSFTConfig(PipelineArguments, SFTConfig):  # type: ignore[misc]
    """``SFTConfig`` of TRL with the options of ``pipec.compile``; see ``PipecArguments``.

    Raises InputError for ``activation_offloading``.
    """


class PipecSFTTrainer(PipelineTrainer, SFTTrainer):  # type: ignore[misc]
    """``SFTTrainer`` of TRL whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what an ``SFTTrainer`` takes, with ``PipecSFTConfig`` as ``args``. Losses and logged metrics are
    those of TRL, computed of the logits of each microbatch. With ``packing`` or ``padding_free`` a batch is
    one row of documents, of which each microbatch has some.
    """

    def _as_pipeline(self, model: nn.Module) -> nn.Module:
        whole: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
        vars(whole).pop("forward")  # TRL's patch
        if self.aux_loss_enabled and self.padding_free:
            raise InputError(
                "a term of the loss balances experts over all documents of a batch, but microbatches are "
                "computed alone; pass router_aux_loss_coef=0.0, or neither packing nor padding_free"
            )
        if self.padding_free:
            _require_separate_documents(whole)
            if self.compute_loss_func is not None:
                _require_division(self.compute_loss_func, whole.config.get_text_config().vocab_size)
        return super()._as_pipeline(model)

    def _loss_fn(self) -> Callable[..., Any]:
        if (given := super()._loss_fn()) is not None and self.args.loss_type == "nll":
            return functools.partial(_with_metrics, given)
        return functools.partial(_token_loss, self.args.loss_type == "dft")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """As in ``SFTTrainer``. In training the outputs are the loss alone."""
        trains = model.training and torch.is_grad_enabled()
        if self.padding_free:
            inputs, given = _row(inputs), self._in_microbatches(inputs, num_items_in_batch, trains)
        else:
            inputs = {**inputs, "use_cache": False}
            target = dict(target_of(inputs, num_items_in_batch))
            if self.aux_loss_enabled:
                inputs["output_router_logits"] = True
                adds_up = trains and num_items_in_batch is not None  # over the batches of an update
                parts = self.current_gradient_accumulation_steps if adds_up else 1
                target["aux_loss_weight"] = self.router_aux_loss_coef / parts
            given = {"target": target, **inputs}
        if trains:
            result = model(**given)
        elif self.padding_free and return_outputs:
            result = self.pipe.eval_step(**given), self.pipe(**inputs)
        else:
            result = self.pipe.eval_step(**given, outputs=return_outputs)
        self._add_metrics("train" if trains else "eval", inputs)
        return (result, result) if trains and return_outputs else result

    def _in_microbatches(
        self, inputs: Mapping[str, Tensor], num_items_in_batch: Tensor | None, trains: bool
    ) -> dict[str, Any]:
        """The one row of a batch as microbatches, each with some of its documents, and their weights."""
        rows = self.args.per_device_train_batch_size if trains else self.args.per_device_eval_batch_size
        parts = split_documents(inputs, self.args.microbatches or rows)
        every = [{"target": target_of({**part}, num_items_in_batch), **_row(part)} for part in parts]
        if num_items_in_batch is not None:  # which divides the sum over the tokens of each
            return {"microbatches": every, "weights": "sum"}
        counts = [int((part["labels"] != -100).sum()) for part in parts]
        return {"microbatches": every, "weights": [count / max(sum(counts), 1) for count in counts]}

    def _add_metrics(self, mode: str, inputs: dict[str, Tensor]) -> None:
        """Note what ``SFTTrainer`` logs."""
        logs = {name: total.item() for name, total in self.pipe.logs.items()}
        count, metrics = logs["num_tokens"] or 1, self._metrics[mode]
        metrics["entropy"].append(logs["entropy"] / count)
        metrics["mean_token_accuracy"].append(logs["num_correct"] / count)
        if mode == "train":
            counted = inputs["input_ids"].numel() if self.padding_free else inputs["attention_mask"].sum()
            self._total_train_tokens += int(counted)
        metrics["num_tokens"] = [self._total_train_tokens]
        if "aux_loss" in logs:
            metrics["aux_loss"].append(logs["aux_loss"])


def split_documents(inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The one row of a batch, (1, tokens), cut before documents into ``count`` parts of about as many tokens.

    A document begins where ``position_ids`` are 0. There are fewer parts where documents are long, and none
    without a label, of which there would be no loss.
    """
    num_tokens = inputs["input_ids"].shape[1]
    starts = (inputs["position_ids"][0] == 0).nonzero().flatten()
    wanted = [num_tokens * k / count for k in range(1, count)]
    nearest = {int(starts[(starts - place).abs().argmin()]) for place in wanted}
    bounds = [*sorted({0, *nearest}), num_tokens]
    parts = [{name: inputs[name][:, a:b] for name in _OF_TOKENS} for a, b in itertools.pairwise(bounds)]
    return [part for part in parts if (part["labels"] != -100).any()] or parts[:1]


_OF_TOKENS = ("input_ids", "labels", "position_ids")


def _row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model for a row of documents, which masks them by their positions."""
    return {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"], "use_cache": False}


@torch.no_grad()
def _require_separate_documents(model: nn.Module) -> None:
    """Raise InputError if a document of a row changes what the model makes of the next one."""
    refusal = (
        "leave packing out, pass packing_strategy='wrapped', whose documents see each other, or load the "
        'model with attn_implementation="sdpa" or "eager"'
    )
    kind: Any = getattr(model.config, "_attn_implementation", None)
    if kind not in ("sdpa", "eager"):
        raise InputError(
            f"attention is computed by {kind!r}, whose rows cannot hold several documents; {refusal}"
        )
    first, second = torch.zeros(2, 8, dtype=torch.long), torch.arange(4).repeat(2)[None]
    first[1, :4] = 1
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=first, position_ids=second.expand(2, 8), use_cache=False).logits[:, 4:]
    finally:
        model.train(was_training)
    if not torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-5):
        raise InputError(
            f"packing: documents of a row see each other in {type(model).__name__}, which makes no masks of "
            f"position_ids; {refusal}"
        )


def _require_division(loss: Callable[..., Tensor], num_words: int) -> None:
    """Raise InputError unless a loss is divided by ``num_items_in_batch``, and microbatches' add up."""
    logits = torch.linspace(-1, 1, 8 * num_words).reshape(1, 8, num_words)
    output, labels = CausalLMOutput(logits=logits), torch.arange(8)[None] % num_words
    once, twice = (loss(output, labels, num_items_in_batch=torch.tensor(count)) for count in (5, 10))
    if not torch.allclose(once, 2 * twice):
        raise InputError(
            "compute_loss_func does not divide by num_items_in_batch, so that the losses of documents in "
            "several microbatches do not add up to that of the batch; divide a sum over tokens by it, or "
            "leave out packing and padding_free"
        )


def _token_loss(delayed: bool, output: Any, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's ``loss_type="nll"``, or if ``delayed`` its ``"dft"``, and what ``SFTTrainer`` logs of the tokens.

    DFT multiplies the loss of a token by its probability (https://huggingface.co/papers/2508.05629). With an
    ``aux_loss_weight``, the loss that balances experts is added.
    """
    labels, mask, log_probs = _tokens(output, target)
    losses = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
    if delayed:
        losses = losses * (-losses).exp().detach()
    count = target["num_items_in_batch"]
    count = mask.sum() if count is None else torch.as_tensor(count)
    loss = losses.sum() / count.clamp(min=1)
    if "aux_loss_weight" in target:
        loss = loss + target["aux_loss_weight"] * output.aux_loss
    return loss, _metrics(output, labels, mask, log_probs)


def _with_metrics(
    loss: Callable[[Any, Target], Tensor], output: Any, target: Target
) -> tuple[Tensor, dict[str, Tensor]]:
    """Another loss, and what ``SFTTrainer`` logs of the tokens."""
    return loss(output, target), _metrics(output, *_tokens(output, target))


def _tokens(output: Any, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and whether they count, (rows, tokens - 1), and log-probabilities of the vocabulary."""
    labels = target["labels"][:, 1:]
    return labels, labels != -100, output.logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def _metrics(output: Any, labels: Tensor, mask: Tensor, log_probs: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens that count: their number, entropies, and how many were the most likely one.

    And the loss that balances experts, if the model returns it.
    """
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    balance = getattr(output, "aux_loss", None)
    return ({} if balance is None else {"aux_loss": balance}) | {
        "num_tokens": mask.sum(dtype=torch.float32),
        "entropy": entropy.masked_fill(~mask, 0.0).sum(),
        "num_correct": ((log_probs.argmax(-1) == labels) & mask).sum(dtype=torch.float32),
    }
