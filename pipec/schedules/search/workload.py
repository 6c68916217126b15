"""What a schedule is searched for: how long each stage takes, and how much memory it needs."""

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
    """What one microbatch takes in each stage, and what each stage holds. All times are in one unit.

    The first four are times by stage. ``recompute`` is the time in which a stage replays its forward before
    each backward, 0 if it keeps what it needs; a whole backward takes the sum of its halves. ``messages[s]``
    is the time of a message between stages s and s + 1, either way, where they are on different ranks.
    ``memory_limit``, in the unit of ``memory``, is that of every rank, or has an entry for each.
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
        """Equal stages, one for each rank; ``for_placement`` divides them where ranks have several.

        A microbatch holds ``memory_backward`` from its forward to its input gradient and ``memory_weight``
        from there to its weight gradient.

        Raises:
            InputError: a number is negative, or a microbatch holds nothing.
        """
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        for what, number in {**times, "message": message, "memory_weight": memory_weight}.items():
            if not 0 <= number < math.inf:
                raise InputError(f"{what} is {number}; expected 0 or more, and finite")
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

    def has_costs_of(self, placement: Placement) -> bool:
        """Whether ``for_placement`` knows the work of stages with this placement."""
        return self.num_stages in (len(placement), count_ranks(placement))

    def for_placement(self, placement: Placement) -> "Workload":
        """The work of the stages that ``placement`` puts on ranks.

        It is this one if it has as many stages. Else it must have one stage for each rank, whose work is then
        divided equally among the stages of the rank; a message between those takes what the slowest does.
        """
        if len(placement) == self.num_stages:
            return self
        assert self.has_costs_of(placement), (
            f"costs of {self.num_stages} stages do not fit placement {placement}"
        )
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
        """The same with stages that take so many times as long for a microbatch."""

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
        """How long one phase of a stage takes, with the replay of its forward if it needs that."""
        halves = self.recompute[stage] + self.backward_input[stage], self.backward_weight[stage]
        times: Mapping[Phase, float] = {
            Phase.FORWARD: self.forward[stage],
            Phase.BACKWARD: sum(halves),
            Phase.BACKWARD_INPUT: halves[0],
            Phase.BACKWARD_WEIGHT: halves[1],
        }
        return times[phase]

    def costs(self, schedule: Schedule, links: Sequence[Link]) -> SimulationCosts:
        """What the simulator is to charge for ``schedule`` and the ``links`` of a plain chain of stages."""
        work = self.for_placement(schedule.placement)
        phases = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        compute = {
            (stage, phase): work.seconds(phase, stage) for stage in range(work.num_stages) for phase in phases
        }
        messages = {link: work.messages[min(link.source, link.target)] for link in links}
        return SimulationCosts(compute, messages, "units")

    def memory_limits(self, num_ranks: int) -> tuple[float, ...]:
        """The memory of each rank."""
        limit = self.memory_limit
        return limit if isinstance(limit, tuple) else (limit,) * num_ranks

    def available_memory(self, placement: Placement) -> tuple[float, ...]:
        """What each rank has left for microbatches beside what its stages hold once and its longest phase.

        It is 0 where the memory is too small for these alone.
        """
        memory = self.for_placement(placement).memory
        limits = self.memory_limits(count_ranks(placement))
        held = ([memory[stage] for stage in stages_on(placement, rank)] for rank in range(len(limits)))
        return tuple(
            max(0.0, limit - sum(stage.static for stage in own) - max(stage.max_transient for stage in own))
            for limit, own in zip(limits, held, strict=True)
        )

    def peak_memory(self, schedule: Schedule) -> tuple[float, ...]:
        """The most that each rank holds at once under ``schedule``."""
        memory = self.for_placement(schedule.placement).memory
        return tuple(
            sum(memory[stage].static for stage in stages_on(schedule.placement, rank))
            + float(microbatch_bytes(order, memory).max(initial=0))
            for rank, order in enumerate(schedule.orders)
        )

    def fits_memory(self, schedule: Schedule) -> bool:
        """Whether every rank stays within its limit."""
        pairs = zip(self.peak_memory(schedule), self.memory_limits(schedule.num_ranks), strict=True)
        return all(peak <= limit * ROUNDING_TOLERANCE for peak, limit in pairs)

    def check_memory(self, schedule: Schedule) -> None:
        """Refuse a schedule that goes beyond the limit.

        Raises:
            InfeasibleError: a rank holds more than its limit.
        """
        if not self.fits_memory(schedule):
            pairs = zip(self.peak_memory(schedule), self.memory_limits(schedule.num_ranks), strict=True)
            peak, limit = max(pairs, key=lambda pair: pair[0] - pair[1])
            raise InfeasibleError(
                f"schedule {schedule.name!r} holds up to {peak:g} on a rank, "
                f"but the memory limit is {limit:g}; raise the limit or take schedule "
                "'auto', 'zb-1p' or 'v-min'"
            )
