"""What a call is, for the compiler: calls that are alike in it run the same programs."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Generator

from pipec.capture.model_call import ModelCall
from pipec.capture.model_state import ModelState
from pipec.ir import Mode, Variable


@dataclass(frozen=True)
class CaptureKey:
    """What decides a capture, besides what the code of the model reads.

    ``call_signature`` is a call without its values, its number of rows and its ``variables``. With
    ``outputs`` the model's output comes with the loss. ``state`` is that of the model and of torch.
    """

    mode: Mode
    call_signature: Hashable
    outputs: bool
    state: ModelState
    variables: tuple[Variable, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mode, self.call_signature, self.outputs, self.state, self.variables))

    @property
    def without_state(self) -> tuple[Mode, Hashable, bool]:
        return self.mode, self.call_signature, self.outputs


@dataclass(frozen=True)
class CaptureSignature:
    """What a captured graph is of: a capture key, and a number that counts what the model's code found."""

    key: CaptureKey
    version: int


@dataclass(frozen=True)
class CollectiveCall:
    """A call that all ranks make, what it is compiled as, its seed, and a generator that has drawn that.

    ``rows[k]`` are those of replica k, if each was given its own part of the batch; of one replica, all rows.
    """

    call: ModelCall
    signature: CaptureSignature
    seed: int
    generator_after: Generator
    rows: tuple[int, ...]
