"""What a user steps.

``pipeline`` has the methods. ``compiled_executions`` compiles what runs its calls, and ``load`` makes a
pipeline of a saved artifact, without the compiler. ``pipeline_module`` is a pipeline as a module whose loss
has a ``backward``. ``checkpointing`` saves and loads checkpoints, and ``checkpoint_manager`` looks after
those of a run. ``logged_metrics`` has figures for loggers.
"""

from pipec.pipeline.checkpoint_manager import CheckpointManager
from pipec.pipeline.pipeline import Pipeline

__all__ = ["CheckpointManager", "Pipeline"]
