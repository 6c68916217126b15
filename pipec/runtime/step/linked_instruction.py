"""A linked instruction: a call without arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipec.ir import Instruction
from pipec.runtime.step.compute import Action


@dataclass(frozen=True)
class LinkedInstruction:
    """An action with its instruction.

    If none of ``microbatches`` has rows in a step, ``idle`` takes its place there: it waits for what the
    action would have waited for in the name of others. Without ``microbatches``, the action is always made.
    """

    instruction: Instruction
    action: Action
    microbatches: Sequence[int] = ()
    idle: Action = lambda: None

    def for_sizes(self, sizes: Sequence[int]) -> Action:
        """The action for a step whose microbatches have these rows."""
        is_idle = self.microbatches and not any(sizes[each] for each in self.microbatches)
        return self.idle if is_idle else self.action

    def after(self, action: Action) -> "LinkedInstruction":
        """The same, once ``action`` was made, whichever microbatches have rows."""
        return replace(self, action=in_sequence([action, self.action]), idle=in_sequence([action, self.idle]))


def in_sequence(actions: Sequence[Action]) -> Action:
    """An action that makes these, one after the other."""

    def act() -> None:
        for action in actions:
            action()

    return act
