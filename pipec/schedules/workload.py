"""The workload of a schedule: the time and the memory that each stage needs for a microbatch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Link, Phase, Placement, Schedule, StageMemory, count_ranks, rank_of, stages_on
from pipec.programs.rank_memory import microbatch_bytes
from pipec.timeline.simulate import SimulationCosts

ROUNDING_TOLERANCE = 1 + 1e-9
"""Sums of the same amounts in another order differ by less than this factor."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The times of one microbatch in each stage, and the memory of each stage. All times are in one unit.

    The first four are times by stage. ``recompute`` is the time to recompute the forward before each
    backward, 0 if the stage saves all that it needs; a whole backward takes the sum of its halves.
    ``messages[s]`` is the time of a message between stages s and s + 1, in either direction, if they are on
    different ranks. ``memory_limit``, in the unit of ``memory``, is the limit of every rank, or has an entry
    for each rank.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    messages: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    memory_limit: float | tuple[float, ...] = math.inf

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
        memory_backward: float = 1.0,
        memory_weight: float = 1.0,
        memory_limit: float | None = None,
    ) -> "Workload":
        """The workload of equal stages, one for each rank. ``for_placement`` divides them further.

        A microbatch holds ``memory_backward`` from its forward to its input gradient, and ``memory_weight``
        from then to its weight gradient.

        Raises:
            InputError: a number is negative, or a microbatch holds nothing.
        """
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        for name, number in {**times, "message": message, "memory_weight": memory_weight}.items():
            if not 0 <= number < math.inf:
                raise InputError(f"{name} is {number}; expected 0 or more, and finite")
        if not 0 < memory_backward < math.inf:
            raise InputError(f"memory_backward is {memory_backward}; expected more than 0, and finite")
        if memory_limit is not None and not memory_limit > 0:
            raise InputError(f"memory_limit is {memory_limit}; expected more than 0")
        return cls(
            **{name: (time,) * num_stages for name, time in times.items()},
            recompute=(0.0,) * num_stages,
            messages=(message,) * (num_stages - 1),
            memory=(StageMemory(saved=memory_backward, weight_gradient_saved=memory_weight),) * num_stages,
            memory_limit=math.inf if memory_limit is None else memory_limit,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def for_placement(self, placement: Placement) -> "Workload":
        """The workload of the stages of ``placement``.

        It is this workload if that has as many stages. Else this workload must have one stage for each rank,
        which is divided equally among the stages of the rank; every message then takes as long as the slowest
        of this workload.
        """
        if len(placement) == self.num_stages:
            return self
        assert self.num_stages == count_ranks(placement), "a workload is of stages, or of ranks"
        ranks = [rank_of(placement, stage) for stage in range(len(placement))]
        num_stages = Counter(ranks)

        def divided(amounts: Sequence[float]) -> tuple[float, ...]:
            return tuple(amounts[rank] / num_stages[rank] for rank in ranks)

        return replace(
            self,
            forward=divided(self.forward),
            backward_input=divided(self.backward_input),
            backward_weight=divided(self.backward_weight),
            recompute=divided(self.recompute),
            messages=(max(self.messages, default=0.0),) * (len(placement) - 1),
            memory=tuple(self.memory[rank].divided(num_stages[rank]) for rank in ranks),
        )

    def scaled(self, factors: Sequence[float]) -> "Workload":
        """The workload with the times of each stage multiplied by its factor."""

        def longer(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(factor * time for factor, time in zip(factors, seconds, strict=True))

        return replace(
            self,
            forward=longer(self.forward),
            backward_input=longer(self.backward_input),
            backward_weight=longer(self.backward_weight),
            recompute=longer(self.recompute),
        )

    def seconds(self, phase: Phase, stage: int) -> float:
        """The time of one phase of a stage. A backward includes recomputing the forward."""
        halves = self.recompute[stage] + self.backward_input[stage], self.backward_weight[stage]
        times: Mapping[Phase, float] = {
            Phase.FORWARD: self.forward[stage],
            Phase.BACKWARD: sum(halves),
            Phase.BACKWARD_INPUT: halves[0],
            Phase.BACKWARD_WEIGHT: halves[1],
        }
        return times[phase]

    def costs(self, schedule: Schedule, links: Sequence[Link]) -> SimulationCosts:
        """The simulator's costs for ``schedule`` and the ``links`` of a chain of stages."""
        work = self.for_placement(schedule.placement)
        phases = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        compute = {
            (stage, phase): work.seconds(phase, stage) for stage in range(work.num_stages) for phase in phases
        }
        messages = {link: work.messages[min(link.source, link.target)] for link in links}
        return SimulationCosts(compute, messages, "units")

    def memory_limits(self, num_ranks: int) -> tuple[float, ...]:
        """The memory limit of each rank."""
        limit = self.memory_limit
        return limit if isinstance(limit, tuple) else (limit,) * num_ranks

    def available_memory(self, placement: Placement) -> tuple[float, ...]:
        """The memory that each rank has left for microbatches.

        That is its limit less the static memory of its stages and the largest transient memory of a phase, or
        0 if the limit is too small for these.
        """
        memory = self.for_placement(placement).memory
        limits = self.memory_limits(count_ranks(placement))
        by_rank = ([memory[stage] for stage in stages_on(placement, rank)] for rank in range(len(limits)))
        return tuple(
            max(0.0, limit - sum(stage.static for stage in own) - max(stage.max_transient for stage in own))
            for limit, own in zip(limits, by_rank, strict=True)
        )

    def peak_memory(self, schedule: Schedule) -> tuple[float, ...]:
        """The peak memory of each rank under ``schedule``."""
        memory = self.for_placement(schedule.placement).memory
        return tuple(
            sum(memory[stage].static for stage in stages_on(schedule.placement, rank))
            + float(microbatch_bytes(order, memory).max(initial=0))
            for rank, order in enumerate(schedule.orders)
        )

    def fits_memory(self, schedule: Schedule) -> bool:
        """Whether every rank stays within its memory limit."""
        pairs = zip(self.peak_memory(schedule), self.memory_limits(schedule.num_ranks), strict=True)
        return all(peak <= limit * ROUNDING_TOLERANCE for peak, limit in pairs)

    def check_memory(self, schedule: Schedule) -> None:
        """Raise InfeasibleError if a rank exceeds its memory limit under ``schedule``."""
        if not self.fits_memory(schedule):
            pairs = zip(self.peak_memory(schedule), self.memory_limits(schedule.num_ranks), strict=True)
            peak, limit = max(pairs, key=lambda pair: pair[0] - pair[1])
            raise InfeasibleError(
                f"schedule {schedule.name!r} holds up to {peak:g} on a rank, "
                f"but the memory limit is {limit:g}; raise the limit or take schedule "
                "'auto', 'zb-1p' or 'v-min'"
            )
