"""A fault that a rule of the verifier finds."""

from dataclasses import dataclass

from pipec.programs.deadlock import InstructionSite


@dataclass(frozen=True, slots=True)
class Violation:
    """A message, and the faulty instruction; None if the programs are wrong as a whole.

    ``others`` are instructions of other ranks that are part of the fault.
    """

    site: InstructionSite | None
    message: str
    others: tuple[InstructionSite, ...] = ()
