"""What a rule of the verifier finds wrong."""

from dataclasses import dataclass

from pipec.programs.deadlock import InstructionSite


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and the instruction to look at. There is none if the programs are wrong as a whole.

    ``others`` are instructions of other ranks that are part of the fault.
    """

    site: InstructionSite | None
    message: str
    others: tuple[InstructionSite, ...] = ()
