"""The memory of the ranks in a step, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipec.ir import Program, RankMemory
from pipec.ir.memory_figures import MEMORY_CATEGORIES
from pipec.ir.text_format import format_bytes
from pipec.plan.plan_table import table_lines


@dataclass(frozen=True, repr=False)
class StepMemory(Sequence[RankMemory]):
    """The memory of each rank in a step, predicted or measured. It prints as a table."""

    ranks: Sequence[RankMemory]
    programs: Sequence[Program] = field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> float:
        """The peak bytes of the rank that needs most."""
        return max(each.peak_bytes for each in self.ranks)

    def __getitem__(self, rank: Any) -> Any:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        kinds = [
            kind for kind in MEMORY_CATEGORIES if any(each.bytes_by_category.get(kind) for each in self.ranks)
        ]
        amounts = [
            [*(each.bytes_by_category.get(kind, 0.0) for kind in kinds), each.peak_bytes]
            for each in self.ranks
        ]
        rows = (
            [str(each.rank), *map(format_bytes, own), self._at(each)]
            for each, own in zip(self.ranks, amounts, strict=True)
        )
        headings = ["rank", *kinds, "peak", "while it runs"]
        return "\n".join(table_lines(headings, rows, left=["while it runs"]))

    def __repr__(self) -> str:
        return str(self)

    def _at(self, memory: RankMemory) -> str:
        if memory.position < 0:
            return ""
        instruction = self.programs[memory.rank].instructions[memory.position]
        of = f" of microbatch {instruction.microbatch}" if instruction.microbatch >= 0 else ""
        return f"{instruction.op} of stage {instruction.stage}{of}"
