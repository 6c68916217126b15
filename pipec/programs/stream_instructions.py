"""Inserts what a stream needs besides computes and messages: pauses, waits for results, checks and stashes.

A script requests one mini-batch after another. With the request for a mini-batch it decides how the updates
are made that end with it. So a rank pauses before such an update, and before it has the last result of a
mini-batch, until its script has requested that mini-batch. Before a pause for mini-batch i it waits for the
results of those before i, which the script has requested already::

    recv     results of mini-batch 3            recv       results of mini-batch 3
    forward  mb 5                               forward    mb 5
    update   stage 1  mb 4              ->      wait_recv  results of mini-batch 3
                                                pause      mb 4
                                                stash      stage 1  version 2
                                                update     stage 1  mb 4
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipec.ir import Instruction, Op, Payload, Plan, Stream, replica_counts
from pipec.ir.columns import OP_CODE, InstructionColumns, insert_instructions


def with_stream_instructions(
    columns: InstructionColumns, plan: Plan, num_microbatches: int
) -> InstructionColumns:
    """The program of a rank with everything that its stream needs; unchanged without a stream.

    ``num_microbatches`` are those of all its mini-batches.
    """
    stream = plan.sync_spec.stream
    if stream is None:
        return columns
    results = np.array([*(link.payload is Payload.MICROBATCH_RESULT for link in columns.links), False])
    involved = (results[columns.link_numbers] & (columns.ops == OP_CODE[Op.RECV])) | columns.is_compute
    involved |= columns.ops == OP_CODE[Op.UPDATE]
    inserted = _Insertion(columns, plan, stream, num_microbatches)
    places, added = list[int](), list[Instruction]()
    for number in np.flatnonzero(involved).tolist():
        before = [*inserted.before(number, columns[number])]
        places += [number] * len(before)
        added += before
    last = [*inserted.results_of(np.inf)]
    return insert_instructions(columns, [*places, *[len(columns)] * len(last)], [*added, *last])


class _Insertion:
    """Follows a program, and tells what comes before each instruction."""

    def __init__(
        self, columns: InstructionColumns, plan: Plan, stream: Stream, num_microbatches: int
    ) -> None:
        self._columns, self._sync_spec, self._stream = columns, plan.sync_spec, stream
        self._replicas, self._num_microbatches = replica_counts(plan.placement), num_microbatches
        self._makers = [x.source for x in plan.links if x.payload is Payload.MICROBATCH_RESULT]
        self._num_results, self._num_complete = Counter[int](), 0
        self._num_requested = 0
        self._pending: list[Instruction] = []

    def before(self, number: int, instruction: Instruction) -> Iterator[Instruction]:
        """What comes before an instruction."""
        if instruction.op is Op.UPDATE:
            yield from self._pause(self._last_batch(instruction))
            yield from self._preparation(number, instruction)
        elif instruction.op is Op.RECV or (
            instruction.op is Op.FORWARD and instruction.stage in self._makers and instruction.segment <= 0
        ):
            batch = instruction.microbatch // self._stream.microbatches
            if batch == self._num_complete and self._num_results[batch] == self._num_to_come - 1:
                yield from self._pause(batch)
            self._note_result(batch)
            if instruction.op is Op.RECV:
                self._pending.append(instruction)

    def results_of(self, last: float) -> Iterator[Instruction]:
        """The waits for the results of the mini-batches up to this one."""
        due = [x for x in self._pending if x.microbatch // self._stream.microbatches <= last]
        self._pending = [each for each in self._pending if each not in due]
        yield from (replace(each, op=Op.WAIT_RECV) for each in due)

    @property
    def _num_to_come(self) -> int:
        """The number of results of a mini-batch."""
        return len(self._makers) * self._stream.microbatches

    def _note_result(self, batch: int) -> None:
        self._num_results[batch] += 1
        while self._num_results[self._num_complete] == self._num_to_come:
            self._num_complete += 1

    def _pause(self, batch: int) -> Iterator[Instruction]:
        """Pause until the script has requested a mini-batch; it requests those before it first."""
        while self._makers and self._num_requested <= batch:
            yield from self.results_of(self._num_requested - 1)
            yield Instruction(Op.PAUSE, -1, self._num_requested * self._stream.microbatches)
            self._num_requested += 1

    def _last_batch(self, update: Instruction) -> int:
        """The last mini-batch whose gradients an update uses; the last round may have fewer."""
        behind = update.microbatch + self._stream.microbatches_per_update(update.stage, self._replicas)
        return min(behind, self._num_microbatches) // self._stream.microbatches - 1

    def _preparation(self, number: int, update: Instruction) -> Iterator[Instruction]:
        """What an update needs before it."""
        if self._sync_spec.on_nan is not None:
            yield from self.results_of(self._last_batch(update))
            yield replace(update, op=Op.CHECK, version=-1)
        if self._sync_spec.clips:
            yield replace(update, op=Op.STAGE_NORM, version=-1)
        if self._is_read_later(number, update.stage, update.version - 1):
            yield replace(update, op=Op.STASH, version=update.version - 1)

    def _is_read_later(self, number: int, stage: int, version: int) -> bool:
        """Whether a compute after an instruction reads a version of a stage."""
        later = self._columns.between(number, len(self._columns))
        return bool((later.is_compute & (later.stages == stage) & (later.versions == version)).any())
