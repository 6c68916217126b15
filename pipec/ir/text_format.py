"""Text of values, links, programs and quantities, and a parser of programs. Deterministic, without torch.

A program is one instruction a line, under a line that names its rank::

    rank 1: 6 instructions
    0  recv         stage 1  mb 0  hidden_3 (0 -> 1)  from rank 0  slot 0
    1  forward      stage 1  mb 0
    2  send         stage 1  mb 0  hidden_6 (1 -> 2)  to rank 2
    3  free         stage 1  mb 0
    4  recv                        result loss (3 -> all)  from rank 3
    5  reduce_grad  stage 1        bucket 0

A compute of one segment names it, as in ``backward  stage 1  mb 3  segment 0``.

A field that is -1 is left out. Columns are aligned with at least two spaces, and a field never contains two.
"""

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipec.errors import DAMAGED_DATA_ERRORS, ArtifactError
from pipec.ir import Dim, Instruction, Link, Op, Phase, Program, Sizes, Value

PHASE_LETTERS: Mapping[Phase, str] = {
    Phase.FORWARD: "F",
    Phase.RECOMPUTE: "R",
    Phase.BACKWARD: "B",
    Phase.BACKWARD_INPUT: "B",
    Phase.BACKWARD_WEIGHT: "W",
}
"""The labels of computes in pictures and in texts of compute orders."""

_DTYPES: Mapping[str, tuple[str, int]] = {
    "bool": ("b8", 1),
    "uint8": ("u8", 1),
    "int8": ("i8", 1),
    "int16": ("i16", 2),
    "int32": ("i32", 4),
    "int64": ("i64", 8),
    "float8_e4m3fn": ("f8e4m3fn", 1),
    "float8_e5m2": ("f8e5m2", 1),
    "float16": ("f16", 2),
    "bfloat16": ("bf16", 2),
    "float32": ("f32", 4),
    "float64": ("f64", 8),
    "complex64": ("c64", 8),
    "complex128": ("c128", 16),
}
"""torch's dtypes: the abbreviation in text, and the bytes of one element."""


def format_value(value: Value) -> str:
    """``hidden_3: f32[b, 128, 256]``"""
    return f"{value.name}: {format_type(value)}"


def format_type(value: Value) -> str:
    """``f32[b, 128, 256]``"""
    return f"{format_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"


def format_dtype(dtype: str) -> str:
    """``f32`` for ``float32``; a dtype without an abbreviation keeps its name."""
    return _DTYPES[dtype][0] if dtype in _DTYPES else dtype


def format_link(link: Link) -> str:
    """``hidden_3 (0 -> 1)``, or with its payload if it moves once per step: ``result loss (3 -> all)``."""
    kind = "" if link.payload.per_microbatch else f"{link.payload} "
    target = "all" if link.is_broadcast else link.target
    return f"{kind}{', '.join(value.name for value in link.values)} ({link.source} -> {target})"


def format_replicas(replicas: Sequence[int]) -> str:
    """``3-2-1``, or one number if all stages have the same."""
    return "-".join(map(str, replicas if len({*replicas}) > 1 else replicas[:1]))


def format_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit: ``11.8 MB``."""
    return _scaled(num_bytes, 1.0, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: ``4.5 µs``, ``12.3 ms``, ``1.53 s``."""
    if seconds == 0:
        return "0 s"
    return _scaled(seconds, 1e-9, ("ns", "µs", "ms", "s"))


def _scaled(amount: float, smallest: float, units: Sequence[str]) -> str:
    amount /= smallest
    for unit in units[:-1]:
        if abs(float(f"{amount:.3g}")) < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{float(f'{amount:.3g}'):.15g} {units[-1]}"


_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}

_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "float": float,
    "round": round,
    **{f"math.{function.__name__}": function for function in (math.ceil, math.floor, math.sqrt, math.trunc)},
}
"""As in ``math.trunc(0.5*float(b))``, the size of the output of ``F.interpolate`` for size b."""

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_LARGEST_EXPONENT = 8
_LARGEST_DIM = 2**63


def evaluate_dim(dim: Dim, sizes: Sizes) -> int:
    """The value of a dimension for the values ``sizes`` of its names.

    Raises:
        ArtifactError: ``dim`` is not an integer expression in these names that fits 64 bits.
    """
    if isinstance(dim, int):
        return dim
    try:
        size = _evaluate(_parsed(dim), sizes)
        if not isinstance(size, int):
            raise ValueError(f"{size} is not an integer")
    except DAMAGED_DATA_ERRORS as error:
        raise ArtifactError(
            f"dimension {_shown(dim)!r} cannot be evaluated for {_listed(sizes)}: {error}; "
            f"expected integers and {', '.join(sizes) or 'no names'} joined by + - * // % **"
        ) from error
    return size


def holds(guard: str, sizes: Sizes) -> bool:
    """Whether a condition on sizes, such as ``t <= 512``, is true.

    Raises:
        ArtifactError: ``guard`` compares anything but dimensions and numbers in the names of ``sizes``.
    """
    try:
        match _parsed(guard):
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return _COMPARISONS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
            case other:
                raise ValueError(f"{type(other).__name__} is not allowed")
    except DAMAGED_DATA_ERRORS as error:
        raise ArtifactError(
            f"condition {_shown(guard)!r} cannot be evaluated for {_listed(sizes)}: {error}; "
            "expected two dimensions joined by == != < <= > or >="
        ) from error


def names_in(dim: Dim) -> set[str]:
    """The names in a dimension."""
    return set(re.findall(r"[A-Za-z_]\w*", dim)) if isinstance(dim, str) else set()


def _shown(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _listed(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no sizes"


@functools.lru_cache(1 << 10)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _evaluate(node: ast.expr, sizes: Sizes) -> float:
    match node:
        case ast.Constant(value=int(number) | float(number)) if not isinstance(number, bool):
            result = number
        case ast.Name(id=name) if name in sizes:
            result = sizes[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_evaluate(operand, sizes))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            base, other = _evaluate(left, sizes), _evaluate(right, sizes)
            if isinstance(op, ast.Pow) and not 0 <= other <= _LARGEST_EXPONENT:
                raise ValueError(f"exponent {other} is not within 0 to {_LARGEST_EXPONENT}")
            result = _OPERATORS[type(op)](base, other)
        case ast.Call(args=arguments, keywords=[]) if (name := ast.unparse(node.func)) in _FUNCTIONS:
            result = _FUNCTIONS[name](*(_evaluate(argument, sizes) for argument in arguments))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed")
    if abs(result) >= _LARGEST_DIM:
        raise ValueError("it exceeds 64 bits")
    return result


def value_bytes(value: Value, sizes: Sizes) -> int:
    """Bytes of a value for the values ``sizes`` of the names in its shape.

    Raises:
        ArtifactError: its dtype is unknown, or a dimension cannot be evaluated.
    """
    if value.dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ArtifactError(f"{value.name} has unknown dtype {value.dtype!r}; expected one of {known}")
    return math.prod(evaluate_dim(dim, sizes) for dim in value.shape) * _DTYPES[value.dtype][1]


def format_program(program: Program) -> str:
    """The text form of a program, which ``parse_program`` reads back to an equal one."""
    return "\n".join([_heading(program), *instruction_lines(program), ""])


def _heading(program: Program) -> str:
    again = f", again every {program.period} mb" if program.period else ""
    return f"rank {program.rank}: {len(program.instructions)} instructions{again}"


def instruction_lines(program: Program) -> list[str]:
    """One aligned line per instruction."""
    rows = [_fields(number, instruction) for number, instruction in enumerate(program.instructions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_aligned(row, widths) for row in rows]


def _fields(number: int, instruction: Instruction) -> tuple[str, ...]:
    direction = "to" if instruction.op is Op.SEND else "from"
    return (
        str(number),
        instruction.op.value,
        _unless_absent("stage", instruction.stage),
        _unless_absent("mb", instruction.microbatch),
        _unless_absent("segment", instruction.segment),
        format_link(instruction.link) if instruction.link else "",
        _unless_absent(f"{direction} rank", instruction.peer),
        _unless_absent("slot", instruction.slot),
        _unless_absent("bucket", instruction.bucket),
        _unless_absent("model_collective", instruction.model_collective),
        _unless_absent("version", instruction.version),
    )


def _unless_absent(word: str, number: int) -> str:
    return "" if number == -1 else f"{word} {number}"


def _aligned(row: Iterable[str], widths: Sequence[int]) -> str:
    number, *fields = row
    cells = [field.ljust(width) for field, width in zip(fields, widths[1:], strict=True) if width]
    return "  ".join([number.rjust(widths[0]), *cells]).rstrip()


_HEADING = re.compile(r"rank (\d{1,9}): (\d{1,9}) instructions(?:, again every ([1-9]\d{0,8}) mb)?")
_NUMBER = re.compile(r"(stage|mb|segment|from rank|to rank|slot|bucket|model_collective|version) (\d{1,9})")
_NAMES = {"mb": "microbatch", "from rank": "peer", "to rank": "peer"}


def parse_program(text: str, links: Iterable[Link]) -> Program:
    """The program that ``format_program`` printed; ``links`` are those of its plan.

    Raises:
        ArtifactError: the text is not such a program; the message names the line and what was expected.
    """
    heading, *lines = text.removesuffix("\n").split("\n")
    match = _HEADING.fullmatch(heading)
    if not match:
        raise _unexpected(1, heading, "a line such as 'rank 0: 12 instructions'")
    rank, count, period = (int(number or 0) for number in match.groups())
    if len(lines) != count:
        raise _unexpected(1, heading, f"{len(lines)} instructions, as many as lines follow")
    by_label = {format_link(link): link for link in links}
    instructions = tuple(_parse_line(number, line, by_label) for number, line in enumerate(lines))
    return Program(rank, instructions, period)


def _parse_line(number: int, line: str, links: Mapping[str, Link]) -> Instruction:
    fields = re.split(" {2,}", line.strip())
    if len(fields) < 2 or fields[1] not in [*Op]:
        raise _unexpected(number + 2, line, "'NUMBER  OP  FIELD  FIELD ...' with a known op")
    named: dict[str, Any] = {"stage": -1}
    for field in fields[2:]:
        if match := _NUMBER.fullmatch(field):
            named[_NAMES.get(match[1], match[1])] = int(match[2])
        elif field in links:
            named["link"] = links[field]
        else:
            known = f"a field such as 'mb 3', or a link of the plan: {'; '.join(links) or 'it has none'}"
            raise _unexpected(number + 2, line, f"in place of {field!r} {known}")
    instruction = Instruction(Op(fields[1]), **named)
    canonical = " ".join(filter(None, _fields(number, instruction)))
    if " ".join(line.split()) != canonical:
        raise _unexpected(number + 2, line, repr(canonical))
    return instruction


def _unexpected(line_number: int, line: str, expected: str) -> ArtifactError:
    shown = line if len(line) <= 120 else f"{line[:120]}..."
    return ArtifactError(f"program text, line {line_number}: found {shown!r}, expected {expected}")
