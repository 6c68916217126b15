"""What a user steps.

``owned_tensors`` holds the tensors of the model; ``pipeline`` compiles and runs its calls.
``collective_calls`` makes every call one of all ranks.
``checkpointing`` saves and loads checkpoints, and ``checkpoint_manager`` looks after those of a run.
"""

from pipec.pipeline.checkpoint_manager import CheckpointManager
from pipec.pipeline.pipeline import Pipeline

__all__ = ["CheckpointManager", "Pipeline"]
