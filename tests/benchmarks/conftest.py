"""The scripts of ``benchmarks/`` import each other by name, and so do their tests."""

import json
import sys
from pathlib import Path

import pytest
from graph_files import PLACEMENT, PROFILE

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(PROFILE) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def placement(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(PLACEMENT), encoding="utf-8")
    return path
