"""What stages and ranks hold in memory: the figures that planner, search, plan and meter share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from pipec.ir.values import Phase

MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc maps each block of this size or more by itself, and unmaps it when it is freed. It is
the largest threshold that it takes on 64-bit systems (``man mallopt``, M_MMAP_THRESHOLD)."""


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """What one of several functions of a phase holds, in the unit of ``StageMemory``.

    ``transient`` is the most that it holds besides what there was saved before it, and ``growth`` by how much
    that grows when it ends. ``gradients`` are the sums of those that it makes.
    """

    transient: float
    growth: float
    gradients: float = 0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one stage holds, in bytes or any other unit.

    ============== =============== ========================== ==============================================
    field          of each         from                       to
    ============== =============== ========================== ==============================================
    ``weights``    stage           the start of the step      the end of the step
    ``buffers``    stage           the start of the step      the end of the step
    ``precomputed`` stage        the start of the step      the end of the step
    ``versions``   stage           the start of the step      the end of the step
    ``gradients``  stage           the first gradient         the update, or the next step if there is none
    ``state``      stage           the start of the step      the end of the step
    ``inputs``     microbatch      the start of the step      the end of the step
    ``saved``      microbatch      the start of its forward   the end of its input gradient or whole backward
    ``recomputed`` microbatch    the start of its recompute the end of its input gradient or whole backward
    ``weight_gradient_saved`` microbatch the end of ``saved`` the end of its weight gradient
    ``transient``  running phase   the start of the phase     the end of the phase
    ``in_transit`` stage           a collective               whatever waits for it
    ``update``     stage           the start of its update    the end of its update
    ============== =============== ========================== ==============================================

    ``transient[phase]`` is the peak of the other memory of its functions while they run. It includes the
    gradients of the one microbatch. Phases of several functions also have the memory of each function, as
    ``segments``. ``buffers`` include constants, and inputs that are not split. ``precomputed``
    values depend on weights and fixed buffers alone and are made once for each version of weights; where
    weights are gathered for use, they are freed with them. ``state`` is the optimizer state, if the program
    updates. ``offloaded`` is the part of ``saved`` that waits in host memory if the program has offloads;
    ``host`` is in host memory during the whole step. ``unsaved`` would be ``saved``, too, if nothing were
    computed again. ``versions`` are the older versions of weights that
    microbatches in flight still read, in an asynchronous schedule. ``in_transit`` is the peak of gradients in
    transit and gathered parameters. Where replicas shard a stage, these figures are for the replica with the
    most.
    """

    weights: float = 0
    gradients: float = 0
    saved: float = 0
    weight_gradient_saved: float = 0
    transient: Mapping[Phase, float] = field(default_factory=dict)
    recomputed: float = 0
    unsaved: float = 0
    offloaded: float = 0
    host: float = 0
    state: float = 0
    versions: float = 0
    buffers: float = 0
    inputs: float = 0
    in_transit: float = 0
    update: float = 0
    precomputed: float = 0
    segments: Mapping[Phase, tuple[SegmentMemory, ...]] = field(default_factory=dict)

    @property
    def static(self) -> float:
        """The peak memory of the stage without the memory of microbatches."""
        derived = self.precomputed + self.gradients + self.state
        return self.weights + self.buffers + self.versions + derived + self.in_transit

    @property
    def max_transient(self) -> float:
        """The largest transient memory of a phase."""
        return max(self.transient.values(), default=0.0)

    def divided(self, num_segments: int) -> "StageMemory":
        """The figures of one of equal parts of the stage."""
        transient = {phase: amount / num_segments for phase, amount in self.transient.items()}
        others = (each.name for each in fields(self) if each.name not in ("transient", "segments"))
        return StageMemory(
            transient=transient, **{name: getattr(self, name) / num_segments for name in others}
        )

    def growth(self, phase: Phase) -> tuple[float, float]:
        """The growth of a microbatch's memory when ``phase`` starts, and when it ends, without transient."""
        match phase:
            case Phase.FORWARD:
                return self.saved, 0.0
            case Phase.RECOMPUTE:
                return self.recomputed, 0.0
            case Phase.BACKWARD:
                return 0.0, -self.saved - self.recomputed
            case Phase.BACKWARD_INPUT:
                return 0.0, self.weight_gradient_saved - self.saved - self.recomputed
            case Phase.BACKWARD_WEIGHT:
                return 0.0, -self.weight_gradient_saved
            case Phase.TAIL:
                return 0.0, 0.0


MEMORY_CATEGORIES = (
    "parameters",
    "buffers",
    "precomputed",
    "gradients",
    "optimizer",
    "versions",
    "inputs",
    "saved",
    "running",
    "received",
    "sent",
    "in_transit",
    "results",
    "step",
)
"""The categories of a rank's memory, in the order in which they are shown.

A measurement only distinguishes all memory that a step makes, as ``step``.
"""


def _nothing() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(frozen=True)
class RankMemory:
    """The memory of rank ``rank`` in a step, in bytes.

    ``bytes_by_category`` is the memory at its peak, during instruction ``position`` of its program, with
    ``in_flight`` pairs of stage and microbatch. ``most[i]`` is the peak during instruction ``i``, and
    ``after[i]`` the memory after it. ``host_bytes`` is the peak of host memory, which is not counted in the
    device's peak, and ``host_after[i]`` the host memory after instruction ``i``.
    """

    rank: int
    bytes_by_category: Mapping[str, float]
    position: int = -1
    in_flight: int = 0
    host_bytes: float = 0.0
    most: NDArray[np.float64] = field(default_factory=_nothing, repr=False, compare=False)
    after: NDArray[np.float64] = field(default_factory=_nothing, repr=False, compare=False)
    host_after: NDArray[np.float64] = field(default_factory=_nothing, repr=False, compare=False)

    @property
    def peak_bytes(self) -> float:
        return sum(self.bytes_by_category.values())

    @property
    def running(self) -> float:
        """The bytes of the instruction at the peak while it runs."""
        return self.bytes_by_category.get("running", 0.0)

    def excluding(self, kinds: Collection[str]) -> float:
        """The bytes at the peak without those of these categories."""
        return sum(amount for kind, amount in self.bytes_by_category.items() if kind not in kinds)
