"""Parameters of tests that ``make full`` alone runs."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters, all of them slow except ``quick``."""
    values = list(values)
    assert all(each in values for each in quick), f"{quick} of {values}"
    return [value if value in quick else slow(value) for value in values]
