"""Lets a test act before each instruction that a rank runs."""

from collections.abc import Callable

from pipec.ir import Instruction
from pipec.runtime.step.linker import Action, Linker
from pipec.runtime.step.rank_state import RankState


def before_each(act: Callable[[RankState, Instruction], object]) -> Callable[[Linker, Instruction], Action]:
    """To be put in the place of ``Linker.link``: ``act`` comes before whatever an instruction does."""
    link = Linker.link

    def linked(linker: Linker, instruction: Instruction) -> Action:
        action = link(linker, instruction)

        def run() -> None:
            act(linker._rank, instruction)
            action()

        return run

    return linked
