"""Mini-batches that follow each other without a flush, and the versions of weights that they use.

Stages have replicas here: ``replicas[s]`` is their number for stage s. Microbatch i of a stage with r of them
runs on the replica i mod r, so that r microbatches, one on each, are a *round* of the stage.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class VersionPolicy(StrEnum):
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
    """How mini-batches of ``microbatches`` each follow each other, one unless versions are ``DOUBLE``.

    A stage updates after each round: it adds up the gradients of one mini-batch of each replica. ``DOUBLE``
    updates after each mini-batch, of which every replica has as many microbatches.
    """

    versions: VersionPolicy
    microbatches: int = 1

    def microbatches_per_update(self, stage: int, replicas: Sequence[int]) -> int:
        """How many microbatches' gradients an update of a stage uses."""
        return self.microbatches if self.versions is VersionPolicy.DOUBLE else replicas[stage]

    def period(self, replicas: Sequence[int]) -> int:
        """After how many microbatches all ranks do the same again."""
        return math.lcm(*(self.microbatches_per_update(stage, replicas) for stage in range(len(replicas))))

    def version(self, microbatch: int, stage: int, replicas: Sequence[int]) -> int:
        """The version that a stage reads for a microbatch.

        A stashing stage lacks the updates of the rounds that its replicas have in flight beside this one.
        Without replicas, these are the p - 1 - s microbatches before it in stage s of p.
        """
        match self.versions:
            case VersionPolicy.STASHED:
                updates = microbatch // replicas[stage] - (window(stage, replicas) - 1)
            case VersionPolicy.VERTICAL:
                updates = microbatch - (len(replicas) - 1)
            case VersionPolicy.DOUBLE:
                updates = microbatch // self.microbatches - 1
        return max(updates, 0)

    def max_live_versions(self, stage: int, replicas: Sequence[int]) -> int:
        """The most versions that a replica of a stage holds at a time."""
        match self.versions:
            case VersionPolicy.STASHED:
                return window(stage, replicas)
            case VersionPolicy.VERTICAL:
                return len(replicas)
            case VersionPolicy.DOUBLE:
                return 2


def window(stage: int, replicas: Sequence[int]) -> int:
    """How many microbatches a replica of a stage has in flight: no more than keep all ranks busy.

    The last stage has 1. A stage with r replicas, behind which comes one with q that has w in flight, has

        2 + ceil((q (w + 1) - 2 gcd(q, r)) / r)

    which is p - s in stage s of p if all have as many. Let a stage with r replicas take r units of time for a
    microbatch, and all replicas of a stage begin a round together. A microbatch then waits for up to
    q - gcd(q, r) units until the stage behind begins its round, which sends gradients back q w units later,
    and these wait for up to r - gcd(q, r) units for their round here. After so long, r (w_s - 1) units, the
    replica is through with the microbatches that it has begun before. With fewer, some rank idles.
    """
    return _windows(tuple(replicas))[stage]


@functools.cache
def _windows(replicas: tuple[int, ...]) -> tuple[int, ...]:
    found = [1]
    for own, behind in reversed([*pairwise(replicas)]):
        found.append(2 - (2 * math.gcd(own, behind) - behind * (found[-1] + 1)) // own)
    return tuple(reversed(found))
