"""Executing programs: the interpreter, the transports between ranks, and how processes map to ranks.

Imports only the data model, its text form, the errors and torch, so that a rank can run a saved artifact
with no compiler loaded.
"""

from pipec.runtime.distributed import TorchDistributed
from pipec.runtime.interpreter import Interpreter
from pipec.runtime.launch import World, resolve_devices, world
from pipec.runtime.stage import StageCode
from pipec.runtime.transport import InProcess, Transport

__all__ = [
    "InProcess",
    "Interpreter",
    "StageCode",
    "TorchDistributed",
    "Transport",
    "World",
    "resolve_devices",
    "world",
]
