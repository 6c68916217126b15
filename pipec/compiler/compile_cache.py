"""The compiled calls of one pipeline, in memory, and the keys under which they are found.

Rank 0 alone has them: it tells the other ranks which artifacts run a call, and which of them they keep.
"""

import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipec.artifact.artifact import Artifact, MicrobatchGroups
from pipec.capture.model_call import ModelCall
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import notice
from pipec.graph import Fingerprint, difference
from pipec.ir import Mode, Plan, Sizes, Variable
from pipec.ir.batch_split import variable_values
from pipec.ir.text_format import holds

MAX_SIGNATURES = 8
"""Most signatures cached for each mode, the value of torch._dynamo.config.recompile_limit.

Each has a captured graph."""

MAX_PROGRAMS = 32
"""Most programs cached for one signature: one for each number of rows, or size that the model depends on."""


@dataclass(frozen=True)
class CaptureKey:
    """Everything that decides a capture, except the Python values that the model's code reads.

    Calls with equal keys, whose code reads equal values, run the same programs. ``call_signature`` describes
    a call without its values, its number of rows and its ``variables``. With ``outputs``, the model's output
    is returned beside the loss. ``fingerprint`` is that of the model and of torch.
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


@dataclass(frozen=True, eq=False)
class CompiledGraphs:
    """The cut graphs of one signature, and the artifacts generated from them.

    There are several graphs if the model specialises on a number of rows, or on a variable. The key of an
    artifact is its graph, its number of microbatches, and the rows of its first microbatch.
    """

    graphs: tuple[StagedGraph, ...] = ()
    artifacts: Mapping[tuple[StagedGraph, int, int], Artifact] = field(default_factory=dict)

    def only(self, numbers: Collection[int]) -> "CompiledGraphs":
        """The artifacts with these numbers, and the graphs that they were generated from."""
        artifacts = {key: compiled for key, compiled in self.artifacts.items() if compiled.number in numbers}
        used = {staged for staged, _, _ in artifacts}
        return CompiledGraphs(tuple(staged for staged in self.graphs if staged in used), artifacts)

    def guard_failure(self, key: CaptureKey, call: ModelCall | None) -> str:
        """The first guard of the captures that no longer holds, as text; empty if all hold.

        Guards on values of the call are not evaluated if ``call`` is None.
        """
        for graph in (each.graph for each in self.graphs):
            if why := graph.guard_failure(None, {}):
                return why
            for part in call.parts if call is not None and graph.input_branches.branches else ():
                values = variable_values(key.variables, part.leaves)
                if part.is_whole and not graph.is_valid_for(1, values):
                    continue  # another graph runs this microbatch
                if why := graph.guard_failure(part.leaves, {"b": part.batch_size, **values}):
                    return why
        return ""


@dataclass(eq=False)
class _Program:
    """The artifacts that run batches of ``rows`` rows."""

    rows: int
    groups: MicrobatchGroups

    def is_valid_for(self, rows: int, values: Sequence[Sizes]) -> bool:
        """Whether the artifacts are valid for a batch with these values, or for microbatches with theirs."""
        first = 0
        for artifact, sizes in self.groups if rows == self.rows else ():
            own = values[first : first + sum(sizes)] if len(values) > 1 else values
            whole = {self.rows} if artifact.plan.tail_stage is not None else set()
            if not all(is_valid_for(artifact.plan, whole.union(sizes) - {0}, each) for each in own):
                return False
            first += sum(sizes)
        return rows == self.rows


def is_valid_for(plan: Plan, sizes: Collection[int], values: Sizes) -> bool:
    """Whether the code of a plan is valid for microbatches of these rows, with these values."""
    return all(values[name] == fixed for name, fixed in plan.fixed_sizes.items()) and all(
        holds(guard, {**values, "b": rows}) for rows in sizes for guard in plan.guards
    )


@dataclass(eq=False)
class _Entry:
    """The programs of one signature, the most recently used last, and on rank 0 what they were made of."""

    programs: list[_Program] = field(default_factory=list)
    compiled: CompiledGraphs = field(default_factory=CompiledGraphs)


class CompileCache:
    """Compiled programs by signature, the most recently used last; evicts the least recently used."""

    def __init__(self) -> None:
        self._entries: dict[CaptureSignature, _Entry] = {}

    def find(self, signature: CaptureSignature, rows: int, call: ModelCall) -> MicrobatchGroups | None:
        """The artifacts that run this call with ``rows`` rows, if they were compiled."""
        entry = self._entries.get(signature)
        if entry is None:
            return None
        values = [variable_values(signature.key.variables, part.leaves) for part in call.parts]
        for program in reversed(entry.programs):
            if program.is_valid_for(rows, values):
                entry.programs.remove(program)
                self._use(signature, program)
                return program.groups
        return None

    def add(self, signature: CaptureSignature, rows: int, groups: MicrobatchGroups) -> None:
        """Add the artifacts of a call, and evict the least recently used."""
        entry = self._use(signature, _Program(rows, groups))
        del entry.programs[:-MAX_PROGRAMS]
        numbers = {compiled.number for program in entry.programs for compiled, _ in program.groups}
        entry.compiled = entry.compiled.only(numbers)
        complete = (each for each, held in self._entries.items() if held.programs)
        of_mode = [each for each in complete if each.key.mode is signature.key.mode]
        for oldest in of_mode[:-MAX_SIGNATURES]:
            del self._entries[oldest]

    def _use(self, signature: CaptureSignature, program: _Program) -> _Entry:
        """Make a program the most recently used of all."""
        entry = self._entries.pop(signature, None) or _Entry()
        entry.programs.append(program)
        self._entries[signature] = entry
        return entry

    @property
    def compiled(self) -> Iterator[Artifact]:
        """All artifacts in the cache."""
        for entry in self._entries.values():
            yield from (compiled for program in entry.programs for compiled, _ in program.groups)

    @property
    def staged_graphs(self) -> list[StagedGraph]:
        """All cut graphs."""
        return [staged for entry in self._entries.values() for staged in entry.compiled.graphs]

    def get(self, signature: CaptureSignature) -> CompiledGraphs:
        """The graphs and artifacts of a signature, on the rank that compiles."""
        entry = self._entries.get(signature)
        return entry.compiled if entry else CompiledGraphs()

    def put(self, signature: CaptureSignature, compiled: CompiledGraphs) -> None:
        """Set the graphs and artifacts of a signature."""
        self._entries.setdefault(signature, _Entry()).compiled = compiled

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """The last used version of a capture key whose guards hold; a new number if none holds.

        Guards on values of the call are not evaluated if ``call`` is None.
        """
        signatures = [each for each in self._entries if each.key == key]
        for signature in reversed(signatures):
            if not self._entries[signature].compiled.guard_failure(key, call):
                return signature.version
        return max((each.version for each in signatures), default=-1) + 1

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether the captured graphs are still valid for the model."""
        return not self.get(signature).guard_failure(signature.key, None)

    def recompile_reason(self, signature: CaptureSignature, call: ModelCall, change: str) -> str:
        """The reason why a call is compiled; logs it if the model is captured again.

        ``change`` says which variables of the call became symbolic.
        """
        if signature in self._entries:
            return "for other rows or sizes than before"
        key, reason = signature.key, change
        similar = [each for each in self._entries if each.key.without_fingerprint == key.without_fingerprint]
        if similar and similar[-1].key.fingerprint != key.fingerprint:
            reason = difference(similar[-1].key.fingerprint.values, key.fingerprint.values)
        elif same := [each for each in similar if each.key == key]:
            failure = self.get(same[-1]).guard_failure(key, call)
            reason = f"{failure}{_OFTEN * (signature.version >= 3)}"
        if reason:
            notice("recompiling: %s", reason)
        return reason or f"for the first call like this ({key.mode})"

    def read(self, signature: CaptureSignature) -> dict[str, Any]:
        """The Python values that the model and the loss read in this signature's captures, by expression."""
        graphs = [staged.graph for staged in self.get(signature).graphs]
        return {source: x for graph in graphs for source, x in graph.reads.plain.items()}


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
