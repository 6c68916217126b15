"""What a user steps. ``held`` keeps the tensors of the model; ``pipeline`` compiles and runs its calls.

``checkpointed`` saves and loads checkpoints, and ``checkpoints`` keeps those of a run.
"""

from pipec.pipeline.checkpoint_manager import CheckpointManager
from pipec.pipeline.pipeline import Pipeline

__all__ = ["CheckpointManager", "Pipeline"]
