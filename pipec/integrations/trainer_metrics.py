"""Logs the metrics of a pipeline from a Trainer of transformers::

log_pipeline(trainer, pipe)
"""

from typing import Any

from transformers import Trainer, TrainerCallback

import pipec
from pipec.pipeline import Pipeline

__all__ = ["log_pipeline"]


def log_pipeline(trainer: Trainer, pipe: Pipeline) -> None:
    """Let what a Trainer reports have ``pipec.metrics(pipe)`` under ``pipec/``."""
    trainer.callback_handler.callbacks.insert(0, _PipelineMetrics(pipe))  # before those that report


class _PipelineMetrics(TrainerCallback):  # type: ignore[misc]
    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update({f"pipec/{name}": value for name, value in pipec.metrics(self._pipe).items()})
