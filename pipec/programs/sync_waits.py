"""Inserts the waits for collectives and for tied gradients into a program, each before its first reader.

A reduction after each round is awaited before the next reduction starts: memory is short then.

For example, with clipped gradients::

    reduce_grad stage 0 bucket 0                reduce_grad  stage 0  bucket 0
    backward stage 1 mb 3                       backward     stage 1  mb 3
    grad_norm                           ->      wait_reduce_grad  stage 0  bucket 0
    update stage 0                              grad_norm
                                                update       stage 0
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipec.ir import WAIT_OF, Instruction, Op, OpKind, SyncSpec
from pipec.ir.columns import OP_CODE, InstructionColumns, insert_instructions, one_of

_IS_AWAITED = one_of(Op.SUM_COUNTS, Op.GATHER_ROWS, Op.REDUCE_GRAD, Op.UNSHARD, Op.AVERAGE_BUFFERS)
_READS = one_of(Op.TAIL, Op.REDUCE_GRAD, Op.GRAD_NORM, Op.UPDATE)


def with_sync_waits(
    columns: InstructionColumns, sync_spec: SyncSpec, sent_back: NDArray[np.bool_]
) -> InstructionColumns:
    """The program with waits, and with the accumulation of the gradients that other stages send.

    What nothing reads is awaited at the end of the program. ``sent_back[number]`` says whether a link carries
    gradients of tied weights; its last entry is for no link.
    """
    starts = _IS_AWAITED.take(columns.ops)
    if sent_back.any():
        starts |= (columns.ops == OP_CODE[Op.RECV]) & sent_back[columns.link_numbers]
    if not starts.any():
        return columns
    reads = starts | columns.is_compute | _READS[columns.ops]
    places, added, pending = list[int](), list[Instruction](), list[_Started]()
    for number in np.flatnonzero(reads).tolist():
        instruction = columns[number]
        read = [each for each in pending if each.is_read_by(instruction, sync_spec)]
        pending = [each for each in pending if each not in read]
        ended = [each for started in read for each in started.ended()]
        places += [number] * len(ended)
        added += ended
        if starts[number]:
            pending.append(_Started(instruction))
    ended = [each for started in pending for each in started.ended()]
    places += [len(columns)] * len(ended)
    return insert_instructions(columns, places, [*added, *ended])


@dataclass(frozen=True, eq=False)
class _Started:
    """An instruction that has started something."""

    instruction: Instruction

    def ended(self) -> Iterator[Instruction]:
        """The instructions that end it."""
        yield replace(self.instruction, op=WAIT_OF[self.instruction.op], slot=-1)
        if self.instruction.op is Op.RECV:
            yield replace(self.instruction, op=Op.ACCUMULATE)

    def is_read_by(self, reader: Instruction, sync_spec: SyncSpec) -> bool:
        """Whether an instruction needs it to have ended."""
        own, is_same_stage = self.instruction, reader.stage == self.instruction.stage
        match own.op, reader.op:
            case ((Op.REDUCE_GRAD | Op.RECV), (Op.GRAD_NORM | Op.UPDATE)):
                return reader.op is Op.GRAD_NORM or is_same_stage
            case Op.REDUCE_GRAD, Op.REDUCE_GRAD:
                return sync_spec.reduces_every_round(sync_spec.buckets[own.bucket])
            case Op.RECV, Op.REDUCE_GRAD:
                assert own.link
                names = sync_spec.buckets[reader.bucket].names
                return is_same_stage and not {*own.link.names}.isdisjoint(names)
            case Op.GATHER_ROWS, Op.TAIL:
                return is_same_stage
            case ((Op.SUM_COUNTS | Op.UNSHARD), _):
                return is_same_stage and (reader.op.traits.kind is OpKind.COMPUTE or reader.op is Op.TAIL)
        return False
