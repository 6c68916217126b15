"""Formats lines of generated code, with comments in a column beside them."""

from collections.abc import Iterable, Iterator, Sequence

LINE_LENGTH = 100
SIDE_COLUMN = 84

OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")


def with_note(code: str, note: str) -> str:
    """``code`` with ``note`` in the side column."""
    return f"{code:<{SIDE_COLUMN}}  # {note}" if note else code


def format_statement(targets: str, code: str, note: str) -> list[str]:
    """``a, b = f(x)`` in the body of a function, with its note beside it.

    A long statement is broken inside its last bracket; so are its targets, if they are long.
    """
    whole = f"{targets} = {code}"
    first = len(whole) - len(code) + _opening(code) if code.endswith(CLOSING) else 0
    if first + 5 <= LINE_LENGTH or ", " not in targets:
        *lines, last = break_lines(whole, 4)
    else:
        *lines, last = ["    (", *_inner(split_arguments(targets), 8), *break_lines(f") = {code}", 4)]
    return [*lines, with_note(last, note)]


def break_lines(code: str, indent: int, tail: str = "") -> list[str]:
    """The lines of an expression. A long one is broken inside its last bracket, as are long arguments."""
    pad = " " * indent
    if indent + len(code) + len(tail) <= LINE_LENGTH or not code.endswith(CLOSING):
        return [pad + code + tail]
    start = _opening(code) + 1
    return [pad + code[:start], *_inner(split_arguments(code[start:-1]), indent + 4), pad + code[-1] + tail]


def _inner(items: Iterable[str], indent: int) -> list[str]:
    """Items separated by commas, in as few lines as possible."""
    every, lines, pad = [*items], list[str](), " " * indent
    for number, item in enumerate(every):
        tail = "," * (number < len(every) - 1)
        if lines and lines[-1].endswith(",") and len(lines[-1]) + len(item) + len(tail) < LINE_LENGTH:
            lines[-1] += f" {item}{tail}"
        else:
            lines += break_lines(item, indent, tail)
    return lines or [pad]


def _opening(code: str) -> int:
    """The position of the bracket that the last character closes."""
    depth = 0
    for index in range(len(code) - 1, -1, -1):
        depth += (code[index] in CLOSING) - (code[index] in OPENING)
        if not depth:
            return index
    raise AssertionError(f"{code} has more brackets closed than opened")


def split_arguments(code: str) -> Iterator[str]:
    """The arguments of a call, split at commas outside of brackets."""
    depth = start = 0
    for index, character in enumerate(code):
        depth += (character in OPENING) - (character in CLOSING)
        if not depth and code.startswith(", ", index):
            yield code[start:index]
            start = index + 2
    yield code[start:]


def tuple_source(items: Iterable[str]) -> str:
    """A tuple of these items."""
    every = list(items)
    return "(" + ", ".join(every) + ("," if len(every) == 1 else "") + ")"


def wrap_items(head: str, items: Sequence[str], tail: str) -> list[str]:
    """``head a, b, c tail`` on one line, or in brackets over several."""
    single = f"({items[0]},)" if len(items) == 1 and tail.startswith(" =") else ", ".join(items)
    if len(head) + len(single) + len(tail) <= LINE_LENGTH:
        return [head + single + tail]
    return [f"{head}(", *_inner(items, 8), f"    ){tail}"]
