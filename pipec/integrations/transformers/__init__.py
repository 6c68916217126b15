"""Trainers of transformers and TRL whose model trains as a pipeline; see docs/loops.md."""

import importlib
from typing import Any

from pipec.integrations.transformers.arguments import PipecArguments
from pipec.integrations.transformers.trainer import PipecTrainer, load_adapter

__all__ = [
    "PipecArguments",
    "PipecDPOConfig",
    "PipecDPOTrainer",
    "PipecGRPOConfig",
    "PipecGRPOTrainer",
    "PipecSFTConfig",
    "PipecSFTTrainer",
    "PipecTrainer",
    "load_adapter",
]


_MODULES = {
    "PipecDPOConfig": "preference",
    "PipecDPOTrainer": "preference",
    "PipecGRPOConfig": "preference",
    "PipecGRPOTrainer": "preference",
    "PipecSFTConfig": "sft",
    "PipecSFTTrainer": "sft",
}


def __getattr__(name: str) -> Any:
    """Import what needs TRL when it is asked for."""
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
