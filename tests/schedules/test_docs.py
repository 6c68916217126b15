"""docs/schedules.md has every schedule; tests/test_doc_blocks.py runs its commands."""

import re
from pathlib import Path

import pytest

from pipec.schedules import ASYNCHRONOUS_SCHEDULES, SCHEDULES, SEARCHED_SCHEDULES

DOCS = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES])
def test_every_schedule_is_explained(name: str) -> None:
    assert re.search(rf"[`\"]{name}[`\"]", DOCS)
