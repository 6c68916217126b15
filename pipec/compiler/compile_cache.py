"""What was compiled for the calls of one pipeline: the only memory of it in a process.

Every rank makes the same calls in the same order, and so lets go of the same. Rank 0 alone compiles: the
others have programs, and no graphs.
"""

import functools
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, nn

from pipec.capture.model_call import ModelCall
from pipec.capture.model_state import ModelState
from pipec.compiler.compile import CachedCall
from pipec.compiler.microbatch_groups import CompiledArtifact, MicrobatchGroups
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import log
from pipec.ir import Mode, Sizes, Variable
from pipec.ir.batch_split import variable_values
from pipec.ir.text_format import holds
from pipec.torch_compat import ValuePath

MAX_SIGNATURES = 8
"""Of each mode, as torch._dynamo.config.recompile_limit has it. Each has a captured graph."""

MAX_PROGRAMS = 32
"""Of one signature: for other numbers of rows, and where the code of the model depends on a size."""


_MOST_SERVED = 1024


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


@dataclass(eq=False)
class _CachedProgram:
    """What runs batches of so many rows, where the sizes are such as it was compiled for."""

    rows: int
    groups: MicrobatchGroups
    _served: set[tuple[float, ...]] = field(default_factory=set)

    def is_valid_for(self, rows: int, values: Sizes) -> bool:
        """Whether it is right for such a batch. Conditions that have held are not looked at again."""
        if rows != self.rows:
            return False
        sizes = tuple(values.values())
        if sizes in self._served:
            return True
        if len(self._served) >= _MOST_SERVED:  # such as a number that is another one in every step
            self._served.clear()
        is_valid = self._holds(values)
        if is_valid:
            self._served.add(sizes)
        return is_valid

    def _holds(self, values: Sizes) -> bool:
        plans = [(compiled.artifact.plan, {*sizes}) for compiled, sizes in self.groups]
        return all(
            all(values[name] == fixed for name, fixed in plan.fixed_sizes.items())
            and all(holds(guard, {**values, "b": rows}) for rows in sizes for guard in plan.guards)
            for plan, sizes in plans
        )


@dataclass(eq=False)
class _CachedCalls:
    """What was compiled for the calls of one signature: programs, the last used one at the end.

    ``compiled`` has what they were made of, and ``used`` says when one of them was used last.
    """

    programs: list[_CachedProgram] = field(default_factory=list)
    compiled: CachedCall = field(default_factory=CachedCall)
    used: int = 0


class CompileCache:
    """What was compiled, by what decides a capture and by its version."""

    def __init__(self) -> None:
        self._calls: dict[CaptureKey, dict[int, _CachedCalls]] = {}
        self._clock = itertools.count(1)

    def find(self, signature: CaptureSignature, rows: int, call: ModelCall) -> MicrobatchGroups | None:
        """What runs this call, as if it had so many rows, if it was compiled."""
        known = self._calls.get(signature.key, {}).get(signature.version)
        if known is None:
            return None
        values = variable_values(signature.key.variables, call.leaves)
        for program in reversed(known.programs):
            if program.is_valid_for(rows, values):
                self._use(known, program)
                return program.groups
        return None

    def add(self, signature: CaptureSignature, rows: int, groups: MicrobatchGroups) -> None:
        """Keep what was compiled for a call, and let go of what was used longest ago."""
        known = self._entry(signature)
        self._use(known, _CachedProgram(rows, groups))
        numbers = {made.number for program in known.programs for made, _ in program.groups}
        known.compiled = known.compiled.only(numbers)
        alike = [
            (each.used, key, version)
            for key, versions in self._calls.items()
            for version, each in versions.items()
            if key.mode is signature.key.mode
        ]
        for _, key, version in sorted(alike, key=lambda each: each[0])[:-MAX_SIGNATURES]:
            del self._calls[key][version]
            if not self._calls[key]:
                del self._calls[key]

    def _use(self, known: _CachedCalls, program: _CachedProgram) -> None:
        known.used = next(self._clock)
        if not known.programs or known.programs[-1] is not program:
            others = [each for each in known.programs if each is not program]
            known.programs = [*others, program][-MAX_PROGRAMS:]

    def _entry(self, signature: CaptureSignature) -> _CachedCalls:
        return self._calls.setdefault(signature.key, {}).setdefault(signature.version, _CachedCalls())

    @property
    def compiled(self) -> Iterator[CompiledArtifact]:
        """Everything that runs calls."""
        for known in self._all():
            yield from (made for program in known.programs for made, _ in program.groups)

    @property
    def staged_graphs(self) -> list[StagedGraph]:
        """All graphs, in the order in which their keys were compiled first."""
        return [staged for known in self._all() for staged in known.compiled.graphs]

    def _all(self) -> Iterator[_CachedCalls]:
        return (known for versions in self._calls.values() for known in versions.values())

    def get(self, signature: CaptureSignature) -> CachedCall:
        """The graphs and artifacts for a signature, on the rank that compiles."""
        known = self._calls.get(signature.key, {}).get(signature.version)
        return known.compiled if known else CachedCall()

    def put(self, signature: CaptureSignature, compiled: CachedCall) -> None:
        """Keep the graphs and artifacts for a signature."""
        self._entry(signature).compiled = compiled

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """Which capture of a capture key is still right, the latest first; a new number if none is.

        Without the call, whose values decide branches, any way that they went before is right.
        """
        versions = self._calls.get(key, {})
        right = (x for x in reversed(versions) if not self.guard_failure(CaptureSignature(key, x), call))
        return next(right, max(versions, default=-1) + 1)

    def recompile_reason(
        self, signature: CaptureSignature, call: ModelCall, model: nn.Module, variables: str
    ) -> str:
        """Why a call is compiled, in words; logs why it is captured again.

        ``variables`` is what about its sizes and numbers is new.
        """
        key, number = signature.key, signature.version
        versions, last = self._calls.get(key, {}), self._last_like(key)
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

    def _last_like(self, key: CaptureKey) -> CaptureKey | None:
        """The key of the last call that was like one with this key, whatever state the model was in."""
        alike = [
            (known.used, other)
            for other, versions in self._calls.items()
            for known in versions.values()
            if other.without_state == key.without_state
        ]
        return max(alike, key=lambda each: each[0])[1] if alike else None

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
