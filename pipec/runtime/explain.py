"""What to say of an instruction that failed: where it was, what the problem is, and what led there."""

import traceback
from pathlib import Path

from pipec.ir import Instruction, Program
from pipec.ir.text import instruction_lines

_NUM_LINES = 5
"""How many instructions an error shows, the failed one last."""


def located(program: Program, place: int, instruction: Instruction, problem: str) -> str:
    """The problem of an instruction, which is at ``place`` of a program or of its round."""
    where = ", ".join([f"rank {program.rank}", *_cell_of(instruction), instruction.op])
    lines = instruction_lines(program)[max(0, place + 1 - _NUM_LINES) : place + 1]
    heading = f"last instructions of rank {program.rank}:"
    return "\n".join([f"{where}: {problem}", heading, *(f"    {line}" for line in lines)])


def described(error: Exception) -> str:
    """``ValueError: what it says (stage_1.py, line 57, in backward)``"""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
    )


def _cell_of(instruction: Instruction) -> list[str]:
    cell = {"stage": instruction.stage, "microbatch": instruction.microbatch}
    return [f"{word} {number}" for word, number in cell.items() if number != -1]
