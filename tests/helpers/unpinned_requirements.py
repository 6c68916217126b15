"""Prints the requirements of development in pyproject.toml, those of its other lists too, without torch."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]


def requirements(name: str) -> Iterator[str]:
    """The requirements of an optional list. ``pipec[all,docs]`` stands for those of two others."""
    for each in PROJECT["optional-dependencies"][name]:
        if own := re.match(r"pipec\[(.*)\]", each):
            for other in own[1].split(","):
                yield from requirements(other)
        elif not re.match(r"torch(?![\w-])", each):
            yield each


if __name__ == "__main__":
    print(*dict.fromkeys(requirements("dev")), sep="\n")
