"""What every test shares: one thread per rank, reproducible hypothesis runs, and golden files."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from pipec import console

GOLDEN = Path(__file__).parent / "golden"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(1)  # a sum over threads would depend on how many there are
console.PATIENCE = 3600.0  # what is printed would depend on how fast the machine is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no worker is left alone with one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def compare_golden(text: str, path: Path, update: bool) -> None:
    """Fail with a unified diff unless ``path`` holds exactly ``text``; with ``update``, make it so."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        pytest.fail(
            f"{path} does not exist: run pytest with --update-golden and read what it wrote", pytrace=False
        )
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(path), "this run", lineterm=""
        )
        diff = "\n".join(lines) or "(only the line endings differ)"
        pytest.fail(f"{diff}\nif the change is meant, run pytest with --update-golden", pytrace=False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(text, name)`` compares ``text`` with the file ``tests/golden/<name>``."""
    update = request.config.getoption("--update-golden")
    return lambda text, name: compare_golden(text, GOLDEN / name, update)
