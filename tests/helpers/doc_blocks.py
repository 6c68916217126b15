"""The blocks of README.md and docs/: what a page shows, and how a test runs it.

A page is Markdown. Its ```python blocks run in order in one namespace, in an empty folder that has
``examples/`` of the repository. An ```output block is what the ``python`` block above it printed. The lines
of a ```console block behind ``$`` are commands, the others what they printed. ``...`` stands for any text.
Comments that readers do not see direct the test:

    <!-- setup             code that runs here, which readers take for granted
    <!-- file: a.py -->    the block below is written into this file and not run
    <!-- needs: gpu -->    the block below is compiled and not run
    <!-- quotes: a.py -->  the block below is an excerpt of this file of the repository, and not run
    <!-- raises: Name -->  the block below ends in this error, whose text is the output
    <!-- diff: a.py -->    the block below says which lines this file changes of a script without pipec
"""

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->"
    r"|(?:<!-- (?P<mark>needs: gpu|(?:file|raises|quotes|diff): \S+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, or a setup comment, of ``page``; ``line`` is where its text begins."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""

    @property
    def needs_gpu(self) -> bool:
        return self.mark == "needs: gpu"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README.md and every page of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page`` in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found["setup"] is not None:
            yield Block(page, _line(text, found.start("setup")), "python", found["setup"])
        else:
            line = _line(text, found.start("text"))
            yield Block(page, line, found["language"], found["text"], found["mark"] or "")


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command of a console block, without its comment, with what it is shown to print."""
    found = re.findall(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    return [(re.sub(r"\s+# .*$", "", command), printed) for command, printed in found]


def require_shown(shown: str, actual: str, where: object) -> None:
    """Raise AssertionError unless ``actual`` is ``shown``.

    In an excerpt ``...`` stands for any text, and the width of blanks does not matter.
    """
    wanted, printed = (re.sub(r" +$", "", f"{text.rstrip()}\n", flags=re.M) for text in (shown, actual))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE if "..." in wanted else 0
    is_shown = doctest.OutputChecker().check_output(wanted, printed, flags)
    assert is_shown, f"{where} shows:\n{shown}\nprinted:\n{actual}"


def replace(block: Block, printed: str) -> None:
    """Write what was printed into the page, unless the block shows an excerpt of it."""
    if "..." not in block.text:
        page = block.page.read_text(encoding="utf-8")
        fence, _, rest = page.partition(f"```{block.language}\n{block.text}```")
        lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
        block.page.write_text(f"{fence}```{block.language}\n{lines}```{rest}", encoding="utf-8")


def without_pipec(block: Block) -> str:
    """The script that a ``diff`` block starts from: the file that it names, with the old lines in place."""
    code = (ROOT / block.mark.removeprefix("diff: ")).read_text(encoding="utf-8")
    for change in block.text.split("...\n"):
        old, new = (
            "".join(line[1:] + "\n" for line in change.splitlines() if line.startswith(sign)) for sign in "-+"
        )
        assert code.count(new) == 1, new
        code = code.replace(new, old)
    return code
