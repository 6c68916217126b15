"""pipec: a pipeline-parallel graph compiler for PyTorch."""

from pipec.api import Example, compile
from pipec.console import log, progress, rank_zero_only
from pipec.errors import (
    ArtifactError,
    CaptureError,
    ExecutionError,
    InfeasibleError,
    InputError,
    PipecError,
    PlanError,
    TransportError,
    VerifyError,
)
from pipec.pipeline import Pipeline

__all__ = [
    "ArtifactError",
    "CaptureError",
    "Example",
    "ExecutionError",
    "InfeasibleError",
    "InputError",
    "PipecError",
    "Pipeline",
    "PlanError",
    "TransportError",
    "VerifyError",
    "compile",
    "log",
    "progress",
    "rank_zero_only",
]
