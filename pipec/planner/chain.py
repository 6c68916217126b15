"""The input of the planner, and the seconds of a stage for a microbatch.

Sends are asynchronous and receives are posted one compute ahead, so communication overlaps compute. In the
steady state a stage is therefore as slow as the slower of two things:

* *busy*: the forward and backward of its operators, and its share of the all-reduce of its parameters;
* *link*: the values that cross its first cut, one message at a time. Links are full duplex: while the
  activation of one microbatch goes forward, the gradient of another comes back. A value takes the longer of
  these two messages. A value that several cuts separate from its reader is charged at each of them.

For example, a stage that computes for 5 ms, behind a value of which 3 ms go forward and 2 ms come back,
takes 5 ms; behind one of 7 ms and 2 ms it takes 7 ms.

A stage on r replicas handles r microbatches at a time, so its operators and its link take 1/r of the seconds
for each microbatch. Its gradients of P bytes are summed in one ring, as slow as the slowest level between its
replicas: ``2 (r - 1) (P / (r B) + latency)`` seconds, once a step or, without a flush, once for a microbatch
of every replica.

A group of devices that is replicated holds a pipeline, and its replicas hold the same one. The groups share
the link to the stage before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipec.hardware.topology import Level, Topology
from pipec.planner.placements import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that block ``first`` makes and that later blocks read, the last of them ``last``.

    If it crosses stages, ``forward_bytes`` of activation travel to the reader and ``backward_bytes`` of
    gradient travel back (0 for a value without gradient).
    """

    first: int
    last: int
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class OperatorChain:
    """A training step as numbers. Each column has one entry for each block.

    ``seconds`` is the forward and backward of one microbatch on a device of speed 1. ``parameter_bytes`` is
    what replicas all-reduce. A device holds ``resident_bytes`` once and ``saved_bytes`` for every microbatch
    in flight. ``names`` serve messages.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    parameter_bytes: Sequence[float]
    resident_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    transfers: Sequence[Transfer]


Vector = NDArray[np.float64]
Positions = NDArray[np.intp]
"""Places between blocks where a stage may begin or end: position k is after the first k blocks."""


def one_f_one_b(later_devices: int) -> int:
    """The number of microbatches in flight on a replica under 1F1B.

    ``later_devices`` is the number of devices of later stages for each replica, rounded up. Without
    replication the result is the number of stages from this one on. With it, the result is PipeDream's NOAM
    for the stages from this one on (Narayanan et al., SOSP 2019, section 3.2).
    """
    return 1 + later_devices


@dataclass(frozen=True, slots=True)
class CostModel:
    """``in_flight``: the microbatches in flight on a replica, a non-decreasing function of the later devices.

    ``step_microbatches``: the number of microbatches that share an all-reduce; None: one of each replica.
    """

    in_flight: Callable[[int], int] = one_f_one_b
    step_microbatches: int | None = None


@dataclass(frozen=True)
class StageCosts:
    """The costs of stages of a chain. Columns are sums over the blocks before each position.

    ``speed`` is that of the fastest device. ``crossing[level, k]``: the seconds that the values across
    position k occupy a link of the level. The methods take positions where stages begin and end, of shapes
    that numpy broadcasts.
    """

    model: CostModel
    levels: Sequence[Level]
    speed: float
    seconds: Vector
    parameters: Vector
    resident: Vector
    saved: Vector
    crossing: Vector

    def stage_seconds(self, at: Placement, first: Positions, last: Positions) -> Vector:
        """Seconds per microbatch, links included; infinite if a stage is empty or does not fit in memory."""
        busy = (self.seconds[last] - self.seconds[first]) / at.rate + self._all_reduce(at, first, last)
        seconds: Vector = np.maximum(busy, self.crossing[at.level, first] / at.links)
        possible = first < last
        if at.device.memory_bytes < np.inf:
            possible = possible & (self.memory_bytes(at, first, last) <= at.device.memory_bytes)
        return np.where(possible, seconds, np.inf)

    def communication_seconds(self, at: Placement, first: Positions, last: Positions) -> Vector:
        """Seconds per microbatch of the link and the all-reduce."""
        spent: Vector = self.crossing[at.level, first] / at.links + self._all_reduce(at, first, last)
        return spent

    def furthest_in_memory(self, at: Placement, first: int) -> int:
        """The last position at which a stage may end that begins at ``first``."""
        if at.device.memory_bytes == np.inf:
            return len(self.seconds) - 1
        held = self.resident + self.model.in_flight(at.later_devices) * self.saved
        most = (held[first] + at.device.memory_bytes) * (1 + 1e-12)
        return int(held.searchsorted(most, side="right")) - 1

    def memory_bytes(self, at: Placement, first: Positions, last: Positions) -> Vector:
        saved = self.model.in_flight(at.later_devices) * (self.saved[last] - self.saved[first])
        held: Vector = self.resident[last] - self.resident[first] + saved
        return held

    def _all_reduce(self, at: Placement, first: Positions, last: Positions) -> Vector:
        parameters = self.parameters[last] - self.parameters[first]
        if at.replicas == 1:
            return np.zeros(())
        shards = [
            level.link.latency_seconds + parameters / at.replicas / level.link.bytes_per_second
            for level, members in zip(self.levels, at.members, strict=True)
            if members > 1
        ]
        together = self.model.step_microbatches or at.replicas
        seconds: Vector = (parameters > 0) * np.maximum.reduce(shards) * (2 * (at.replicas - 1) / together)
        return seconds

    def at(self, positions: Positions) -> "StageCosts":
        """The costs of stages between some positions alone."""
        return replace(
            self,
            seconds=self.seconds[positions],
            parameters=self.parameters[positions],
            resident=self.resident[positions],
            saved=self.saved[positions],
            crossing=self.crossing[:, positions],
        )


def stage_costs(chain: OperatorChain, topology: Topology, model: CostModel) -> StageCosts:
    def until(figures: Sequence[float]) -> Vector:
        return np.concatenate([[0.0], np.cumsum(figures, dtype=np.float64)])

    levels = topology.levels
    crossing = np.zeros((len(levels), len(chain.names) + 1))
    for value in chain.transfers:
        sizes = [size for size in (value.forward_bytes, value.backward_bytes) if size]
        for k, level in enumerate(levels):
            longest = max((level.message_link.seconds(size) for size in sizes), default=0.0)
            crossing[k, value.first + 1 : value.last + 1] += longest
    return StageCosts(
        model,
        levels,
        max(device.speed for device in topology.devices),
        until(chain.seconds),
        until(chain.parameter_bytes),
        until(chain.resident_bytes),
        until(chain.saved_bytes),
        crossing,
    )
