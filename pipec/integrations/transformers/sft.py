"""``SFTTrainer`` of TRL with a pipeline in place of its model.

TRL computes its loss outside of the model, of what a patched ``forward`` returns. A pipeline computes the
loss within the step. So the patch is taken off, and ``losses.py`` has the same losses and metrics of the
logits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from pipec.errors import InputError
from pipec.integrations.transformers.adapters import is_peft_model
from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.integrations.transformers.losses import target_of, token_loss, with_metrics
from pipec.integrations.transformers.packed_rows import PackedRows, require_separate_documents
from pipec.integrations.transformers.trainer import PipelineTrainer


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
            require_separate_documents(whole)
            self.data_collator = PackedRows(self._tokenizer.pad_token_id)
        return super()._as_pipeline(model)

    def _loss_fn(self) -> Callable[..., Any]:
        if (given := super()._loss_fn()) is not None and self.args.loss_type == "nll":
            return functools.partial(with_metrics, given)
        return functools.partial(token_loss, self.args.loss_type == "dft")

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
