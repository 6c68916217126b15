"""What was captured for which calls of a model, and whether capturing again would find the same."""

import functools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Generator, nn

from pipec.capture.call import Call
from pipec.capture.state import State
from pipec.compiler.staged import StagedGraph
from pipec.console import log
from pipec.ir import Mode, Variable
from pipec.ir.batch import variable_values
from pipec.torch_compat import Place


@dataclass(frozen=True)
class Kind:
    """What decides a capture, besides what the code of the model reads.

    ``called`` is what a call has beside its values, its rows and its ``variables``. With ``outputs`` the
    model's output comes with the loss. ``state`` is that of the model and of torch.
    """

    mode: Mode
    called: Hashable
    outputs: bool
    state: State
    variables: tuple[Variable, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mode, self.called, self.outputs, self.state, self.variables))

    @property
    def of_any_state(self) -> tuple[Mode, Hashable, bool]:
        return self.mode, self.called, self.outputs


@dataclass(frozen=True)
class Signature:
    """What a captured graph is of: a kind of call, and a number that counts what the model's code found."""

    kind: Kind
    version: int


@dataclass(frozen=True)
class Turn:
    """A call that all ranks make, what it is compiled as, its seed, and a generator that has drawn that.

    ``rows[k]`` are those of replica k, if each was given its own part of the batch; of one replica, all rows.
    """

    call: Call
    signature: Signature
    seed: int
    drawn: Generator
    rows: tuple[int, ...]


class Captures:
    """The captured graphs of one model, cut into stages. There are several of one signature where the model
    specialises on a number of rows, or on a variable.
    """

    def __init__(self) -> None:
        self.staged: dict[Signature, list[StagedGraph]] = {}
        self._last: dict[Hashable, Kind] = {}
        self._latest: Kind | None = None
        self._versions: dict[Kind, list[int]] = {}

    def version(self, kind: Kind, call: Call | None) -> int:
        """Which capture of a kind of call is still right, the latest first; a new number if none is.

        Without the call, whose values decide branches, any way that they went before is right.
        """
        numbers = self._versions.get(kind, [])
        for number in reversed(numbers):
            signature = Signature(kind, number)
            if not self.obsolete(signature, call):
                if signature in self.staged and kind is not self._latest:
                    self._note_use(kind)
                return number
        return numbers[-1] + 1 if numbers else 0

    def _note_use(self, kind: Kind) -> None:
        self._last[kind.of_any_state] = self._latest = kind

    def announce(self, signature: Signature, call: Call, model: nn.Module, variables: str) -> str:
        """Say why a kind of call is compiled, and log why it is captured again; returns it in words.

        ``variables`` is what about its sizes and numbers is new.
        """
        kind, number = signature.kind, signature.version
        last, versions = self._last.get(kind.of_any_state), self._versions.setdefault(kind, [])
        self._note_use(kind)
        if signature in self.staged:
            return "for other rows or sizes than before"
        reason = variables
        if last is not None and last.state != kind.state:
            reason = kind.state.change_since(last.state, model)
        elif versions and number > versions[-1]:
            reason = f"{self.obsolete(Signature(kind, versions[-1]), call)}{_OFTEN * (number >= 3)}"
        if reason:
            log(f"pipec: compiles anew: {reason}")
        if number not in versions:
            versions.append(number)
        return reason or f"for the first call of this kind ({kind.mode})"

    def retain(self, used: Collection[StagedGraph]) -> None:
        """Let go of all graphs but those in use."""
        for signature, known in list(self.staged.items()):
            self.staged[signature] = [staged for staged in known if staged in used]
            if not self.staged[signature]:
                del self.staged[signature]
                self._versions[signature.kind].remove(signature.version)
        self._versions = {kind: numbers for kind, numbers in self._versions.items() if numbers}

    def read(self, signature: Signature) -> dict[Place, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        graphs = [staged.graph for staged in self.staged.get(signature, [])]
        return {place: x for graph in graphs for place, x in graph.assumptions.constants.items()}

    def obsolete(self, signature: Signature, call: Call | None) -> str:
        """What a capture took for granted and is no longer so; empty if all is."""
        graphs = [staged.graph for staged in self.staged.get(signature, [])]
        leaves, sizes = None, {}
        if call is not None:
            leaves = call.leaves
            sizes = {"b": call.batch_size, **variable_values(signature.kind.variables, leaves)}
        return next((why for graph in graphs if (why := graph.obsolete(leaves, sizes))), "")


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
