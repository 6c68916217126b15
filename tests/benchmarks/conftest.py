"""The scripts of ``benchmarks/`` import each other by name, and so do their tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
