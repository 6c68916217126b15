"""Every Python and console block of README.md and docs/ runs, and prints what the page shows."""

import contextlib
import io
import json
import logging
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doc_blocks import ROOT, Block, blocks, commands, pages, replace, require_shown
from typer.testing import CliRunner

from pipec import console
from pipec.cli import app

BLOCKS = {page: list(blocks(page)) for page in pages()}
PYTHON_PAGES = [page for page, found in BLOCKS.items() if any(each.language == "python" for each in found)]
FAST = re.compile(r"pipec schedule [\w-]+( -|$)(?!.* -o )|pip |make ")
COMMANDS = [
    pytest.param(
        block,
        command,
        printed,
        id=f"{block}-{command}",
        marks=() if FAST.match(command) else pytest.mark.slow,
    )
    for found in BLOCKS.values()
    for block in found
    if block.language == "console" and not block.needs_gpu
    for command, printed in commands(block)
]

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.slow
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    update = request.config.getoption("--update-golden")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    torch.manual_seed(0)
    names = namespace(monkeypatch)
    printed = ""
    for block in BLOCKS[page]:
        if block.language == "output" and update:
            replace(block, printed)
        elif block.language == "output":
            require_shown(block.text, printed, block)
        elif block.language == "python":
            printed = run(block, names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.slow
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` runs notebooks in Jupyter; this needs no Jupyter."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "commit notebooks without outputs"
    names = namespace(monkeypatch)
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, {cell['id']}", "exec"), names)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    yield
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(True)


def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a module that can be imported, as Dynamo wants it."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


def run(block: Block, names: dict[str, Any]) -> str:
    """What the block prints; its names go into ``names``."""
    if block.mark.startswith("quotes: "):
        source = (ROOT / block.mark.removeprefix("quotes: ")).read_text(encoding="utf-8")
        assert " ".join(block.text.split()) in " ".join(source.split()), f"{block} is not in the file"
        return ""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    if block.mark.startswith("file: "):
        Path(block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        return ""
    if block.needs_gpu:
        return ""
    out, expected = io.StringIO(), block.mark.removeprefix("raises: ") if block.mark else None
    with contextlib.redirect_stdout(out), logged_to(out):
        try:
            exec(code, names)
        except Exception as error:
            if type(error).__name__ != expected:
                raise
            return f"{type(error).__module__}.{expected}: {error}"
    assert not expected, f"{block} raised no {expected}"
    return out.getvalue()


@contextlib.contextmanager
def logged_to(out: io.StringIO) -> Iterator[None]:
    """What pipec logs goes to ``out``, as it goes to the terminal of a script."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("pipec: %(message)s"))
    console.logger.addHandler(handler)
    try:
        yield
    finally:
        console.logger.removeHandler(handler)


@pytest.mark.parametrize(("block", "command", "printed"), COMMANDS)
def test_a_command_prints_what_is_shown(
    block: Block, command: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        known = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}  # type: ignore[index]
        for name, _, extras in (each.partition("[") for each in words[2:] if not each.startswith("-")):
            assert name in {project["name"], *known}
            assert set(re.findall(r"[\w-]+", extras)) <= set(project["optional-dependencies"])
        return
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for each in BLOCKS[block.page]:
        if each.language == "python" and each.mark.startswith("file: "):
            (tmp_path / each.mark.removeprefix("file: ")).write_text(each.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if words[0] == "pipec":
        result = CliRunner().invoke(app, words[1:])
        actual, status = result.output, result.exit_code
    else:
        done = subprocess.run(
            [*interpreter(words[0]), *words[1:]], capture_output=True, text=True, timeout=200
        )
        actual, status = done.stdout, done.returncode
    assert (status != 0) == printed.startswith("error"), actual
    if printed.strip():
        require_shown(printed, actual, block)


def interpreter(name: str) -> list[str]:
    return {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[name]
