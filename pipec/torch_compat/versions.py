"""The versions of torch that pipec was tested with.

pipec uses private parts of torch, which any version may change, so that only a tested version is known to be
captured right. ``pyproject.toml`` asks for these versions; ``pip install --no-deps`` allows others.
"""

import re

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last tested version, without its patch level."""


def untested_version(version: str) -> str | None:
    """What to say about torch of an untested ``version``; None for a tested one."""
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if OLDEST <= number <= NEWEST:
        return None
    tested = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (
        f"torch {version} is none of the versions that this pipec was tested with, {tested}: a model may be "
        "refused, or captured wrongly. Install a tested version, or a pipec that knows this one, or compare "
        "the loss and the gradients of one step with those of the model itself before training"
    )
