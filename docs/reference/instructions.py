"""Writes ``instructions.md``: every op with what it reads and changes, from the table in ``ir/program.py``.

python docs/reference/instructions.py           # writes the page
python docs/reference/instructions.py --check   # fails if the page is stale
"""

import sys
from pathlib import Path

from pipec.ir import Op
from pipec.ir.program import CELLS

PAGE = Path(__file__).with_suffix(".md")

TEXT = """\
# Instructions

What does an instruction read, change and wait for? Each line of a rank's program is one op on *cells*. A cell
has a life: the events that it has, in order. `a?` is at most once, `a*` any number of times, `a+` once or
more, `a | b` one of both. The verifier refuses a program in which an event comes before what it needs, twice,
or never, or one that names a field that it has not. [Architecture](../architecture.md) says how. This page is
printed from `pipec/ir/program.py`.

## Cells

The plan demands the event *due* of each cell that it has.

| cell | one for each | life | due |
|---|---|---|---|
{cells}

## Ops

`message.read` is the event `read` of the cells `message` that an instruction is about: the cells of its own
fields, or all of its stage or rank where it names none. `:result` means only instructions with such a link.

| op | kind | fields | effects |
|---|---|---|---|
{ops}
"""


def page() -> str:
    """The page: a table of cells, and one of ops."""
    cells, ops = list[str](), list[str]()
    for cell, (fields, life, due) in CELLS.items():
        escaped = life.replace("|", "\\|")
        cells.append(f"| {cell} | {fields or 'step'} | `{escaped}` | {due.replace(' ', ' or ')} |")
    for op in Op:
        effects = " ".join(f"`{effect}`" for effect in op.traits.effects.split())
        ops.append(f"| `{op}` | {op.traits.kind.value} | {op.traits.fields} | {effects} |")
    return TEXT.format(cells="\n".join(cells), ops="\n".join(ops))


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is stale; write it with: python docs/reference/{Path(__file__).name}")
