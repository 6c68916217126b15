"""What is kept of all that was compiled for one pipeline: what was used last.

Every rank makes the same calls in the same order, and so lets go of the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipec.capture.model_call import ModelCall
from pipec.compiler.capture_cache import CaptureSignature
from pipec.compiler.microbatch_groups import CompiledArtifact, MicrobatchGroups
from pipec.ir import Sizes
from pipec.ir.batch_split import variable_values
from pipec.ir.text_format import holds

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


class ProgramCache:
    """Programs by signature, the one that was used last at the end."""

    def __init__(self) -> None:
        self._programs: dict[CaptureSignature, list[_CachedProgram]] = {}

    def find(self, signature: CaptureSignature, rows: int, call: ModelCall) -> MicrobatchGroups | None:
        """What runs this call, as if it had so many rows, if it was compiled."""
        programs = self._programs.get(signature, [])
        values = variable_values(signature.key.variables, call.leaves)
        for program in reversed(programs):
            if program.is_valid_for(rows, values):
                self._use(signature, program)
                return program.groups
        return None

    def add(self, signature: CaptureSignature, rows: int, groups: MicrobatchGroups) -> None:
        """Keep what was compiled for a call, and let go of what was used longest ago."""
        self._use(signature, _CachedProgram(rows, groups))
        alike = [each for each in self._programs if each.key.mode is signature.key.mode]
        for oldest in alike[:-MAX_SIGNATURES]:
            del self._programs[oldest]

    @property
    def compiled(self) -> Iterator[CompiledArtifact]:
        for programs in self._programs.values():
            yield from (compiled for program in programs for compiled, _ in program.groups)

    def _use(self, signature: CaptureSignature, program: _CachedProgram) -> None:
        programs = self._programs.pop(signature, [])
        others = [each for each in programs if each is not program]
        self._programs[signature] = [*others, program][-MAX_PROGRAMS:]
