"""Streams: mini-batches of an asynchronous schedule, and the versions of weights that they use.

``replicas[s]`` is the number of replicas of stage s. Microbatch i of a stage with r replicas runs on replica
i mod r, so r microbatches, one on each, are a *round* of the stage.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class VersionPolicy(StrEnum):
    """The version of its weights that a stage uses for a mini-batch, in both forward and backward.

    Version v of a stage has had v updates since the pipeline was last empty. ``STASHED``: the latest version
    of the stage when the forward starts (weight stashing: Narayanan et al., PipeDream, SOSP 2019).
    ``VERTICAL``: the latest version of the first stage at that time, on every stage (vertical sync, ibid.).
    ``DOUBLE``: the version before the latest, of two (PipeDream-2BW: Narayanan et al., ICML 2021).
    """

    STASHED = "stashed"
    VERTICAL = "vertical"
    DOUBLE = "double"


@dataclass(frozen=True, slots=True)
class Stream:
    """Mini-batches of ``microbatches`` microbatches each: 1 unless versions are ``DOUBLE``.

    A stage updates after each round, with the sum of the gradients of one mini-batch of each replica. With
    ``DOUBLE`` it updates after each mini-batch, of which every replica has equally many microbatches.
    """

    versions: VersionPolicy
    microbatches: int = 1

    def microbatches_per_update(self, stage: int, replicas: Sequence[int]) -> int:
        """The number of microbatches whose gradients an update of a stage uses."""
        return self.microbatches if self.versions is VersionPolicy.DOUBLE else replicas[stage]

    def period(self, replicas: Sequence[int]) -> int:
        """The number of microbatches after which all ranks repeat their instructions."""
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

    def unsupported(self, replicas: Sequence[int]) -> str:
        """Why stages with so many replicas cannot run such mini-batches; "" if they can."""
        given = f"but microbatches is {self.microbatches} and replicas are {tuple(replicas)}"
        most, ranks = max(replicas), sum(replicas)
        match self.versions:
            case VersionPolicy.VERTICAL if most > 1:
                need = "uses one version on all stages, and stages with replicas update at different times"
            case VersionPolicy.STASHED | VersionPolicy.VERTICAL if self.microbatches != 1:
                need = "runs a mini-batch as one microbatch"
            case VersionPolicy.DOUBLE if min(replicas) != most:
                need = "needs the same number of replicas for every stage"
            case VersionPolicy.DOUBLE if self.microbatches < ranks or self.microbatches % most:
                several = f", and a multiple of the {most} replicas" if most > 1 else ""
                need = f"needs a mini-batch of {ranks} microbatches or more on {ranks} ranks{several}"
            case _:
                return ""
        return f"{need}, {given}; take pipedream for any replicas, pipedream-2bw for several microbatches"

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
    """The number of microbatches that a replica of a stage has in flight: no more than keep all ranks busy.

    The last stage has 1. A stage with r replicas, followed by one with q replicas that has w in flight, has

        2 + ceil((q (w + 1) - 2 gcd(q, r)) / r)

    which is p - s in stage s of p if all have equally many replicas. Let a stage with r replicas take r units
    of time for a microbatch, and all replicas of a stage begin a round together. A microbatch then waits for
    up to q - gcd(q, r) units until the next stage begins its round, which sends gradients back q w units
    later, and these wait for up to r - gcd(q, r) units for their round here. In this time, r (w_s - 1) units,
    the replica processes the microbatches that it began before. With fewer, some rank idles.
    """
    return _windows(tuple(replicas))[stage]


@functools.cache
def _windows(replicas: tuple[int, ...]) -> tuple[int, ...]:
    windows = [1]
    for own, behind in reversed([*pairwise(replicas)]):
        windows.append(2 - (2 * math.gcd(own, behind) - behind * (windows[-1] + 1)) // own)
    return tuple(reversed(windows))
