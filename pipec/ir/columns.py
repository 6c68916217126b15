"""Long sequences of computes and instructions as columns of numbers: read like tuples, processed with numpy.

A step of a thousand ranks has millions of each. As columns they take a few bytes apiece, and numpy makes,
checks and compares them without Python objects. A column of one number alone takes no memory. An index or a
loop returns ordinary ``Compute`` and ``Instruction`` objects. For example, the columns of the order F0 F1 B0
of stage 2 are::

    phase         1  1  3       codes: positions in ``Phase``
    stage         2  2  2
    microbatch    0  1  0
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from sys import byteorder
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pipec.ir import (
    Compute,
    Instruction,
    Link,
    Op,
    OpKind,
    OpTraits,
    Phase,
    Placement,
    Program,
    Stream,
    replica_counts,
)

Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]
Row = TypeVar("Row")
Numbers = TypeVar("Numbers")

PHASES: Sequence[Phase] = tuple(Phase)
OPS: Sequence[Op] = tuple(Op)
PHASE_CODE: Mapping[Phase, int] = {phase: code for code, phase in enumerate(PHASES)}
OP_CODE: Mapping[Op, int] = {op: code for code, op in enumerate(OPS)}
FIELDS = tuple(field.name for field in fields(Instruction))
"""The fields of instructions, in the order of their columns."""

NUM_COLUMNS, SEGMENT_COLUMN = len(FIELDS), FIELDS.index("segment")


def one_of(*ops: Op) -> NDArray[np.bool_]:
    """For each code of an op, whether it is one of these. As an index, many times as fast as ``np.isin``."""
    return np.array([op in ops for op in OPS])


COLLECTIVES = [op for op in OPS if op.traits.kind is OpKind.COLLECTIVE]
_COMPUTES = [op for op in OPS if op.traits.kind is OpKind.COMPUTE]
_PHASE_OF_OP = np.array([PHASE_CODE[op.phase] if op.phase else -1 for op in OPS], np.int32)


def ranks_by_microbatch(placement: Placement, num_microbatches: int) -> Ints:
    """``rank_of`` at [stage, microbatch]. The row of a stage on ranks 4 and 7 is 4 7 4 7 ..."""
    found = np.empty((len(placement), num_microbatches), np.int32)
    for row, ranks in zip(found, placement, strict=True):
        row[:] = np.array(ranks)[np.arange(num_microbatches) % len(ranks)]
    return found


def read_versions(stream: Stream | None, placement: Placement, num_microbatches: int) -> Ints:
    """At [stage, microbatch], the version of the weights that computes read; -1 without a stream."""
    found, replicas = np.full((len(placement), num_microbatches), -1, np.int32), replica_counts(placement)
    if stream:
        found[:] = [
            [stream.version(each, stage, replicas) for each in range(num_microbatches)]
            for stage in range(len(placement))
        ]
    return found


def constant(number: int, length: int) -> Ints:
    """A column with the same number everywhere."""
    return np.ndarray(length, np.int32, int(number).to_bytes(4, byteorder, signed=True), strides=(0,))


def is_constant(column: Ints) -> bool:
    return column.strides == (0,)


def compact(column: Ints) -> Ints:
    """The column, stored as one number if all entries are equal."""
    if is_constant(column) or not column.size or not (column == column[0]).all():
        return column
    return constant(column[0], column.size)


def taken(column: Ints, numbers: Ints) -> Ints:
    """The entries of a column with these numbers."""
    if is_constant(column) and column.size:
        return constant(column[0], numbers.size)
    return column.take(numbers)  # twice as fast as an index


def entries(table: Ints, rows: Ints, columns: Ints) -> Ints:
    """``table[rows, columns]``, several times as fast."""
    return table.take(rows * np.int64(table.shape[1]) + columns)


def set_entries(table: Ints, rows: Ints, columns: Ints, numbers: Ints) -> None:
    """``table[rows, columns] = numbers``, several times as fast. Of equal places, the last number stays."""
    table.reshape(-1)[rows * np.int64(table.shape[1]) + columns] = numbers


def stable_order(column: Ints, *others: Ints) -> tuple[Ints, Ints]:
    """The numbers of rows in the order of these columns, and the places at which distinct rows begin."""
    keys = column - np.int64(column.min(initial=0))
    for other in others:
        lowest, highest = int(other.min(initial=0)), int(other.max(initial=0))
        keys = keys * (highest - lowest + 1) + (other.astype(np.int64) - lowest)
    keys = keys.astype(np.min_scalar_type(keys.max(initial=0)))  # numpy sorts 16 bits in linear time
    order = np.argsort(keys, kind="stable")
    is_first = np.append(True, np.diff(keys[order]) != 0)[: order.size]
    return order, np.flatnonzero(is_first)


def equal_groups(column: Ints, *others: Ints) -> list[Ints]:
    """The numbers of the rows that are equal in these columns: a group for each distinct row, ascending."""
    order, begins = stable_order(column, *others)
    return np.split(order, begins[1:]) if order.size else []


def concatenate(columns: Sequence[Ints]) -> Ints:
    """Columns one after the other."""
    filled = [column for column in columns if column.size]
    if len(filled) == 1:
        return filled[0]
    if all(is_constant(column) and column[0] == filled[0][0] for column in filled):
        return constant(filled[0][0] if filled else -1, sum(column.size for column in filled))
    return np.concatenate(filled)


class Column(Generic[Numbers]):
    """A property that returns one of the columns."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, columns: "Columns[Any]", _: object) -> Numbers:
        column: Numbers = columns.columns[self._number]
        return column


class OpMask:
    """A property that tells at which instructions the op has a trait, by a function of its row."""

    def __init__(self, trait: Callable[[OpTraits], bool]) -> None:
        self._has_trait = np.array([trait(op.traits) for op in OPS])

    def __get__(self, columns: "OpColumns[Any]", _: object) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._has_trait.take(columns.ops)
        return found


class Columns(Sequence[Row]):
    """A sequence of rows, held as columns of numbers.

    It is equal to any sequence of the same rows. Column 0 is the code of a phase or an op, as the subclass
    defines it; column 1 is the stage and column 2 the microbatch. ``columns`` may also be a matrix with the
    columns as its rows.
    """

    stages, microbatches = Column[Ints](1), Column[Ints](2)

    def __init__(self, columns: Iterable[Any]) -> None:
        self.columns = tuple(columns)

    @property
    def matrix(self) -> Ints:
        """A copy of the columns as the rows of a matrix."""
        return np.stack(self.columns)

    def _row(self, *numbers: Any) -> Row:
        raise NotImplementedError

    def _with(self, columns: Iterable[Any]) -> Self:
        """Other rows of the same kind."""
        return type(self)(columns)

    def taken(self, numbers: Ints) -> Self:
        """The rows with these numbers."""
        return self._with(taken(column, numbers) for column in self.columns)

    def where(self, mask: NDArray[np.bool_]) -> Self:
        """The rows at which ``mask`` is true."""
        return self.taken(np.flatnonzero(mask))

    def between(self, first: int, last: int) -> Self:
        """The rows from ``first`` on, before ``last``."""
        return self._with(column[first:last] for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, *(column.tolist() for column in self.columns))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return tuple(self._with(column[index] for column in self.columns))
        return self._row(*(column[index].item() for column in self.columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_same, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _same(first: Any, second: Any) -> bool:
    return bool(first == second)


class ComputeColumns(Columns[Compute]):
    """The order of a rank: columns of phase, stage and microbatch."""

    phases = Column[Ints](0)

    @classmethod
    def of(cls, order: Sequence[Compute]) -> "ComputeColumns":
        """``order`` as columns. An order that is columns already is returned as it is."""
        if isinstance(order, ComputeColumns):
            return order
        rows = [(PHASE_CODE[compute.phase], compute.stage, compute.microbatch) for compute in order]
        return cls(_matrix(rows, 3))

    def repeated(self, counts: Ints) -> "ComputeColumns":
        """Each compute repeated as often as ``counts`` says."""
        return ComputeColumns(column.repeat(counts) for column in self.columns)

    def _row(self, *numbers: int) -> Compute:
        phase, stage, microbatch = numbers
        return Compute(PHASES[phase], stage, microbatch)


class OpColumns(Columns[Row]):
    """Rows with instructions: their first columns are those of the fields of ``Instruction``.

    That of ``link`` is an index into ``links``, or -1.
    """

    ops, link_numbers, peers, slots, buckets = (Column[Ints](number) for number in (0, 3, 4, 5, 6))
    segments, model_collectives, versions = (Column[Ints](SEGMENT_COLUMN + number) for number in range(3))
    is_compute = OpMask(lambda traits: traits.kind is OpKind.COMPUTE)
    is_collective = OpMask(lambda traits: traits.kind is OpKind.COLLECTIVE)
    is_copy = OpMask(lambda traits: traits.kind is OpKind.COPY)
    is_blocking = OpMask(lambda traits: traits.kind in (OpKind.COMPUTE, OpKind.STEP_COMPUTE))
    """Whether they occupy their rank: computes and updates."""
    is_overlapped = OpMask(lambda traits: traits.kind in (OpKind.COLLECTIVE, OpKind.COPY))
    """Whether they run beside the work of their rank."""
    is_timed = OpMask(lambda traits: traits.timed)

    def __init__(self, columns: Iterable[Any], links: Sequence[Link]) -> None:
        super().__init__(columns)
        self.links = links

    def _with(self, columns: Iterable[Any]) -> Self:
        return type(self)(columns, self.links)

    def _instruction(self, op: int, stage: int, microbatch: int, link: int, *others: int) -> Instruction:
        return Instruction(OPS[op], stage, microbatch, self.links[link] if link >= 0 else None, *others)


class InstructionColumns(OpColumns[Instruction]):
    """The instructions of a rank."""

    @classmethod
    def of(cls, instructions: Sequence[Instruction], links: Sequence[Link]) -> "InstructionColumns":
        """``instructions`` as columns. Links that ``links`` lacks are numbered after those it has."""
        if isinstance(instructions, InstructionColumns) and instructions.links == links:
            return instructions
        index: dict[Link | None, int] = {link: number for number, link in enumerate(links)}
        for each in instructions:
            if each.link is not None:
                index.setdefault(each.link, len(index))
        others = operator.attrgetter(*FIELDS[4:])
        rows = [
            (OP_CODE[each.op], each.stage, each.microbatch, index.get(each.link, -1), *others(each))
            for each in instructions
        ]
        return cls(_matrix(rows, NUM_COLUMNS), tuple(link for link in index if link))

    def _row(self, *numbers: int) -> Instruction:
        return self._instruction(*numbers)

    @property
    def computes(self) -> ComputeColumns:
        """The computes of the schedule that these instructions run, each once."""
        own = self.where(self.is_compute_start)
        return ComputeColumns((own.phases, own.stages, own.microbatches))

    @property
    def phases(self) -> Ints:
        """By position in ``Phase``, or -1."""
        phases: Ints = _PHASE_OF_OP[self.ops]
        return phases

    @property
    def is_compute_start(self) -> NDArray[np.bool_]:
        """The computes, each once: of one in segments, the segment at which saved memory changes.

        A forward allocates it in its first segment, and a backward frees it in its last.
        """
        is_compute = self.is_compute
        chosen = is_compute & (self.segments <= 0)
        later = np.flatnonzero(is_compute & (self.segments >= 0) & (self.ops != OP_CODE[Op.FORWARD]))
        chosen[later] = False
        keys = np.stack([column[later[::-1]] for column in self.columns[:3]])
        _, last = np.unique(keys, axis=1, return_index=True)
        chosen[later[::-1][last]] = True
        return chosen

    def numbers_of(self, *ops: Op) -> Ints:
        """The numbers of the instructions with one of these ops, ascending."""
        found = [self.numbers_by_op[op] for op in ops if op in self.numbers_by_op]
        if len(found) == 1:
            return found[0]
        return np.sort(np.concatenate(found), kind="stable") if found else np.empty(0, np.int32)

    @cached_property
    def numbers_by_op(self) -> Mapping[Op, Ints]:
        """The numbers of the instructions of each op that occurs."""
        codes = self.ops.astype(np.int8)
        return {
            op: np.flatnonzero(codes == code).astype(np.int32)
            for code, (op, count) in enumerate(zip(OPS, np.bincount(codes), strict=False))
            if count
        }

    @cached_property
    def compute_numbers(self) -> Ints:
        """The numbers of the computes, ascending."""
        return self.numbers_of(*_COMPUTES)


def insert_instructions(
    columns: InstructionColumns, places: Sequence[int] | Ints, inserted: InstructionColumns
) -> InstructionColumns:
    """A program with more instructions, each before the instruction at its place."""
    order = np.argsort(np.concatenate([places, np.arange(len(columns))]), kind="stable")
    return concatenate_instructions([inserted, columns]).taken(order)


def with_shared_links(programs: Sequence[Program]) -> list[InstructionColumns]:
    """The instructions of each program as columns, with one numbering of links for all programs."""
    columns = [each.instructions for each in programs if isinstance(each.instructions, InstructionColumns)]
    links = columns[0].links if columns else ()
    found = []
    for program in programs:
        found.append(InstructionColumns.of(program.instructions, links))
        links = found[-1].links
    return [InstructionColumns(each.columns, links) for each in found]


def concatenate_instructions(parts: Sequence[InstructionColumns]) -> InstructionColumns:
    """Concatenate instructions that share one numbering of links, as ``with_shared_links`` returns them."""
    columns = (concatenate([part.columns[k] for part in parts]) for k in range(NUM_COLUMNS))
    return InstructionColumns(columns, parts[0].links if parts else ())


def _matrix(rows: Iterable[tuple[int, ...]], num_columns: int) -> Ints:
    """``rows`` as the columns of a matrix."""
    return np.array(list(rows), np.int32).reshape(-1, num_columns).T
