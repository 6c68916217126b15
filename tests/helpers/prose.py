"""``make prose``: phrases that have to be decoded, in pages, public docstrings, options and commands.

Each has a plain form: the noun in place of "that of" and "of which"; a verb in place of "is there". Code
blocks, names in backquotes and quoted words are left out.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pipec
from pipec import cli, options

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
WORST = re.compile(
    r"\b(th(at|ose|ese) of|of which|by which|whose|(is|are) there|anew|of what (is|was)|comes? of|"
    r"lets? go of|without a flush|as all others do|is held by|and its kin)\b(?!\?)",
    re.IGNORECASE,
)
CODE = re.compile(r"<!--.*?-->|^( *)```.*?^\1```|``.+?``|`[^`\n]+`|\"[^\"\n]+\"", re.DOTALL | re.MULTILINE)


def docstrings() -> Iterator[tuple[str, str]]:
    """Texts of public names, of options and of commands, each with its place."""
    for name in pipec.__all__:
        found = getattr(pipec, name)
        yield f"pipec.{name}", found.__doc__ or ""
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            if not member.startswith("_"):
                yield f"pipec.{name}.{member}", inspect.getdoc(value) or ""
    for command in cli.app.registered_commands:
        yield f"pipec {command.callback.__name__}", command.callback.__doc__ or ""  # type: ignore[union-attr]
    yield from ((f"option {name}", each.meaning) for name, each in options.OPTIONS.items())


def faults() -> Iterator[str]:
    for path in PAGES:
        text = CODE.sub(lambda code: "\n" * code[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            yield from (f"{path.relative_to(ROOT)}:{number}: {each[0]}" for each in WORST.finditer(line))
    for place, text in docstrings():
        yield from (f"{place}: {each[0]}" for each in WORST.finditer(CODE.sub("", text)))


if __name__ == "__main__":
    sys.exit("\n".join(faults()) or None)
