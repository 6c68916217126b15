"""What a user steps. ``held`` keeps the tensors of the model; ``pipeline`` compiles and runs its calls."""

from pipec.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
