"""``transformers.Trainer`` with a pipeline in place of its model.

All that relies on private methods and attributes of transformers is in this file and in ``arguments.py``. The
Trainer is alone in each process, so that what it logs, evaluates and decides is the same on all ranks. What
differs is overridden here: the model, losses that are computed of outputs, and files, which rank 0 writes.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import seed_worker

import pipec
from pipec.errors import InputError
from pipec.integrations.transformers.arguments import PipelineArguments
from pipec.pipeline.pipeline_module import PipelineModule

Target = Mapping[str, Any]
"""The labels, and the number of items in all batches of an update, which divides the loss, or None."""


def target_of(inputs: dict[str, Any], num_items_in_batch: Tensor | None) -> Target:
    """The target for these inputs, whose labels it takes."""
    return {"labels": inputs.pop("labels", None), "num_items_in_batch": num_items_in_batch}


def _given_loss(function: Callable[..., Tensor], output: Any, target: Target) -> Tensor:
    """That of ``compute_loss_func``, or of ``label_smoothing_factor``."""
    return function(output, target["labels"], num_items_in_batch=target["num_items_in_batch"])


def is_peft_model(model: object) -> bool:
    """Whether it is a model with adapters; a module of a pipeline is what its model is."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def load_adapter(module: Any, folder: str | Path, adapter: str = "default") -> None:
    """Load the weights that ``save_pretrained`` of PEFT wrote into an adapter that the model has.

    It does what ``PeftModel.load_adapter`` does with such an adapter. Every rank calls it.

    Args:
        module: that of a pipeline (``pipe.as_module()``, ``trainer.model``).
        folder: with the file ``adapter_model.safetensors``.
        adapter: the name of the adapter.

    Raises:
        InputError: the folder is that of an adapter of another configuration; what fits was loaded.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    weights = load_peft_weights(str(folder), device="cpu")
    found = set_peft_model_state_dict(module, weights, adapter)
    if found.unexpected_keys:
        raise InputError(
            f"{folder} has weights that adapter {adapter!r} has not: {found.unexpected_keys}; pass the name "
            "of the adapter that was saved there, or make one of the same configuration"
        )


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """Mixed into a Trainer, lets its model train as a pipeline: ``pipe``, whose module is ``model``."""

    pipe: pipec.Pipeline
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        if not isinstance(given, PipelineArguments):
            raise InputError(
                f"args is a {type(given).__name__}; pass PipecArguments, which is TrainingArguments with the "
                "options of pipec.compile, or to a PipecSFTTrainer PipecSFTConfig"
            )
        super().__init__(*args, **kwargs)
        self.take_model()

    def take_model(self) -> None:
        """Put a pipeline in place of the model."""
        self._grad_norm, self._num_skipped = torch.zeros((), dtype=torch.float64), 0
        self.add_callback(_AfterUpdates(self))
        self._set_signature_columns_if_needed()  # while the model is there to tell them
        self.model = self.model_wrapped = self._as_pipeline(self.model)

    def after_update(self) -> None:
        """Tell the Trainer what came of an update that programs have made."""
        if self.args.updates_in_programs:
            self.optimizer._is_overflow = self.pipe.num_skipped > self._num_skipped
            self._num_skipped = self.pipe.num_skipped
            if self.pipe.grad_norm is not None:
                self._grad_norm.copy_(self.pipe.grad_norm)

    def _as_pipeline(self, model: nn.Module) -> nn.Module:
        """Compile the model. Returns the module that the Trainer takes for it."""
        _refuse_model(model)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise InputError(
                "Accelerate is configured for DeepSpeed or FSDP, but a pipeline takes their place; start the "
                "script with torchrun, or leave them out of the configuration of accelerate launch"
            )
        if any(name in self.args.optim for name in ("lomo", "layerwise")):
            raise InputError(
                f"optim is {self.args.optim!r}, which updates each parameter during the backward, but the "
                "gradients of a pipeline are there after it; use another optimizer, such as adamw_torch"
            )
        self._whole_model, options = model, self.args.options()
        if self.args.updates_in_programs:
            options |= {
                "optimizer": self._optimizer_factory(),
                "clip_grad_norm": self.args.max_grad_norm or None,
            }
        self.pipe = pipec.compile(model, loss_fn=self._loss_fn(), **options)
        if self.has_own_loss and not self.pipe.has_loss_fn:
            return self.pipe.as_module(outputs="differentiable")
        return self.pipe.as_module(outputs=self.has_own_loss)

    @property
    def has_own_loss(self) -> bool:
        """Whether a subclass, or a Trainer of TRL, computes a loss of the outputs of the model."""
        owners = (each for each in type(self).__mro__ if "compute_loss" in vars(each))
        own = next(each for each in owners if each is not PipelineTrainer)
        return own is not Trainer and not own.__module__.startswith(__package__)

    def _loss_fn(self) -> Callable[..., Any] | None:
        """The loss that the Trainer would compute of outputs and labels; None: the model's own."""
        if self.compute_loss_func is not None:
            return functools.partial(_given_loss, self.compute_loss_func)
        if self.label_smoother is None:
            return None
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        smoother = functools.partial(self.label_smoother, shift_labels=shifts)
        return functools.partial(_given_loss, smoother)

    def _optimizer_factory(self) -> Callable[[Any], torch.optim.Optimizer]:
        """Makes the optimizer that ``create_optimizer`` would make."""
        if self.optimizer is not None:
            raise InputError(
                "optimizers has an optimizer, but fp16, shard and offload need one that pipec makes for each "
                "stage; pass optimizer_cls_and_kwargs=(class, arguments), or optim in the arguments"
            )
        decayed = {*self.get_decay_parameter_names(self.model)}
        chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        kind, options = chosen
        needs_model = options.keys() & {"params", "model", "optimizer_dict"}
        if needs_model or not issubclass(kind, torch.optim.Optimizer):
            raise InputError(
                f"optim is {self.args.optim!r}, which is made of the whole model, but fp16, shard and "
                "offload need one that pipec makes for each stage; use another one, such as adamw_torch"
            )

        def factory(named: list[tuple[str, Tensor]]) -> Any:
            split = [each for each in named if each[0] in decayed], [x for x in named if x[0] not in decayed]
            decays = self.args.weight_decay, 0.0
            groups = [
                {"params": own, "weight_decay": decay}
                for own, decay in zip(split, decays, strict=True)
                if own
            ]
            return kind(groups, **options)

        return factory

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """As in ``Trainer``; that of the programs, where these make the updates."""
        if self.args.updates_in_programs:
            self.optimizer = self.pipe.optimizer
            return self.optimizer
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm before clipping. Where programs clip, it is filled in once they have updated."""
        if self.args.updates_in_programs:
            return self._grad_norm
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        if self.args.updates_in_programs or grad_norm is not None:
            return grad_norm
        return self.pipe.clip_grad_norm_(math.inf)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As in ``Trainer``; each trial has a pipeline of its own."""
        model: nn.Module = super().call_model_init(trial)
        return self._as_pipeline(model) if getattr(self, "is_in_train", False) else model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """As in ``Trainer``. In training the outputs are the loss alone, unless a subclass overrides this."""
        if self.has_own_loss and not self.pipe.has_loss_fn:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training and torch.is_grad_enabled():
            if not self.pipe.has_loss_fn:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            inputs = dict(inputs)
            target = target_of(inputs, num_items_in_batch)
            output = model(**inputs, target=target)
            loss, output = output if self.has_own_loss else (output, output)
            return (loss, output) if return_outputs else loss
        if not self.pipe.has_loss_fn and return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        if self.pipe.has_loss_fn:
            inputs["target"] = target_of(inputs, num_items_in_batch)
        elif self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        return self.pipe.eval_step(**inputs, outputs=return_outputs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """As in ``Trainer``. Where the loss alone is needed, ranks do not exchange logits."""
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if not prediction_loss_only or not has_labels or self.has_own_loss:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        inputs = self._prepare_inputs(inputs)
        count = self._get_num_items_in_batch([inputs], self.args.device)
        with torch.no_grad():
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        return loss.detach(), None, None

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As in ``Trainer``; workers of all ranks draw the same numbers, for the same rows."""
        loader: DataLoader[Any] = super()._get_dataloader(*args, **kwargs)
        starts_workers = getattr(loader, "base_dataloader", loader)  # inside that of Accelerate
        if starts_workers.worker_init_fn is not None:
            workers = self.args.dataloader_num_workers
            starts_workers.worker_init_fn = functools.partial(seed_worker, num_workers=workers, rank=0)
        return loader

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The pipeline places its stages."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Every rank calls this, and rank 0 writes the whole model."""
        folder, save = self.args.output_dir if output_dir is None else output_dir, super()._save

        def write(state: dict[str, Tensor]) -> None:
            module, self.model = self.model, self._whole_model
            try:
                save(folder, state)
            finally:
                self.model = module

        self.pipe.write_whole(folder, write)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.pipe.optimizer_state_on_rank_0():  # every rank calls this
            state = self.optimizer.state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Rank 0's: ranks draw the same numbers."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.pipe.ranks.barrier()

    def _save_scaler(self, output_dir: str) -> None:
        if self.pipe.loss_scaler is not None and self.args.should_save:
            torch.save(vars(self.pipe.loss_scaler), Path(output_dir, SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self.pipe.loss_scaler
        if scaler is not None and checkpoint is not None and Path(checkpoint, SCALER_NAME).exists():
            vars(scaler).update(torch.load(Path(checkpoint, SCALER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_peft_model(self.model):
            self._load_adapters(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if is_peft_model(self.model):
            self._load_adapters(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_adapters(self, folder: str) -> None:
        """All adapters of the model, from where ``save_pretrained`` of PEFT puts them."""
        for adapter in self.model.peft_config:
            load_adapter(self.model, folder if adapter == "default" else Path(folder, adapter), adapter)


class PipecTrainer(PipelineTrainer):
    """``transformers.Trainer`` whose model trains as a pipeline, alone and under ``torchrun``.

    It takes what a ``Trainer`` takes, with ``PipecArguments`` as ``args``. All ranks run the same script,
    with the same model and data. Losses, norms, metrics and files are those of a ``Trainer`` on one device
    whose batches have ``per_device_train_batch_size`` rows for each replica. See docs/loops.md.

    Raises:
        InputError: the arguments or the model ask for what a pipeline cannot do.
    """


class _AfterUpdates(TrainerCallback):  # type: ignore[misc]
    """Calls ``after_update`` of a Trainer."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.after_update()


def _refuse_model(model: nn.Module) -> None:
    if isinstance(model, PipelineModule | pipec.Pipeline) or "_pipe" in vars(model):
        raise InputError("the model is a pipeline already; pass the model itself, which the Trainer compiles")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise InputError(
            "the model is quantized: kernels compute with its packed weights, which pipec cannot cut or "
            "differentiate. Load it without quantization_config, in bfloat16 to save memory"
        )
