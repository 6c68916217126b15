"""Mini-batches that follow each other without a flush, and the versions of weights that they use."""

from dataclasses import dataclass
from enum import StrEnum


class Versions(StrEnum):
    """Which version of its weights a stage uses for a mini-batch, in its forward and in its backward.

    Version v of a stage is what v updates have made of the weights that it had when the pipeline was last
    empty. ``STASHED``: the latest that the stage has when the forward starts (weight stashing: Narayanan et
    al., PipeDream, SOSP 2019). ``VERTICAL``: the latest that the first stage has then, on every stage
    (vertical sync, ibid.). ``DOUBLE``: the one before the latest, of two (PipeDream-2BW: Narayanan et al.,
    ICML 2021).
    """

    STASHED = "stashed"
    VERTICAL = "vertical"
    DOUBLE = "double"


@dataclass(frozen=True, slots=True)
class Stream:
    """How mini-batches of ``microbatches`` each follow each other. Every stage updates after each of them."""

    versions: Versions
    microbatches: int = 1

    def version(self, microbatch: int, stage: int, num_stages: int) -> int:
        """The version that a stage of a straight pipeline reads for a microbatch.

        With p stages, stage s has p - 1 - s microbatches in flight when a forward starts. It lacks the
        updates that a stage without a pipeline would have made with these.
        """
        match self.versions:
            case Versions.STASHED:
                updates = (microbatch - (num_stages - 1 - stage)) // self.microbatches
            case Versions.VERTICAL:
                updates = (microbatch - (num_stages - 1)) // self.microbatches
            case Versions.DOUBLE:
                updates = microbatch // self.microbatches - 1
        return max(updates, 0)

    def most_live(self, stage: int, num_stages: int) -> int:
        """The most versions that a stage holds at a time."""
        match self.versions:
            case Versions.STASHED:
                return -(-(num_stages - 1 - stage) // self.microbatches) + 1
            case Versions.VERTICAL:
                return -(-(num_stages - 1) // self.microbatches) + 1
            case Versions.DOUBLE:
                return 2
