"""ComputeColumns and instructions as columns: sequences like any other."""

import pytest

from pipec.ir import Compute, Instruction, Op, Phase
from pipec.ir.columns import ComputeColumns, InstructionColumns
from pipec.programs.lower import chain_links

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


def test_instructions_keep_links_that_their_plan_lacks() -> None:
    links = chain_links(3)
    rows = (
        Instruction(Op.RECV, 1, 0, links[0], 0, 0),
        Instruction(Op.FORWARD, 1, 0, segment=1),
        Instruction(Op.SEND, 1, 0, links[1], 2),
    )
    columns = InstructionColumns.of(rows, links[:1])
    assert columns == rows
    assert columns.link_numbers.tolist() == [0, -1, 1]


def test_parts_of_one_compute_are_one_cell() -> None:
    """A forward counts when it begins, and a backward when it is over."""
    forward = [Instruction(Op.FORWARD, 0, 0, segment=part) for part in range(2)]
    backward = [Instruction(Op.BACKWARD, 0, 0, segment=part) for part in range(3)]
    columns = InstructionColumns.of([*forward, Instruction(Op.FORWARD, 0, 1), *backward], ())
    assert columns.is_compute_start.tolist() == [True, False, True, False, False, True]
    assert columns.computes == (
        Compute(Phase.FORWARD, 0, 0),
        Compute(Phase.FORWARD, 0, 1),
        Compute(Phase.BACKWARD, 0, 0),
    )
