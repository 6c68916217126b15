"""What was captured for which calls of a model, and whether capturing again would find the same."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipec.capture.call import Call
from pipec.capture.state import State
from pipec.compiler.staged import StagedGraph
from pipec.console import log
from pipec.ir import Mode
from pipec.torch_compat import Place

KEPT = 8
"""So many captures of one kind of call are kept, in case that what they found comes back."""


@dataclass(frozen=True)
class Kind:
    """What decides a capture, besides what the code of the model reads.

    ``called`` is what a call has beside its values and its rows. With ``outputs`` the model's output comes
    with the loss. ``state`` is that of the model and of torch.
    """

    mode: Mode
    called: Hashable
    outputs: bool
    state: State

    @property
    def of_any_state(self) -> tuple[Mode, Hashable, bool]:
        return self.mode, self.called, self.outputs


@dataclass(frozen=True)
class Signature:
    """What a captured graph is of: a kind of call, and a number that counts what the model's code found."""

    kind: Kind
    version: int

    @property
    def expired(self) -> "Signature":
        """Whose capture makes room when this one is compiled."""
        return Signature(self.kind, self.version - KEPT)


@dataclass(frozen=True)
class Turn:
    """A call that all ranks make, what it is compiled as, its seed, and the random state after it.

    ``rows[k]`` are those of replica k, if each was given its own part of the batch; of one replica, all rows.
    """

    call: Call
    signature: Signature
    seed: int
    random_state: Tensor
    rows: tuple[int, ...]


class Captures:
    """The captured graphs of one model, cut into stages. There are several of one signature where the model
    specialises on the number of rows.
    """

    def __init__(self) -> None:
        self.staged: dict[Signature, list[StagedGraph]] = {}
        self._last: dict[Hashable, Kind] = {}
        self._counts: dict[Kind, int] = {}

    def version(self, kind: Kind) -> int:
        """Which capture of a kind of call is still right, the latest first; a new number if none is."""
        count = self._counts.setdefault(kind, 1)
        for number in range(count - 1, max(count - 1 - KEPT, -1), -1):
            signature = Signature(kind, number)
            if not self._obsolete(signature):
                if signature in self.staged:
                    self._last[kind.of_any_state] = kind
                return number
        return count

    def announce(self, signature: Signature, model: nn.Module) -> list[StagedGraph]:
        """Say why a kind of call is captured again. Returns the graphs that make room for it."""
        kind, number = signature.kind, signature.version
        last = self._last.get(kind.of_any_state)
        self._last[kind.of_any_state] = kind
        if signature in self.staged:  # for another number of rows
            return []
        if last is not None and last.state != kind.state:
            log(f"pipec: compiles anew: {kind.state.change_since(last.state, model)}")
        elif number:
            reason = self._obsolete(Signature(kind, number - 1))
            log(f"pipec: compiles anew: {reason}{_OFTEN * (number >= 3)}")
        self._counts[kind] = max(self._counts.get(kind, 1), number + 1)
        return self.staged.pop(signature.expired, [])

    def read(self, signature: Signature) -> dict[Place, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        graphs = [staged.graph for staged in self.staged.get(signature, [])]
        return {place: x for graph in graphs for place, x in graph.assumptions.constants.items()}

    def _obsolete(self, signature: Signature) -> str:
        """What a capture took for granted and is no longer so; empty if all is."""
        graphs = [staged.graph for staged in self.staged.get(signature, [])]
        return next((why for graph in graphs if (why := graph.assumptions.broken())), "")


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
