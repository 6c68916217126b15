"""docs/schedules.md shows every schedule, in a command that tests/test_doc_blocks.py runs."""

import re
import shlex
from pathlib import Path

from pipec.schedules import ASYNCHRONOUS_SCHEDULES, SCHEDULES, SEARCHED_SCHEDULES

DOCS = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ pipec (.*)\n((?:.*\n)*?)```", DOCS)


def test_every_schedule_has_a_timeline() -> None:
    shown = dict.fromkeys(shlex.split(command)[1] for command, _ in BLOCKS)
    assert list(shown) == sorted(
        {*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES},
        key=lambda name: DOCS.index(f"$ pipec schedule {name} "),
    )
