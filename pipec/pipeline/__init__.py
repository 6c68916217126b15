"""What a user steps.

``pipeline`` has the methods; its parts do the work. ``owned_tensors`` are the tensors of the model,
``collective_calls`` makes every call one of all ranks, ``compiled_calls`` compiles and runs it.
``checkpointing`` saves and loads checkpoints, and ``checkpoint_manager`` looks after those of a run.
``logged_metrics`` has figures for loggers.
"""

from pipec.pipeline.checkpoint_manager import CheckpointManager
from pipec.pipeline.logged_metrics import metrics
from pipec.pipeline.pipeline import Pipeline

__all__ = ["CheckpointManager", "Pipeline", "metrics"]
