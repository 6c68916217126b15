"""What was compiled for which calls of a model, and whether capturing again would find the same."""

import functools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Generator, nn

from pipec.capture.model_call import ModelCall
from pipec.capture.model_state import ModelState
from pipec.compiler.compile import CachedCall
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import log
from pipec.ir import Mode, Variable
from pipec.ir.batch_split import variable_values
from pipec.torch_compat import ValuePath


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


class CaptureCache:
    """What was compiled for the calls of one model, by what decides a capture, and by its version."""

    def __init__(self) -> None:
        self._calls: dict[CaptureKey, dict[int, CachedCall]] = {}
        self._last: dict[Hashable, CaptureKey] = {}
        self._latest: CaptureKey | None = None

    def get(self, signature: CaptureSignature) -> CachedCall:
        """What was compiled for a signature."""
        return self._calls.get(signature.key, {}).get(signature.version, CachedCall())

    def put(self, signature: CaptureSignature, cached: CachedCall) -> None:
        self._calls.setdefault(signature.key, {})[signature.version] = cached

    @property
    def staged_graphs(self) -> list[StagedGraph]:
        """All graphs, in the order in which their signatures were compiled first."""
        return [staged for known in self._calls.values() for each in known.values() for staged in each.graphs]

    def retain(self, numbers: Collection[int]) -> None:
        """Let go of all artifacts but those with these numbers, and of the graphs of the others."""
        for key, versions in list(self._calls.items()):
            kept = {version: cached.only(numbers) for version, cached in versions.items()}
            self._calls[key] = {version: cached for version, cached in kept.items() if cached.graphs}
            if not self._calls[key]:
                del self._calls[key]

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """Which capture of a capture key is still right, the latest first; a new number if none is.

        Without the call, whose values decide branches, any way that they went before is right.
        """
        versions = self._calls.get(key, {})
        for number in reversed(versions):
            if not self.guard_failure(CaptureSignature(key, number), call):
                if key is not self._latest:
                    self._note_use(key)
                return number
        return max(versions, default=-1) + 1

    def _note_use(self, key: CaptureKey) -> None:
        self._last[key.without_state] = self._latest = key

    def log_recompile(
        self, signature: CaptureSignature, call: ModelCall, model: nn.Module, variables: str
    ) -> str:
        """Say why a capture key is compiled, and log why it is captured again; returns it in words.

        ``variables`` is what about its sizes and numbers is new.
        """
        key, number = signature.key, signature.version
        last, versions = self._last.get(key.without_state), self._calls.get(key, {})
        self._note_use(key)
        if number in versions:
            return "for other rows or sizes than before"
        reason = variables
        if last is not None and last.state != key.state:
            reason = key.state.changes_since(last.state, model)
        elif versions and number > max(versions):
            failure = self.guard_failure(CaptureSignature(key, max(versions)), call)
            reason = f"{failure}{_OFTEN * (number >= 3)}"
        if reason:
            log(f"pipec: recompiling: {reason}")
        return reason or f"for the first call like this ({key.mode})"

    def read(self, signature: CaptureSignature) -> dict[ValuePath, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        graphs = [staged.graph for staged in self.get(signature).graphs]
        return {place: x for graph in graphs for place, x in graph.model_guards.constants.items()}

    def guard_failure(self, signature: CaptureSignature, call: ModelCall | None) -> str:
        """What a capture took for granted and is no longer so; empty if all is."""
        graphs = [staged.graph for staged in self.get(signature).graphs]
        leaves, sizes = None, {}
        if call is not None:
            leaves = call.leaves
            sizes = {"b": call.batch_size, **variable_values(signature.key.variables, leaves)}
        return next((why for graph in graphs if (why := graph.guard_failure(leaves, sizes))), "")


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
