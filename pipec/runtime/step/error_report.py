"""Error messages of failed instructions: the place, the problem, and the instructions before it."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from pipec.errors import ExecutionError, PipecError, TransportError
from pipec.ir import Instruction, Program
from pipec.ir.text_format import instruction_lines
from pipec.runtime.messages.transport import Transport

_NUM_LINES = 5
"""How many instructions an error shows, the failed one last."""


@contextlib.contextmanager
def reporting_failures(transport: Transport, describe: Callable[[str], str]) -> Iterator[None]:
    """Report failures inside a ``with`` to the other ranks, and raise the error that ``describe`` returns."""
    try:
        yield
    except TransportError as error:
        failure = TransportError(describe(str(error)))
        transport.fail(failure)
        raise failure from error.__cause__
    except Exception as error:
        explained = _explained(transport, describe, error)
        transport.fail(explained)
        raise explained from error
    except BaseException as interrupt:  # such as Ctrl-C
        transport.fail(interrupt)
        raise


def _explained(transport: Transport, describe: Callable[[str], str], error: Exception) -> PipecError:
    """The error to raise for a failed instruction, which may have read a value that was never received."""
    try:
        transport.check()
    except TransportError as interruption:
        return TransportError(describe(str(interruption)))
    return ExecutionError(describe(_described(error)))


def failure_message(program: Program, place: int, instruction: Instruction, problem: str) -> str:
    """The problem of an instruction, which is at ``place`` of a program or of its round."""
    where = ", ".join([f"rank {program.rank}", *_fields_of(instruction), instruction.op])
    lines = instruction_lines(program)[max(0, place + 1 - _NUM_LINES) : place + 1]
    heading = f"last instructions of rank {program.rank}:"
    return "\n".join([f"{where}: {problem}", heading, *(f"    {line}" for line in lines)])


def _described(error: Exception) -> str:
    """``ValueError: what it says (stage_1.py, line 57, in backward)``"""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(frame.filename.strip("<>")).name
    return f"{type(error).__name__}: {error} ({file}, line {frame.lineno}, in {frame.name})"


def _fields_of(instruction: Instruction) -> list[str]:
    fields = {
        "stage": instruction.stage,
        "microbatch": instruction.microbatch,
        "segment": instruction.segment,
    }
    return [f"{word} {number}" for word, number in fields.items() if number != -1]
