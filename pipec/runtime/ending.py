"""Linking of what a step does besides its microbatches: collectives of replicas, and updates.

A collective is started where its instruction stands. Whoever reads what it brings waits for it; what nobody
reads within the program is waited for when the program is over.
"""

from pipec.ir import Instruction, Op
from pipec.runtime.compute import Action
from pipec.runtime.rank import Delivery, Rank
from pipec.runtime.replicas import BufferAverage, GradientReduction

Left = list[tuple[Instruction, Action]]


class EndingLinker:
    """Makes the actions of a program's collectives and updates, one after the other."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._awaited: list[tuple[Instruction, Delivery]] = []

    def brings(self, instruction: Instruction, delivery: Delivery) -> None:
        """Note that gradients are on their way that another stage has summed for a tied weight."""
        self._awaited.append((instruction, delivery))

    def left(self) -> Left:
        """What is to be waited for when the program is over, each with the instruction that started it."""
        return [(instruction, action) for instruction, each in self._awaited for action in each.awaited()]

    def link(self, instruction: Instruction) -> Action:
        match instruction.op:
            case Op.REDUCE_GRAD:
                return self._reduce(instruction)
            case Op.AVERAGE_BUFFERS:
                return self._average(instruction)
        raise AssertionError(f"the linker makes no call for {instruction.op}")

    def _reduce(self, instruction: Instruction) -> Action:
        bucket = self._rank.plan.ending.buckets[instruction.bucket]
        stage = self._rank.stages[instruction.stage]
        group = self._rank.transport.group(self._rank.plan.placement[stage.index])
        waits = self._waits(stage.index)
        reduction = GradientReduction(stage, bucket, group)
        self._awaited.append((instruction, Delivery(reduction.finish)))
        return _after(waits, reduction.start)

    def _average(self, instruction: Instruction) -> Action:
        plan, stage = self._rank.plan, self._rank.stages[instruction.stage]
        own = plan.microbatches_on(stage.index, self._rank.number)
        group = self._rank.transport.group(plan.placement[stage.index])
        average = BufferAverage(stage, group, len(own) / plan.num_microbatches)
        self._awaited.append((instruction, Delivery(average.finish)))
        return average.start

    def _waits(self, stage: int) -> list[Action]:
        """What must be over before the gradients of a stage are complete on this replica."""
        found = []
        for instruction, delivery in self._awaited:
            if instruction.op is Op.RECV and instruction.stage == stage:
                found += delivery.awaited()
        return found


def _after(waits: list[Action], action: Action) -> Action:
    if not waits:
        return action

    def act() -> None:
        for wait in waits:
            wait()
        action()

    return act
