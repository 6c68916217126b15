"""ComputeColumns and instructions as columns: sequences like any other."""

import pytest

from pipec.ir import Compute, Phase
from pipec.ir.columns import ComputeColumns

ROWS = (
    Compute(Phase.FORWARD, 0, 0),
    Compute(Phase.BACKWARD_INPUT, 3, 1),
    Compute(Phase.BACKWARD_WEIGHT, 3, 1),
)


def test_cells_read_like_a_tuple() -> None:
    cells = ComputeColumns.of(ROWS)
    assert (len(cells), tuple(cells), cells[1], cells[-1], cells[1:]) == (3, ROWS, ROWS[1], ROWS[2], ROWS[1:])
    assert cells == ROWS
    assert cells == ComputeColumns.of(list(ROWS))
    assert cells != ROWS[:2]
    assert cells != (ROWS[0], ROWS[2], ROWS[1])
    assert hash(cells) == hash(ROWS)
    assert repr(cells) == repr(ROWS)
    assert ComputeColumns.of(cells) is cells
    with pytest.raises(IndexError):
        cells[3]
