"""The computes of programs as tasks that run: the dependences of messages, however long computes take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints, taken
from pipec.programs.dependence import Bools, Dependence
from pipec.programs.messages import Delivered
from pipec.programs.task_times import TaskInputs, TaskTimes, run_tasks


@dataclass(frozen=True)
class ProgramComputes:
    """The computes of all ranks, numbered rank by rank, and their run.

    Of each message, ``made`` is the last compute before its send, and ``followed`` the first one after its
    receive; -1 if there is none.

    If ``receives_precede_sends``, ranks certainly finish, even if each send waits for its receive. In one run
    of the computes, an instruction is reached when the compute before it has ended. Of those that are reached
    at the same time, those of a lower rank come first, and computes that begin then come last, each with the
    waits directly before it. In this order each instruction comes after its predecessors on its rank, and a
    wait after the send of its message. If every receive comes before its send, no waits form a cycle.
    """

    dependence: Dependence
    made: Ints
    followed: Ints
    receives_precede_sends: bool

    @classmethod
    def of(cls, programs: Sequence[InstructionColumns], messages: Delivered) -> Self | None:
        """The computes of programs as tasks; None if they wait for each other."""
        first_tasks: list[int] = np.cumsum([0, *(each.compute_numbers.size for each in programs)]).tolist()
        begins = np.cumsum([0, *map(len, programs)])[:-1]
        following = np.concatenate([_numbered(*each) for each in zip(programs, first_tasks, strict=False)])
        bounds = np.array(first_tasks)
        made = following.take(begins[messages.sources] + messages.sends) - 1
        made[made < bounds[messages.sources]] = -1
        followed, waiting = (
            following.take(begins[messages.targets] + numbers)
            for numbers in (messages.receives, messages.waits)
        )
        last = bounds[messages.targets + 1]
        followed[followed >= last] = -1
        reading = (made >= 0) & (waiting < last)
        ops = np.concatenate([taken(each.ops, each.compute_numbers) for each in programs])
        units = np.where(ops == OP_CODE[Op.BACKWARD], 2.0, 1.0)
        run = run_tasks(units, TaskInputs(waiting[reading], made[reading]), first_tasks)
        if not isinstance(run, TaskTimes):
            return None
        sources, targets, ends = messages.sources, messages.targets, np.append(run.ends, 0.0)
        before = following.take(begins[targets] + messages.receives) - 1
        posted, sent = ends[np.where(before < bounds[targets], -1, before)], ends[made]
        in_order = np.where(targets < sources, posted <= sent, posted < sent).all()
        first_waits = np.full(bounds[-1] + len(programs), np.iinfo(np.int32).max, np.int32)
        np.minimum.at(first_waits, waiting + targets, messages.waits)  # a rank's end is a task of its own
        in_order &= (messages.receives < first_waits[before + 1 + targets]).all()
        after_send = following.take(begins[sources] + messages.sends)
        in_order &= (messages.sends < first_waits[after_send + sources]).all()
        return cls(Dependence(first_tasks, run), made, followed, bool(in_order))

    def depend_on_next_compute(self) -> Bools:
        """Whether each message can be made only after the first compute that follows its receive."""
        depends = np.zeros(self.made.size, bool)
        both = np.flatnonzero((self.made >= 0) & (self.followed >= 0))
        depends[both] = self.dependence.depends_on(self.made[both], self.followed[both])
        return depends


def _numbered(columns: InstructionColumns, first_task: int) -> Ints:
    """The task of each instruction: itself, or else the next compute. The first compute is ``first_task``."""
    ended = np.zeros(len(columns) + 1, np.int32)
    ended[columns.compute_numbers + 1] = 1
    ended[0] = first_task
    return np.cumsum(ended[:-1], dtype=np.int32)
