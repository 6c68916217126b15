"""``docs/reference/messages.md`` has every message of the source, and nothing that is not there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pipec

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "reference" / "messages.py"

SOURCE = '''
"""A module."""
from pipec.console import warn
from pipec.errors import InputError, PlanError

ADVICE = "pass {} rows"
RULES = {"a": "it is too short", "b": "it is too long"}

class NarrowError(PlanError):
    """Of its own."""

def check(rows, kind, log):
    if rows < 0:
        raise InputError(f"the batch has {len(rows)} rows: {RULES[kind]}; " + ADVICE.format(4))
    if rows == 2:
        raise refused("it has two rows, which is not possible")
    message = "a warning"
    if kind:
        message += f" of {kind!r}"
    warn(message)
    log.warning("waited %.1f s for %s", rows, kind)
    raise NarrowError("no plan" if rows else "none; use more devices")

def refused(why):
    return InputError(f"refused: {why}")
'''

TEXTS = {
    ("InputError", "the batch has {number of rows} rows: it is too short; pass {} rows"),
    ("InputError", "the batch has {number of rows} rows: it is too long; pass {} rows"),
    ("InputError", "refused: it has two rows, which is not possible"),
    ("PipecWarning", "a warning"),
    ("PipecWarning", "a warning of {kind}"),
    ("logged warning", "waited {rows} s for {kind}"),
    ("NarrowError", "no plan"),
    ("NarrowError", "none; use more devices"),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package named pipec of two modules."""
    folder = tmp_path / "pipec"
    folder.mkdir()
    (folder / "errors.py").write_text(Path(pipec.__file__).with_name("errors.py").read_text())
    (folder / "plan.py").write_text(SOURCE)
    return folder


def test_texts_are_followed_through_the_source(script: ModuleType, package: Path) -> None:
    found = script.messages(script.read_source(package))
    assert {(each.kind, each.text) for each in found} == TEXTS


def test_a_text_that_cannot_be_read_is_refused(script: ModuleType, package: Path) -> None:
    with Path(package, "plan.py").open("a") as source:
        source.write("\ndef opaque(text):\n    raise InputError(text)\n")
    with pytest.raises(SystemExit, match=r"messages of pipec\.plan\.opaque cannot be read"):
        script.messages(script.read_source(package))


def test_a_module_in_no_group_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"pipec\.new has messages and is in no group"):
        script.group_of("pipec.new")


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("x is 3; pass 2", "x is 3", "pass 2"),
        ("x is 3: expected a list, or 2", "x is 3", "expected a list, or 2"),
        ("x is too long\nUse less of it. It is 3.", "x is too long", "Use less of it. It is 3."),
        ("x cannot be read: no such file", "x cannot be read: no such file", ""),
    ],
)
def test_what_to_do_is_told_from_what_is_wrong(
    script: ModuleType, text: str, cause: str, remedy: str
) -> None:
    assert script.split_remedy(text) == (cause, remedy)


def test_the_page_names_every_public_error(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    errors = [name for name in pipec.__all__ if re.search(r"(Error|Warning)$", name)]
    assert errors
    assert [name for name in errors if f"`{name}`" not in page and name != "PipecError"] == []


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_changed_message_makes_the_page_stale(script: ModuleType) -> None:
    modules = script.read_source(ROOT / "pipec")
    before = script.page(script.messages(modules))
    changed = (ROOT / "pipec" / "ops.py").read_text().replace("adds numbers", "adds up numbers")
    modules["pipec.ops"] = script.Module("pipec.ops", script.ast.parse(changed))
    assert script.page(script.messages(modules)) != before == script.PAGE.read_text(encoding="utf-8")
