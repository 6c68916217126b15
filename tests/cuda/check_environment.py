"""Say what the tests of GPUs lack here: packages of pyproject.toml, or a GPU."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement  # pytest needs it, too

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
OF_THE_TESTS = ("pytest", "pytest-timeout", "hypothesis")


def main() -> None:
    dev = map(Requirement, PROJECT["optional-dependencies"]["dev"])
    needed = [*map(Requirement, PROJECT["dependencies"]), *(x for x in dev if x.name in OF_THE_TESTS)]
    if lacking := [text for each in needed if (text := problem(each))]:
        sys.exit(f"{sys.executable} lacks {', '.join(lacking)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"there is no CUDA device here: torch {torch.__version__} of {sys.executable} finds none")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {', '.join(names)}")


def problem(needed: Requirement) -> str:
    """What is lacking, or nothing."""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return str(needed)
    return "" if needed.specifier.contains(found, prereleases=True) else f"{needed} (it has {found})"


if __name__ == "__main__":
    main()
