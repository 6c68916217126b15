"""Say what the tests of GPUs lack here: packages, or a GPU. It needs nothing but Python.

The packages are those of pyproject.toml, and what the tests themselves import.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
OF_THE_TESTS = ("pytest", "pytest-timeout", "hypothesis")


def main() -> None:
    lacking = list(problems(requirements()))
    if lacking:
        sys.exit(f"{sys.executable} lacks {', '.join(lacking)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"there is no CUDA device here: torch {torch.__version__} of {sys.executable} finds none")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {', '.join(names)}")


def requirements() -> list[tuple[str, str]]:
    """The packages, each with its least version, which may be empty."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    dev = dict(map(_parsed, project["optional-dependencies"]["dev"]))
    return [*map(_parsed, project["dependencies"]), *((name, dev.get(name, "")) for name in OF_THE_TESTS)]


def problems(needed: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, least in needed:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name
            continue
        if _numbers(found) < _numbers(least):
            yield f"{name}>={least} (it has {found})"


def _parsed(requirement: str) -> tuple[str, str]:
    name, _, least = requirement.partition(">=")
    return re.split(r"[<>=\[]", name)[0], least


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


if __name__ == "__main__":
    main()
