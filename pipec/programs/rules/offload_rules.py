"""The rules for offloaded values: they are copied after their forward, and back before they are read."""

from collections.abc import Iterator

import numpy as np

from pipec.ir import Op, rank_of
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints
from pipec.programs.program_index import ProgramIndex, Violation

_READERS = [OP_CODE[op] for op in (Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT)]


def offloads_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """A microbatch is offloaded at most once, after its forward, and is not read while it is on the host.

    The wait for the offload frees it on the device. So the prefetch comes after that wait, and the first
    reader after the wait for the prefetch. Refused::

        offload stage 0 mb 0, wait_offload stage 0 mb 0, prefetch stage 0 mb 0, backward stage 0 mb 0, ...
    """
    for rank, columns in enumerate(step.columns):
        if columns.numbers_of(Op.OFFLOAD, Op.PREFETCH).size:
            yield from _only_once(step, rank, columns, Op.OFFLOAD)
            yield from _only_once(step, rank, columns, Op.PREFETCH)
            yield from _in_order(step, rank, columns)


def _only_once(step: ProgramIndex, rank: int, columns: InstructionColumns, op: Op) -> Iterator[Violation]:
    own = columns.numbers_of(op)
    for number in own[~np.isin(columns.stages[own], list(step.offload))].tolist():
        where = f"stage {columns.stages[number]}"
        yield Violation((rank, number), f"{op} of {where}, which keeps what it saves; expected none")
    keys = _keys(step, columns, own)
    for number in np.delete(own, np.unique(keys, return_index=True)[1]).tolist():
        where = f"of stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
        yield Violation((rank, number), f"{op} {where} is there more than once; expected it once at most")


def _in_order(step: ProgramIndex, rank: int, columns: InstructionColumns) -> Iterator[Violation]:
    offloads = columns.numbers_of(Op.OFFLOAD)
    back = _by_key(step, columns, Op.PREFETCH)
    over, there = _by_key(step, columns, Op.WAIT_OFFLOAD), _by_key(step, columns, Op.WAIT_PREFETCH)
    made = step.numbers[OP_CODE[Op.FORWARD], columns.stages[offloads], columns.microbatches[offloads]]
    keys = _keys(step, columns, offloads).tolist()
    for key, number, forward in zip(keys, offloads.tolist(), made.tolist(), strict=True):
        stage, microbatch = divmod(key, step.plan.num_microbatches)
        where = f"of stage {stage}, microbatch {microbatch}"
        returns = back.pop(key, -1)
        if number < forward:
            yield Violation((rank, number), f"offload {where} runs before its forward at {forward}")
        if returns < 0:
            message = f"offload {where} has no prefetch; expected one before it is read"
            yield Violation((rank, number), message)
        elif returns < over[key]:
            yield Violation((rank, returns), f"prefetch {where} runs before its wait_offload at {over[key]}")
        else:
            yield from _reads_what_is_there(step, stage, microbatch, number, there[key])
    for key, number in back.items():
        stage, microbatch = divmod(key, step.plan.num_microbatches)
        where = f"of stage {stage}, microbatch {microbatch}"
        yield Violation((rank, number), f"prefetch {where} has no offload; expected one before it")


def _reads_what_is_there(
    step: ProgramIndex, stage: int, microbatch: int, offloaded: int, returned: int
) -> Iterator[Violation]:
    begins = step.begins[_READERS, stage, microbatch]
    for number in begins[(begins >= 0) & (begins < returned)].tolist():
        rank = rank_of(step.plan.placement, stage, microbatch)
        what = f"what stage {stage} saved for microbatch {microbatch}"
        message = f"reads {what}, which is away from its offload at {offloaded} to {returned}"
        yield Violation((rank, number), f"{step.columns[rank][number].op} {message}")


def _by_key(step: ProgramIndex, columns: InstructionColumns, op: Op) -> dict[int, int]:
    """The number of each instruction of an op, by its stage and microbatch."""
    own = columns.numbers_of(op)
    return dict(zip(_keys(step, columns, own).tolist(), own.tolist(), strict=True))


def _keys(step: ProgramIndex, columns: InstructionColumns, numbers: Ints) -> Ints:
    stages: Ints = columns.stages[numbers].astype(np.int64)
    return stages * step.plan.num_microbatches + columns.microbatches[numbers]
