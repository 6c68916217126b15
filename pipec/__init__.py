"""pipec: a pipeline-parallel graph compiler for PyTorch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipec import ops
    from pipec.api import compile, from_pretrained, profile
    from pipec.api_arguments import Example
    from pipec.console import log
    from pipec.cost.profile import Profile
    from pipec.errors import (
        ArtifactError,
        CaptureError,
        CheckpointError,
        ExecutionError,
        InfeasibleError,
        InputError,
        NonFiniteError,
        PipecError,
        PipecWarning,
        PlanError,
        TransportError,
        UnsupportedTorchError,
        VerifyError,
    )
    from pipec.hardware.calibration import calibrate
    from pipec.hardware.topology import Topology
    from pipec.pipeline import CheckpointManager, Pipeline
    from pipec.pipeline.load import load
    from pipec.pipeline.logged_metrics import metrics

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "CaptureError",
    "CheckpointError",
    "CheckpointManager",
    "Example",
    "ExecutionError",
    "InfeasibleError",
    "InputError",
    "NonFiniteError",
    "PipecError",
    "PipecWarning",
    "Pipeline",
    "PlanError",
    "Profile",
    "Topology",
    "TransportError",
    "UnsupportedTorchError",
    "VerifyError",
    "calibrate",
    "compile",
    "from_pretrained",
    "load",
    "log",
    "metrics",
    "ops",
    "profile",
]

_HOMES = {
    "Example": "pipec.api_arguments",
    "Profile": "pipec.cost.profile",
    "Topology": "pipec.hardware.topology",
    "calibrate": "pipec.hardware.calibration",
    "compile": "pipec.api",
    "from_pretrained": "pipec.api",
    "profile": "pipec.api",
    "log": "pipec.console",
    "CheckpointManager": "pipec.pipeline",
    "Pipeline": "pipec.pipeline",
    "metrics": "pipec.pipeline.logged_metrics",
    "load": "pipec.pipeline.load",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that a rank that runs an artifact loads no compiler."""
    if name not in __all__:
        raise AttributeError(f"module 'pipec' has no attribute {name!r}")
    if name == "ops":
        return importlib.import_module("pipec.ops")
    found = globals()[name] = getattr(importlib.import_module(_HOMES.get(name, "pipec.errors")), name)
    return found


def __dir__() -> list[str]:
    return __all__
