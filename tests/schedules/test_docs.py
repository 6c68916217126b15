"""docs/schedules.md: every timeline in it is what the command above it prints."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipec.cli import app
from pipec.schedules import ASYNCHRONOUS_SCHEDULES, SCHEDULES, SEARCHED_SCHEDULES

DOCS = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ pipec (.*)\n((?:.*\n)*?)```", DOCS)


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_timeline_is_what_its_command_prints(command: str, printed: str) -> None:
    assert CliRunner().invoke(app, shlex.split(command)).stdout == printed


def test_every_schedule_has_a_timeline() -> None:
    shown = dict.fromkeys(shlex.split(command)[1] for command, _ in BLOCKS)
    assert list(shown) == sorted(
        {*SCHEDULES, *SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES},
        key=lambda name: DOCS.index(f"$ pipec schedule {name} "),
    )
