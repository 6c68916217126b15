"""Lives of cells: their expressions match what regular expressions match, and every effect is in one."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipec.ir import Op
from pipec.ir.program import CELLS
from pipec.programs.lives import Accesses, life

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cell", CELLS)
@given(st.data())
def test_a_life_allows_what_its_expression_matches(cell: str, data: st.DataObject) -> None:
    pattern = CELLS[cell][1]
    found = life(pattern)
    letters = {event: chr(ord("a") + k) for k, event in enumerate(found.events)}
    expression = re.sub(r"\w+", lambda match: letters[match[0]], pattern).replace(" ", "")
    events = data.draw(st.lists(st.integers(0, len(letters) - 1), min_size=1, max_size=7))
    keys, positions = np.zeros(len(events), np.int64), np.arange(len(events))
    parts = [(event, keys[:1], positions[k : k + 1]) for k, event in enumerate(events)]
    matches = re.fullmatch(expression, "".join(chr(ord("a") + event) for event in events)) is not None
    assert (not Accesses.of(parts).violations(found)) == matches


def test_cells_are_told_apart_whatever_their_keys() -> None:
    """Keys that leave no bits for positions are numbered anew."""
    found = life("make read*")
    for key in (0, 7, 2**62):
        parts = [(0, np.array([key, 1]), np.array([3, 5])), (1, np.array([key]), np.array([2]))]
        accesses = Accesses.of(parts)
        ((place, before),) = accesses.violations(found)[:1]
        assert (accesses.keys[place], accesses.position(place), before) == (key, 2, -1)


def test_every_effect_is_an_event_of_a_cell_and_every_event_has_an_op() -> None:
    caused = {(cell, event) for op in Op for cell, event, _ in op.traits.effect_parts}
    named = {(cell, event) for cell, (_, pattern, _) in CELLS.items() for event in life(pattern).events}
    assert caused | {("slot", "free")} == named  # a slot is free when its microbatch is


def test_the_page_of_instructions_is_that_of_the_table() -> None:
    script = ROOT / "docs" / "reference" / "instructions.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
