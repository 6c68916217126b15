"""The versions of torch that pipec was tested with.

``pyproject.toml`` asks for these versions; ``pip install --no-deps`` allows others.
"""

import re

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last tested version, without its patch level."""


def parsed_version(version: str) -> tuple[int, int]:
    """``"2.15.0+cu132"`` is (2, 15)."""
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    return major, minor


def version_text(version: tuple[int, int]) -> str:
    """(2, 15) is ``"2.15"``."""
    return ".".join(map(str, version))


def untested_version(version: str) -> str | None:
    """One line about torch of an untested ``version``, which is used all the same; None for a tested one."""
    number = parsed_version(version)
    if OLDEST <= number <= NEWEST:
        return None
    age = "older" if number < OLDEST else "newer"
    tested = f"{version_text(OLDEST)} to {version_text(NEWEST)}"
    return f"torch {version} is {age} than the versions that this pipec was tested with, {tested}"
