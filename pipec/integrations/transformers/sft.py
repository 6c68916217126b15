"""``SFTTrainer`` of TRL with a pipeline in place of its model.

TRL computes its loss outside of the model, of what a patched ``forward`` returns. A pipeline computes the
loss within the step. So the patch is taken off, and the same losses and metrics are computed here.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from pipec.errors import InputError
from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.integrations.transformers.trainer import PipelineTrainer, Target, is_peft_model, target_of


@dataclass(repr=False)
class PipecSFTConfig(PipelineArguments, SFTConfig):  # type: ignore[misc]
    """``SFTConfig`` of TRL with the options of ``pipec.compile``; see ``PipecArguments``.

    Raises InputError for ``padding_free`` and ``activation_offloading``.
    """


class PipecSFTTrainer(PipelineTrainer, SFTTrainer):  # type: ignore[misc]
    """``SFTTrainer`` of TRL whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what an ``SFTTrainer`` takes, with ``PipecSFTConfig`` as ``args``. Losses and logged metrics are
    those of TRL, computed of the logits of each microbatch. Packed rows stay rows, whose documents do not see
    each other, where TRL makes one row of a batch.
    """

    def _as_pipeline(self, model: nn.Module) -> nn.Module:
        whole: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
        vars(whole).pop("forward")  # TRL's patch
        if self.aux_loss_enabled:
            raise InputError(
                "the loss has a term that balances the experts of the whole batch, which microbatches cannot "
                "compute; pass router_aux_loss_coef=0.0"
            )
        if self.padding_free:
            _require_separate_documents(whole)
            self.data_collator = PackedRows(self._tokenizer.pad_token_id)
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
        inputs = {**inputs, "use_cache": False}
        target = target_of(inputs, num_items_in_batch)
        if trains:
            result = model(**inputs, target=target)
        else:
            result = self.pipe.eval_step(**inputs, target=target, outputs=return_outputs)
        self._add_metrics("train" if trains else "eval", inputs)
        return (result, result) if trains and return_outputs else result

    def _add_metrics(self, mode: str, inputs: dict[str, Tensor]) -> None:
        """Note what ``SFTTrainer`` logs."""
        logs = {name: total.item() for name, total in self.pipe.logs.items()}
        count, metrics = max(logs["num_tokens"], 1), self._metrics[mode]
        metrics["entropy"].append(logs["entropy"] / count)
        metrics["mean_token_accuracy"].append(logs["num_correct"] / count)
        if mode == "train":
            packed = isinstance(self.data_collator, PackedRows)
            count = self.data_collator.num_tokens(inputs) if packed else inputs["attention_mask"].sum().item()
            self._total_train_tokens += count
        metrics["num_tokens"] = [self._total_train_tokens]


class PackedRows:
    """Collates rows of packed documents: ``input_ids``, ``labels`` and ``seq_lengths``.

    ``position_ids`` begin at 0 with each document, and there is no attention mask: models of transformers
    then make masks in blocks, so that no document sees another one. Shorter rows are filled with documents
    of one token. The first token of a document is no label.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def num_tokens(self, inputs: Mapping[str, Tensor]) -> int:
        """How many tokens of a batch are not there to fill rows."""
        fills = (inputs["input_ids"] == self._pad_token_id) & (inputs["position_ids"] == 0)
        return fills.numel() - int(fills.flip(1).cumprod(1).sum())

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        rows = [self._row(example, longest) for example in examples]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, example: dict[str, Any], longest: int) -> dict[str, Tensor]:
        tokens = torch.as_tensor(example["input_ids"])
        labels = torch.as_tensor(example.get("labels", tokens))
        missing = longest - len(tokens)
        lengths = example.get("seq_lengths", [len(tokens)])
        positions = torch.cat([*map(torch.arange, lengths), torch.zeros(missing, dtype=torch.long)])
        labels = torch.cat([labels, labels.new_full((missing,), -100)]).masked_fill(positions == 0, -100)
        tokens = torch.cat([tokens, tokens.new_full((missing,), self._pad_token_id)])
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}


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


def _token_loss(delayed: bool, output: Any, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's ``loss_type="nll"``, or if ``delayed`` its ``"dft"``, and what ``SFTTrainer`` logs of the tokens.

    It multiplies the loss of a token by its probability for DFT (https://huggingface.co/papers/2508.05629).
    """
    labels, mask, log_probs = _tokens(output, target)
    losses = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
    if delayed:
        losses = losses * (-losses).exp().detach()
    count = target["num_items_in_batch"]
    count = mask.sum() if count is None else torch.as_tensor(count)
    return losses.sum() / count.clamp(min=1), _token_metrics(labels, mask, log_probs)


def _with_metrics(
    loss: Callable[[Any, Target], Tensor], output: Any, target: Target
) -> tuple[Tensor, dict[str, Tensor]]:
    """Another loss, and what ``SFTTrainer`` logs of the tokens."""
    return loss(output, target), _token_metrics(*_tokens(output, target))


def _tokens(output: Any, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and whether they count, (rows, tokens - 1), and log-probabilities of the vocabulary."""
    labels = target["labels"][:, 1:]
    return labels, labels != -100, output.logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def _token_metrics(labels: Tensor, mask: Tensor, log_probs: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens that count: their number, entropies, and how many were the most likely one."""
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return {
        "num_tokens": mask.sum(),
        "entropy": entropy.masked_fill(~mask, 0.0).sum(),
        "num_correct": ((log_probs.argmax(-1) == labels) & mask).sum(),
    }
