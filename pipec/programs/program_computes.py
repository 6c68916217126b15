"""The computes of programs as tasks that run: the dependences of messages, however long computes take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, Floats, InstructionColumns, Ints, taken
from pipec.programs.dependence import Bools, Dependence
from pipec.programs.routes import DeliveredMessages
from pipec.programs.task_times import TaskInputs, TaskTimes, run_tasks


@dataclass(frozen=True)
class ProgramComputes:
    """The computes of all ranks, numbered rank by rank from ``first_tasks``.

    ``next_computes_by_rank[rank]`` has the task of each instruction: itself, or else the rank's next compute.
    If ``waits_last``, no message is sent or received between a wait for one and the next compute.
    """

    first_tasks: Sequence[int]
    next_computes_by_rank: Sequence[Ints]
    dependence: Dependence
    waits_last: bool

    @classmethod
    def of(
        cls, programs: Sequence[InstructionColumns], deliveries: Sequence[DeliveredMessages]
    ) -> Self | None:
        """The computes of programs as tasks; None if they wait for each other."""
        sizes = [columns.compute_numbers.size for columns in programs]
        first_tasks: list[int] = np.cumsum([0, *sizes]).tolist()
        next_computes_by_rank = [
            _next_computes(columns, first) for first, columns in zip(first_tasks[:-1], programs, strict=True)
        ]
        reads = _waits(deliveries, first_tasks, next_computes_by_rank)
        ops = [taken(columns.ops, columns.compute_numbers) for columns in programs]
        units = np.where(np.concatenate(ops) == OP_CODE[Op.BACKWARD], 2.0, 1.0)
        run = run_tasks(units, reads, first_tasks)
        if not isinstance(run, TaskTimes):
            return None
        waits_last = not any(map(_posts_after_wait, programs, next_computes_by_rank))
        return cls(first_tasks, next_computes_by_rank, Dependence(first_tasks, run), waits_last)

    def receives_precede_sends(self, deliveries: Sequence[DeliveredMessages]) -> bool:
        """Whether ranks certainly finish, even if each of these sends waits for its receive.

        In one run of the computes, an instruction is reached when the compute before it has ended. Of the
        instructions that are reached at the same time, those of a lower rank come first, and computes that
        begin then come last, each with the waits before it. In this order over all ranks each instruction
        comes after its predecessors on its rank, and a wait after the send of its message. If every receive
        comes before its send, an instruction only waits for earlier ones, and waits cannot form a cycle. If
        not, another order might still exist.
        """
        if not self.waits_last:
            return False
        for each in deliveries:
            source, target = each.route.source, each.route.target
            sent, posted = self._reached(source, each.sends), self._reached(target, each.receives)
            if not (posted <= sent if target < source else posted < sent).all():
                return False
        return True

    def _reached(self, rank: int, numbers: Ints) -> Floats:
        """The ends of the computes before these instructions, which are not computes themselves."""
        before = self.next_computes_by_rank[rank].take(numbers) - 1
        return np.where(before < self.first_tasks[rank], 0.0, self.dependence.run.ends[before])

    def depend_on_next_compute(self, deliveries: Sequence[DeliveredMessages]) -> Sequence[Bools]:
        """Whether each message can be made only after the first compute that follows its receive."""
        makers, others = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        by_route, candidates = list[Bools](), list[Ints]()
        for each in deliveries:
            made = _made(each, self.next_computes_by_rank)
            following = self.next_computes_by_rank[each.route.target].take(each.receives)
            made_here = made >= self.first_tasks[each.route.source]
            is_own = following < self.first_tasks[each.route.target + 1]
            candidates.append(np.flatnonzero(made_here & is_own))
            by_route.append(np.zeros(made.size, bool))
            makers.append(made[candidates[-1]])
            others.append(following[candidates[-1]])
        depends = self.dependence.depends_on(np.concatenate(makers), np.concatenate(others))
        for of_route, places in zip(by_route, candidates, strict=True):
            of_route[places], depends = depends[: places.size], depends[places.size :]
        return by_route


def _next_computes(columns: InstructionColumns, first_task: int) -> Ints:
    """The task of each instruction: itself, or else the next compute. The first compute is ``first_task``."""
    ended = np.zeros(len(columns) + 1, np.int32)
    ended[columns.compute_numbers + 1] = 1
    ended[0] = first_task
    return np.cumsum(ended[:-1], dtype=np.int32)


def _posts_after_wait(columns: InstructionColumns, next_computes: Ints) -> bool:
    """Whether a rank sends or receives something between a wait for a message and its next compute."""
    first_waits = np.full(columns.compute_numbers.size + 1, len(columns), np.int32)
    waits = columns.numbers_of(Op.WAIT_RECV)[::-1]
    first_waits[next_computes.take(waits) - next_computes[:1]] = waits
    for op in (Op.SEND, Op.RECV):
        posts = columns.numbers_of(op)
        if (posts > first_waits.take(next_computes.take(posts) - next_computes[:1])).any():
            return True
    return False


def _waits(
    deliveries: Sequence[DeliveredMessages], first_tasks: Sequence[int], next_computes_by_rank: Sequence[Ints]
) -> TaskInputs:
    """The computes that come after a wait, and the computes that make what they wait for."""
    readers, producers = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for each in deliveries:
        made = _made(each, next_computes_by_rank)
        waiting = next_computes_by_rank[each.route.target].take(each.waits)
        found = (made >= first_tasks[each.route.source]) & (waiting < first_tasks[each.route.target + 1])
        readers.append(waiting[found])
        producers.append(made[found])
    return TaskInputs(np.concatenate(readers), np.concatenate(producers))


def _made(each: DeliveredMessages, next_computes_by_rank: Sequence[Ints]) -> Ints:
    """The last compute before each message is sent."""
    return next_computes_by_rank[each.route.source].take(each.sends) - 1
