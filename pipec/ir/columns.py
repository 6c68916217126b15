"""Long runs of cells and instructions as columns of numbers: read like tuples, worked on with numpy.

A step of a thousand ranks has millions of each. As columns they take a few bytes apiece, and numpy makes,
checks and compares them without Python objects. An index or a loop returns ordinary ``Compute`` and
``Instruction`` objects. For example, the order F0 F1 B0 of stage 2 is the matrix::

    phase         0  0  2       codes: positions in ``Phase``
    stage         2  2  2
    microbatch    0  1  0
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Compute, Instruction, Kind, Link, Op, Phase, Placement, Program, Traits

Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]
Row = TypeVar("Row", Compute, Instruction)

PHASES: Sequence[Phase] = tuple(Phase)
OPS: Sequence[Op] = tuple(Op)
PHASE_CODE: Mapping[Phase, int] = {phase: code for code, phase in enumerate(PHASES)}
OP_CODE: Mapping[Op, int] = {op: code for code, op in enumerate(OPS)}
NUM_COLUMNS, PART = 10, 7
"""Of instructions: how many, and which has the parts of phases."""


def _having(trait: Callable[[Traits], bool]) -> NDArray[np.bool_]:
    """For each op by its code, whether it has a trait."""
    return np.array([trait(op.traits) for op in OPS])


_IS_COMPUTE = _having(lambda traits: traits.kind is Kind.COMPUTE)
_IS_TIMED = _having(lambda traits: traits.timed)
_IS_COLLECTIVE = _having(lambda traits: traits.kind is Kind.COLLECTIVE)
_IS_COPY = _having(lambda traits: traits.kind is Kind.COPY)
FILLS_SLOT = _having(lambda traits: traits.fills_slot)
_PHASE_OF_OP = np.array([PHASE_CODE[op.phase] if op.phase else -1 for op in OPS], np.int32)


def ranks_by_microbatch(placement: Placement, num_microbatches: int) -> Ints:
    """``rank_of`` at [stage, microbatch]. The row of a stage on ranks 4 and 7 is 4 7 4 7 ..."""
    found = np.empty((len(placement), num_microbatches), np.int32)
    for row, ranks in zip(found, placement, strict=True):
        row[:] = np.array(ranks)[np.arange(num_microbatches) % len(ranks)]
    return found


class _Columns(Sequence[Row]):
    """A sequence of rows, held as a matrix whose lines are the columns of the rows.

    It is equal to any sequence of the same rows. Line 0 is a code that the subclass defines and that says
    what is done; line 1 is the stage and line 2 the microbatch.
    """

    def __init__(self, matrix: Ints) -> None:
        self.matrix = matrix

    def _row(self, *numbers: int) -> Row:
        raise NotImplementedError

    def _column(self, number: int) -> Ints:
        column: Ints = self.matrix[number]
        return column

    @property
    def stages(self) -> Ints:
        return self._column(1)

    @property
    def microbatches(self) -> Ints:
        return self._column(2)

    def __len__(self) -> int:
        return int(self.matrix.shape[1])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(*numbers) for numbers in self.matrix.T.tolist())

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return tuple(self._row(*numbers) for numbers in self.matrix[:, index].T.tolist())
        return self._row(*self.matrix[:, index].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_same, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _same(first: Any, second: Any) -> bool:
    return bool(first == second)


class Cells(_Columns[Compute]):
    """The order of a rank: columns of phase, stage and microbatch."""

    @classmethod
    def of(cls, order: Sequence[Compute]) -> "Cells":
        """``order`` as columns. An order that is columns already is returned as it is."""
        if isinstance(order, Cells):
            return order
        rows = [(PHASE_CODE[cell.phase], cell.stage, cell.microbatch) for cell in order]
        return cls(_matrix(rows, 3))

    @property
    def phases(self) -> Ints:
        return self._column(0)

    def where(self, mask: NDArray[np.bool_]) -> "Cells":
        """The cells at which ``mask`` is true."""
        return Cells(self.matrix.compress(mask, axis=1))

    def repeated(self, counts: Ints) -> "Cells":
        """Each cell as often as ``counts`` says."""
        return Cells(self.matrix.repeat(counts, axis=1))

    def _row(self, *numbers: int) -> Compute:
        phase, stage, microbatch = numbers
        return Compute(PHASES[phase], stage, microbatch)


class Instructions(_Columns[Instruction]):
    """What a rank executes: columns of op, stage, microbatch, link, peer, slot, bucket, part, join, version.

    ``link`` is an index into ``links``, or -1.
    """

    def __init__(self, matrix: Ints, links: Sequence[Link]) -> None:
        super().__init__(matrix)
        self.links = links

    @classmethod
    def of(cls, instructions: Sequence[Instruction], links: Sequence[Link]) -> "Instructions":
        """``instructions`` as columns. Links that ``links`` lacks are numbered after those it has."""
        if isinstance(instructions, Instructions) and instructions.links == links:
            return instructions
        index = {link: number for number, link in enumerate(links)}
        rows = [
            (
                OP_CODE[each.op],
                each.stage,
                each.microbatch,
                -1 if each.link is None else index.setdefault(each.link, len(index)),
                each.peer,
                each.slot,
                each.bucket,
                each.part,
                each.join,
                each.version,
            )
            for each in instructions
        ]
        return cls(_matrix(rows, NUM_COLUMNS), tuple(index))

    @property
    def cells(self) -> Cells:
        """The computes, as the cells of a schedule."""
        cells = self.matrix[:3, self.is_cell].copy()
        cells[0] = _PHASE_OF_OP[cells[0]]
        return Cells(cells)

    @property
    def phases(self) -> Ints:
        """By position in ``Phase``, or -1."""
        phases: Ints = _PHASE_OF_OP[self.ops]
        return phases

    @property
    def is_cell(self) -> NDArray[np.bool_]:
        """Which computes stand for cells: of one in parts, the part with which a microbatch's memory changes.

        A forward takes memory with its first part, and a backward gives it back with its last.
        """
        chosen = self.is_compute & (self.parts <= 0)
        later = np.flatnonzero(self.is_compute & (self.parts >= 0) & (self.ops != OP_CODE[Op.FORWARD]))
        chosen[later] = False
        _, last = np.unique(self.matrix[:3, later[::-1]], axis=1, return_index=True)
        chosen[later[::-1][last]] = True
        return chosen

    def where(self, mask: NDArray[np.bool_]) -> "Instructions":
        """The instructions at which ``mask`` is true."""
        return Instructions(self.matrix.compress(mask, axis=1), self.links)

    @property
    def ops(self) -> Ints:
        return self._column(0)

    @property
    def is_compute(self) -> NDArray[np.bool_]:
        return self._have(_IS_COMPUTE)

    @property
    def is_collective(self) -> NDArray[np.bool_]:
        return self._have(_IS_COLLECTIVE)

    @property
    def is_copy(self) -> NDArray[np.bool_]:
        return self._have(_IS_COPY)

    @property
    def is_timed(self) -> NDArray[np.bool_]:
        return self._have(_IS_TIMED)

    def _have(self, trait: NDArray[np.bool_]) -> NDArray[np.bool_]:
        having: NDArray[np.bool_] = trait[self.ops]
        return having

    @property
    def link_numbers(self) -> Ints:
        return self._column(3)

    @property
    def peers(self) -> Ints:
        return self._column(4)

    @property
    def slots(self) -> Ints:
        return self._column(5)

    @property
    def buckets(self) -> Ints:
        return self._column(6)

    @property
    def parts(self) -> Ints:
        return self._column(PART)

    @property
    def versions(self) -> Ints:
        return self._column(PART + 2)

    @property
    def joins(self) -> Ints:
        return self._column(8)

    def _row(self, *numbers: int) -> Instruction:
        op, stage, microbatch, link, *others = numbers
        return Instruction(OPS[op], stage, microbatch, self.links[link] if link >= 0 else None, *others)


def aligned(programs: Sequence[Program]) -> list[Instructions]:
    """The instructions of each program as columns, with one numbering of links for all programs."""
    columns = [each.instructions for each in programs if isinstance(each.instructions, Instructions)]
    links = columns[0].links if columns else ()
    found = []
    for program in programs:
        found.append(Instructions.of(program.instructions, links))
        links = found[-1].links
    return [Instructions(each.matrix, links) for each in found]


def joined(parts: Sequence[Instructions]) -> Instructions:
    """Concatenate instructions that share one numbering of links, as ``aligned`` returns them."""
    matrix = np.concatenate([_matrix((), NUM_COLUMNS), *(each.matrix for each in parts)], axis=1)
    return Instructions(matrix, parts[0].links if parts else ())


def _matrix(rows: Iterable[tuple[int, ...]], num_columns: int) -> Ints:
    """``rows`` as the columns of a matrix."""
    return np.array(list(rows), np.int32).reshape(-1, num_columns).T
