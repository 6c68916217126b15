"""What was compiled for the calls of one pipeline: the only memory of it in a process.

Every rank makes the same calls in the same order, and so lets go of the same. Rank 0 alone compiles: the
others have programs, and no graphs.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.compiler.capture_key import CaptureKey, CaptureSignature
from pipec.compiler.compile import CompiledGraphs
from pipec.compiler.microbatch_groups import CompiledArtifact, MicrobatchGroups
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import log
from pipec.ir import Sizes
from pipec.ir.batch_split import variable_values
from pipec.ir.text_format import holds
from pipec.torch_compat import ValuePath

MAX_SIGNATURES = 8
"""Of each mode, as torch._dynamo.config.recompile_limit has it. Each has a captured graph."""

MAX_PROGRAMS = 32
"""Of one signature: for other numbers of rows, and where the code of the model depends on a size."""

_MOST_SERVED = 1024


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
    compiled: CompiledGraphs = field(default_factory=CompiledGraphs)
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
        alike = [(each.used, other) for other, each in self._all() if other.key.mode is signature.key.mode]
        for _, oldest in sorted(alike, key=itemgetter(0))[:-MAX_SIGNATURES]:
            del self._calls[oldest.key][oldest.version]
            if not self._calls[oldest.key]:
                del self._calls[oldest.key]

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
        for _, known in self._all():
            yield from (made for program in known.programs for made, _ in program.groups)

    @property
    def staged_graphs(self) -> list[StagedGraph]:
        """All graphs, in the order in which their keys were compiled first."""
        return [staged for _, known in self._all() for staged in known.compiled.graphs]

    def _all(self) -> Iterator[tuple[CaptureSignature, _CachedCalls]]:
        for key, versions in self._calls.items():
            yield from ((CaptureSignature(key, version), known) for version, known in versions.items())

    def get(self, signature: CaptureSignature) -> CompiledGraphs:
        """The graphs and artifacts for a signature, on the rank that compiles."""
        known = self._calls.get(signature.key, {}).get(signature.version)
        return known.compiled if known else CompiledGraphs()

    def put(self, signature: CaptureSignature, compiled: CompiledGraphs) -> None:
        """Keep the graphs and artifacts for a signature."""
        self._entry(signature).compiled = compiled

    def version(self, key: CaptureKey, call: ModelCall | None) -> int:
        """Which capture of a capture key is still right, the latest first; a new number if none is.

        Without the call, whose values decide branches, any way that they went before is right.
        """
        versions = self._calls.get(key, {})
        for number in reversed(versions):
            if not _guard_failure(versions[number].compiled.graphs, key, call):
                return number
        return max(versions, default=-1) + 1

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether what was captured is still right for the model."""
        return not _guard_failure(self.get(signature).graphs, signature.key, None)

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
            failure = _guard_failure(versions[max(versions)].compiled.graphs, key, call)
            reason = f"{failure}{_OFTEN * (number >= 3)}"
        if reason:
            log(f"pipec: recompiling: {reason}")
        return reason or f"for the first call like this ({key.mode})"

    def _last_like(self, key: CaptureKey) -> CaptureKey | None:
        """The key of the last call that was like one with this key, whatever state the model was in."""
        alike = [(x.used, each.key) for each, x in self._all() if each.key.without_state == key.without_state]
        return max(alike, key=itemgetter(0))[1] if alike else None

    def read(self, signature: CaptureSignature) -> dict[ValuePath, Any]:
        """The plain values that the code of the model and the loss read for this signature, and where."""
        graphs = [staged.graph for staged in self.get(signature).graphs]
        return {place: x for graph in graphs for place, x in graph.model_guards.constants.items()}


def _guard_failure(known: Sequence[StagedGraph], key: CaptureKey, call: ModelCall | None) -> str:
    """What captures took for granted and is no longer so; empty if all is."""
    leaves, sizes = None, {}
    if call is not None:
        leaves = call.leaves
        sizes = {"b": call.batch_size, **variable_values(key.variables, leaves)}
    return next((why for each in known if (why := each.graph.guard_failure(leaves, sizes))), "")


_OFTEN = ". What changes often is better a tensor that step() is given, or a buffer of the model"
