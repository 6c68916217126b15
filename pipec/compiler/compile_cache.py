"""The in-memory cache of everything compiled for the calls of one pipeline.

Every rank makes the same calls in the same order, and so evicts the same entries. Rank 0 alone compiles: the
other ranks hold programs and no graphs.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from pipec.capture.model_call import ModelCall
from pipec.compiler.capture_key import CaptureKey, CaptureSignature
from pipec.compiler.microbatch_groups import CompiledArtifact, MicrobatchGroups
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import notice
from pipec.graph import Fingerprint, TrainingGraph, difference
from pipec.ir import Mode, Sizes
from pipec.ir.batch_split import variable_values
from pipec.ir.text_format import holds

MAX_SIGNATURES = 8
"""Most signatures cached for each mode, the value of torch._dynamo.config.recompile_limit.

Each has a captured graph."""

MAX_PROGRAMS = 32
"""Most programs cached for one signature: one for each number of rows, or size that the model depends on."""

_MAX_VALID_SIZES = 1024


@dataclass(frozen=True, eq=False)
class CompiledGraphs:
    """The cut graphs of one signature, and the artifacts generated from them.

    There are several graphs if the model specialises on a number of rows, or on a variable. The key of an
    artifact is its graph, its number of microbatches, and the rows of its first microbatch.
    """

    graphs: tuple[StagedGraph, ...] = ()
    artifacts: Mapping[tuple[StagedGraph, int, int], CompiledArtifact] = field(default_factory=dict)

    def only(self, numbers: Collection[int]) -> "CompiledGraphs":
        """The artifacts with these numbers, and the graphs that they were generated from."""
        artifacts = {key: compiled for key, compiled in self.artifacts.items() if compiled.number in numbers}
        used = {staged for staged, _, _ in artifacts}
        return CompiledGraphs(tuple(staged for staged in self.graphs if staged in used), artifacts)


@dataclass(eq=False)
class _CachedProgram:
    """The artifacts that run batches of ``rows`` rows, and the sizes for which their guards held."""

    rows: int
    groups: MicrobatchGroups
    _valid_sizes: set[tuple[float, ...]] = field(default_factory=set)

    def is_valid_for(self, rows: int, values: Sizes, repeated: tuple[tuple[int, int], ...]) -> bool:
        """Whether the artifacts are valid for such a batch. Evaluates guards once for each size."""
        if rows != self.rows or self.groups[0][0].artifact.plan.repeated not in (None, repeated):
            return False
        sizes = tuple(values.values())
        if sizes in self._valid_sizes:
            return True
        if len(self._valid_sizes) >= _MAX_VALID_SIZES:  # for example, a number that differs in every step
            self._valid_sizes.clear()
        is_valid = self._guards_hold(values)
        if is_valid:
            self._valid_sizes.add(sizes)
        return is_valid

    def _guards_hold(self, values: Sizes) -> bool:
        plans = [(compiled.artifact.plan, {*sizes} - {0}) for compiled, sizes in self.groups]
        for plan, sizes in plans:
            sizes |= {self.rows} if plan.tail_stage is not None else set()
        return all(
            all(values[name] == fixed for name, fixed in plan.fixed_sizes.items())
            and all(holds(guard, {**values, "b": rows}) for rows in sizes for guard in plan.guards)
            for plan, sizes in plans
        )


@dataclass(eq=False)
class _CachedCalls:
    """The programs of one signature, the most recently used at the end.

    ``compiled`` holds the graphs and artifacts of the programs, and ``used`` the time of the last use.
    """

    programs: list[_CachedProgram] = field(default_factory=list)
    compiled: CompiledGraphs = field(default_factory=CompiledGraphs)
    used: int = 0


class CompileCache:
    """Compiled programs by capture key and version; evicts the least recently used."""

    def __init__(self) -> None:
        self._calls: dict[CaptureKey, dict[int, _CachedCalls]] = {}
        self._clock = itertools.count(1)

    def find(self, signature: CaptureSignature, rows: int, call: ModelCall) -> MicrobatchGroups | None:
        """The artifacts that run this call with ``rows`` rows, if they were compiled."""
        cached = self._calls.get(signature.key, {}).get(signature.version)
        if cached is None:
            return None
        values = variable_values(signature.key.variables, call.leaves)
        for program in reversed(cached.programs):
            if program.is_valid_for(rows, values, call.repeated):
                self._use(cached, program)
                return program.groups
        return None

    def add(self, signature: CaptureSignature, rows: int, groups: MicrobatchGroups) -> None:
        """Add the artifacts of a call, and evict the least recently used."""
        cached = self._entry(signature)
        self._use(cached, _CachedProgram(rows, groups))
        numbers = {compiled.number for program in cached.programs for compiled, _ in program.groups}
        cached.compiled = cached.compiled.only(numbers)
        of_mode = [(each.used, other) for other, each in self._all() if other.key.mode is signature.key.mode]
        for _, oldest in sorted(of_mode, key=itemgetter(0))[:-MAX_SIGNATURES]:
            del self._calls[oldest.key][oldest.version]
            if not self._calls[oldest.key]:
                del self._calls[oldest.key]

    def _use(self, cached: _CachedCalls, program: _CachedProgram) -> None:
        cached.used = next(self._clock)
        if not cached.programs or cached.programs[-1] is not program:
            others = [each for each in cached.programs if each is not program]
            cached.programs = [*others, program][-MAX_PROGRAMS:]

    def _entry(self, signature: CaptureSignature) -> _CachedCalls:
        return self._calls.setdefault(signature.key, {}).setdefault(signature.version, _CachedCalls())

    @property
    def compiled(self) -> Iterator[CompiledArtifact]:
        """All artifacts in the cache."""
        for _, cached in self._all():
            yield from (compiled for program in cached.programs for compiled, _ in program.groups)

    @property
    def staged_graphs(self) -> list[StagedGraph]:
        """All cut graphs, in the order in which their keys were first compiled."""
        return [staged for _, cached in self._all() for staged in cached.compiled.graphs]

    def _all(self) -> Iterator[tuple[CaptureSignature, _CachedCalls]]:
        for key, versions in self._calls.items():
            yield from ((CaptureSignature(key, version), cached) for version, cached in versions.items())

    def get(self, signature: CaptureSignature) -> CompiledGraphs:
        """The graphs and artifacts of a signature, on the rank that compiles."""
        cached = self._calls.get(signature.key, {}).get(signature.version)
        return cached.compiled if cached else CompiledGraphs()

    def put(self, signature: CaptureSignature, compiled: CompiledGraphs) -> None:
        """Set the graphs and artifacts of a signature."""
        self._entry(signature).compiled = compiled

    def trained_graphs(self, key: CaptureKey) -> Iterator[TrainingGraph]:
        """The captured graphs of steps that train on calls such as this evaluation, the latest first."""
        yield from self._trained_graphs(key, key.fingerprint)

    def graphs_trained_in_other_modes(self, key: CaptureKey) -> Iterator[TrainingGraph]:
        """The same of a model whose modules were in other modes, as before ``eval()``."""
        mine = key.fingerprint.without("training")
        for other in {each.fingerprint.without("requires_grad"): None for each in self._calls}:
            if other != key.fingerprint and other.without("training") == mine:
                yield from self._trained_graphs(key, other)

    def _trained_graphs(self, key: CaptureKey, fingerprint: Fingerprint) -> Iterator[TrainingGraph]:
        for other in reversed(self._calls if key.mode is Mode.LOSS else ()):
            evaluated = replace(other, mode=Mode.LOSS, fingerprint=other.fingerprint.without("requires_grad"))
            if evaluated == replace(key, fingerprint=fingerprint):
                for cached in reversed(self._calls[other].values()):
                    yield from (staged.captured for staged in reversed(cached.compiled.graphs))

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """The latest version of a capture key whose guards hold; a new number if none holds.

        Guards on values of the call are not evaluated if ``call`` is None.
        """
        versions = self._calls.get(key, {})
        for number in reversed(versions):
            if not _guard_failure(versions[number].compiled.graphs, key, call):
                return number
        return max(versions, default=-1) + 1

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether the captured graphs are still valid for the model."""
        return not _guard_failure(self.get(signature).graphs, signature.key, None)

    def recompile_reason(self, signature: CaptureSignature, call: ModelCall, change: str) -> str:
        """The reason why a call is compiled; logs it if the model is captured again.

        ``change`` says which variables of the call became symbolic.
        """
        key, number = signature.key, signature.version
        versions, last = self._calls.get(key, {}), self._last_similar(key)
        if number in versions:
            return "for other rows or sizes than before"
        reason = change
        if last is not None and last.fingerprint != key.fingerprint:
            reason = difference(last.fingerprint.values, key.fingerprint.values)
        elif versions and number > max(versions):
            failure = _guard_failure(versions[max(versions)].compiled.graphs, key, call)
            reason = f"{failure}{_OFTEN * (number >= 3)}"
        if reason:
            notice("recompiling: %s", reason)
        return reason or f"for the first call like this ({key.mode})"

    def _last_similar(self, key: CaptureKey) -> CaptureKey | None:
        """The most recently used key that differs from this one at most in its fingerprint and variables."""
        similar = key.without_fingerprint
        keys = [(x.used, each.key) for each, x in self._all() if each.key.without_fingerprint == similar]
        return max(keys, key=itemgetter(0))[1] if keys else None

    def read(self, signature: CaptureSignature) -> dict[str, Any]:
        """The Python values that the model and the loss read in this signature's captures, by expression."""
        graphs = [staged.graph for staged in self.get(signature).graphs]
        return {source: x for graph in graphs for source, x in graph.reads.plain.items()}


def _guard_failure(known: Sequence[StagedGraph], key: CaptureKey, call: ModelCall | None) -> str:
    """The first guard of the captures that no longer holds, as text; empty if all hold."""
    leaves, sizes = None, {}
    if call is not None:
        leaves = call.leaves
        sizes = {"b": call.batch_size, **variable_values(key.variables, leaves)}
    return next((why for each in known if (why := each.graph.guard_failure(leaves, sizes))), "")


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
