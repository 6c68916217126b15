"""The keys under which calls are captured and compiled: calls with equal keys run the same programs."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Generator

from pipec.capture.model_call import ModelCall
from pipec.graph import Fingerprint
from pipec.ir import Mode, Variable


@dataclass(frozen=True)
class CaptureKey:
    """Everything that decides a capture, except the Python values that the model's code reads.

    ``call_signature`` describes a call without its values, its number of rows and its ``variables``. With
    ``outputs``, the model's output is returned beside the loss. ``fingerprint`` is that of the model and of
    torch.
    """

    mode: Mode
    call_signature: Hashable
    outputs: bool
    fingerprint: Fingerprint
    variables: tuple[Variable, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mode, self.call_signature, self.outputs, self.fingerprint, self.variables))

    @property
    def without_fingerprint(self) -> tuple[Mode, Hashable, bool]:
        return self.mode, self.call_signature, self.outputs


@dataclass(frozen=True)
class CaptureSignature:
    """Identifies a captured graph: a capture key, and a version for each set of Python values read."""

    key: CaptureKey
    version: int


@dataclass(frozen=True)
class CollectiveCall:
    """A call that all ranks make, with its signature and random seed.

    ``generator_after`` is torch's default generator after drawing the seed. ``rows[k]`` is the number of rows
    of replica k if each replica passes its own part of the batch; otherwise ``rows`` has one entry, all rows.
    """

    call: ModelCall
    signature: CaptureSignature
    seed: int
    generator_after: Generator
    rows: tuple[int, ...]
