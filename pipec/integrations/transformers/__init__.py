"""Trainers of transformers and TRL whose model trains as a pipeline; see docs/loops.md."""

from typing import Any

from pipec.integrations.transformers.arguments import PipecArguments
from pipec.integrations.transformers.trainer import PipecTrainer, load_adapter

__all__ = [
    "PipecArguments",
    "PipecSFTConfig",
    "PipecSFTTrainer",
    "PipecTrainer",
    "load_adapter",
]


def __getattr__(name: str) -> Any:
    """Import what needs TRL when it is asked for."""
    if name not in ("PipecSFTConfig", "PipecSFTTrainer"):
        raise AttributeError(name)
    from pipec.integrations.transformers import sft

    return getattr(sft, name)
