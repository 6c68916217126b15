"""A linked instruction: a call without arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipec.ir import Instruction

Action = Callable[[], None]


def nothing() -> None:
    """The action that does nothing."""


@dataclass(frozen=True)
class LinkedInstruction:
    """An action with its instruction.

    The action is left out in a step in which none of ``microbatches`` has rows. Without ``microbatches`` it
    is always made.
    """

    instruction: Instruction
    action: Action
    microbatches: Sequence[int] = ()

    def for_sizes(self, sizes: Sequence[int]) -> Action:
        """The action for a step whose microbatches have these rows."""
        is_idle = self.microbatches and not any(sizes[each] for each in self.microbatches)
        return nothing if is_idle else self.action


def in_sequence(actions: Sequence[Action]) -> Action:
    """An action that makes these, one after the other."""

    def act() -> None:
        for action in actions:
            action()

    return act
