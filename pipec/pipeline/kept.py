"""What is kept of all that was compiled for one pipeline: what was used last.

Every rank makes the same calls in the same order, and so lets go of the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipec.capture.call import Call
from pipec.compiler.captures import Signature
from pipec.compiler.groups import Compiled, Groups
from pipec.ir import Sizes
from pipec.ir.batch import variable_values
from pipec.ir.text import holds

MOST_SIGNATURES = 8
"""Of each mode, as torch._dynamo.config.recompile_limit has it. Each has a captured graph."""

MOST_PROGRAMS = 32
"""Of one signature: for other numbers of rows, and where the code of the model depends on a size."""


_MOST_SERVED = 1024


@dataclass(eq=False)
class _Program:
    """What runs batches of so many rows, where the sizes are such as it was compiled for."""

    rows: int
    groups: Groups
    _served: set[tuple[float, ...]] = field(default_factory=set)

    def serves(self, rows: int, values: Sizes) -> bool:
        """Whether it is right for such a batch. Conditions that have held are not looked at again."""
        if rows != self.rows:
            return False
        sizes = tuple(values.values())
        if sizes in self._served:
            return True
        if len(self._served) >= _MOST_SERVED:  # such as a number that is another one in every step
            self._served.clear()
        is_right = self._holds(values)
        if is_right:
            self._served.add(sizes)
        return is_right

    def _holds(self, values: Sizes) -> bool:
        plans = [(compiled.artifact.plan, {*sizes}) for compiled, sizes in self.groups]
        return all(
            all(values[name] == fixed for name, fixed in plan.fixed.items())
            and all(holds(guard, {**values, "b": rows}) for rows in sizes for guard in plan.guards)
            for plan, sizes in plans
        )


class Kept:
    """Programs by signature, the one that was used last at the end."""

    def __init__(self) -> None:
        self._programs: dict[Signature, list[_Program]] = {}

    def find(self, signature: Signature, rows: int, call: Call) -> Groups | None:
        """What runs this call, as if it had so many rows, if it was compiled."""
        programs = self._programs.get(signature, [])
        values = variable_values(signature.kind.variables, call.leaves)
        for program in reversed(programs):
            if program.serves(rows, values):
                self._use(signature, program)
                return program.groups
        return None

    def add(self, signature: Signature, rows: int, groups: Groups) -> None:
        """Keep what was compiled for a call, and let go of what was used longest ago."""
        self._use(signature, _Program(rows, groups))
        alike = [each for each in self._programs if each.kind.mode is signature.kind.mode]
        for oldest in alike[:-MOST_SIGNATURES]:
            del self._programs[oldest]

    @property
    def compiled(self) -> Iterator[Compiled]:
        for programs in self._programs.values():
            yield from (compiled for program in programs for compiled, _ in program.groups)

    def _use(self, signature: Signature, program: _Program) -> None:
        programs = self._programs.pop(signature, [])
        others = [each for each in programs if each is not program]
        self._programs[signature] = [*others, program][-MOST_PROGRAMS:]
