"""Turns a Trainer that has been made into one whose model is a pipeline."""

from typing import Any

from transformers import Trainer, TrainingArguments

from pipec.errors import InputError
from pipec.integrations.transformers.arguments import PipecArguments, PipelineArguments
from pipec.integrations.transformers.trainer import PipelineTrainer


def prepare_trainer(trainer: Trainer, **options: Any) -> None:
    """Let the model of ``trainer`` train as a pipeline, where a script cannot make a ``PipecTrainer``.

    Every rank calls this before ``train`` and ``evaluate``, with the options of ``PipecArguments``. The
    class of the Trainer and that of its arguments change; what a subclass overrides stays.

    Raises:
        InputError: the Trainer computes its loss outside of the model, as ``DPOTrainer`` does; and what
            ``PipecArguments`` and ``PipecTrainer`` raise.
    """
    kinds: tuple[Any, Any] = PipelineTrainer, PipecArguments
    trl = next((each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.")), None)
    if trl == "SFTTrainer":
        from pipec.integrations.transformers.sft import PipecSFTConfig, PipecSFTTrainer

        kinds = PipecSFTTrainer, PipecSFTConfig
    elif trl is not None:
        raise InputError(
            f"{trl} computes its loss of log-probabilities outside of the model, where a pipeline has no "
            "gradients; of TRL's trainers, pipec trains SFTTrainer"
        )
    kind, arguments = type(trainer), type(trainer.args)
    if arguments is not TrainingArguments and not issubclass(kinds[1], arguments):
        kinds = kinds[0], type(f"Pipec{arguments.__name__}", (PipelineArguments, arguments), {})
    kinds[1].take(trainer.args, options)
    trainer.__class__ = type(f"Pipec{kind.__name__}", (kind, kinds[0]), {})
    trainer.create_accelerator_and_postprocess()
    trainer._train_batch_size = trainer.args.train_batch_size
    trainer.take_model()
