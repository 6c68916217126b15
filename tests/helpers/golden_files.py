"""Texts that are compared with files."""

import difflib
from pathlib import Path

import pytest


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
