"""What a stage holds in memory and when: the one definition that planner, search, simulator and plan read."""

from dataclasses import dataclass, fields

from pipec.ir.values import Phase


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one stage holds, in bytes or any other unit.

    ============= =============== ========================== ==============================================
    field         of each         from                       to
    ============= =============== ========================== ==============================================
    ``weights``   stage           the start of the step      the end of the step
    ``versions``  stage           the start of the step      the end of the step
    ``gradients`` stage           the start of the step      the end of the step
    ``state``     stage           the start of the step      the end of the step
    ``saved``     microbatch      the start of its forward   the end of its input gradient or whole backward
    ``replayed``  microbatch      the start of its recompute the end of its input gradient or whole backward
    ``kept``      microbatch      the end of ``saved``       the end of its weight gradient
    ``transient`` running phase   the start of the phase     the end of the phase
    ============= =============== ========================== ==============================================

    ``transient`` is the most that any phase function of the stage holds besides the rest while it runs.
    ``state`` is that of the optimizer, if the program updates. ``versions`` are those of the weights besides
    the latest that microbatches in flight still read, where there is no flush. Where replicas hold shares of
    a stage, these figures are those of the replica that holds most.
    """

    weights: float = 0
    gradients: float = 0
    saved: float = 0
    kept: float = 0
    transient: float = 0
    replayed: float = 0
    state: float = 0
    versions: float = 0

    @property
    def static(self) -> float:
        """What the stage holds during the whole step."""
        return self.weights + self.versions + self.gradients + self.state

    def divided(self, num_parts: int) -> "StageMemory":
        """One of equal parts of the stage."""
        return StageMemory(*(getattr(self, field.name) / num_parts for field in fields(self)))

    def growth(self, phase: Phase) -> tuple[float, float]:
        """By how much memory grows when ``phase`` of a microbatch starts, and by how much when it ends."""
        match phase:
            case Phase.FORWARD:
                taken, left = self.saved, self.saved
            case Phase.RECOMPUTE:
                taken, left = self.replayed, self.replayed
            case Phase.BACKWARD:
                taken, left = 0.0, -self.saved - self.replayed
            case Phase.BACKWARD_INPUT:
                taken, left = 0.0, self.kept - self.saved - self.replayed
            case Phase.BACKWARD_WEIGHT:
                taken, left = 0.0, -self.kept
        return taken + self.transient, left - taken - self.transient
