"""Trainers of transformers and TRL whose model trains as a pipeline; see docs/loops.md."""

from pipec.integrations.transformers.adapters import load_adapter
from pipec.integrations.transformers.arguments import PipecArguments
from pipec.integrations.transformers.trainer import PipecTrainer
