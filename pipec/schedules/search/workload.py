"""What a schedule is searched for: how long the work of each rank takes, and how much memory it may hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Link, Phase, Schedule
from pipec.timeline.simulate import Costs


@dataclass(frozen=True, slots=True)
class Workload:
    """One microbatch's forward, input gradient and weight gradient on each rank, and a message between ranks.

    A rank that holds several stages does an equal share of its work in each; a whole backward takes the sum
    of its halves. All times are in one unit. A microbatch holds ``memory_backward`` of its rank from forward
    to input gradient and ``memory_weight`` from there to weight gradient, in the unit of ``memory_limit``;
    without a limit, a schedule may hold what it likes.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    message: float = 0.0
    memory_backward: float = 1.0
    memory_weight: float = 1.0
    memory_limit: float | None = None

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
        memory_backward: float = 1.0,
        memory_weight: float = 1.0,
        memory_limit: float | None = None,
    ) -> "Workload":
        """The same on every rank.

        Raises:
            InputError: a number is negative, or a microbatch holds nothing.
        """
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        for what, number in {**times, "message": message, "memory_weight": memory_weight}.items():
            if number < 0:
                raise InputError(f"{what} is {number}; expected 0 or more")
        if memory_backward <= 0:
            raise InputError(f"memory_backward is {memory_backward}; expected more than 0")
        each_rank = {name: (time,) * num_ranks for name, time in times.items()}
        return cls(
            **each_rank,
            recompute=each_rank["forward"],
            message=message,
            memory_backward=memory_backward,
            memory_weight=memory_weight,
            memory_limit=memory_limit,
        )

    def of_stage(self, phase: Phase, placement: tuple[int, ...], stage: int) -> float:
        """Time of one phase of a stage where ``placement`` puts the stages on ranks."""
        rank = placement[stage]
        halves = self.backward_input[rank], self.backward_weight[rank]
        times: Mapping[Phase, float] = {
            Phase.FORWARD: self.forward[rank],
            Phase.RECOMPUTE: self.recompute[rank],
            Phase.BACKWARD: sum(halves),
            Phase.BACKWARD_INPUT: halves[0],
            Phase.BACKWARD_WEIGHT: halves[1],
        }
        return times[phase] / placement.count(rank)

    def costs(self, schedule: Schedule, links: tuple[Link, ...]) -> Costs:
        """For the simulator: every one of ``links`` takes a message's time."""
        stages = range(schedule.num_stages)
        compute = {
            (stage, phase): self.of_stage(phase, schedule.placement, stage)
            for stage in stages
            for phase in Phase
        }
        return Costs(compute, dict.fromkeys(links, self.message), "units")

    def peak_memory(self, schedule: Schedule) -> float:
        """The most that any rank holds at once under ``schedule``."""
        return max(self._peak(schedule, rank) for rank in range(schedule.num_ranks))

    def _peak(self, schedule: Schedule, rank: int) -> float:
        changes = {
            Phase.FORWARD: self.memory_backward,
            Phase.BACKWARD: -self.memory_backward,
            Phase.BACKWARD_INPUT: self.memory_weight - self.memory_backward,
            Phase.BACKWARD_WEIGHT: -self.memory_weight,
        }
        held = peak = 0.0
        for cell in schedule.orders[rank]:
            held += changes.get(cell.phase, 0.0) / schedule.placement.count(rank)
            peak = max(peak, held)
        return peak

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank stays within the limit."""
        slack = 1e-9 * (self.memory_limit or 0.0)
        return self.memory_limit is None or self.peak_memory(schedule) <= self.memory_limit + slack

    def check_fits(self, schedule: Schedule) -> None:
        """Refuse a schedule that goes beyond the limit.

        Raises:
            InfeasibleError: a rank holds more than ``memory_limit``.
        """
        if not self.fits(schedule):
            raise InfeasibleError(
                f"schedule {schedule.name!r} holds up to {self.peak_memory(schedule):g} on a rank, "
                f"but the memory limit is {self.memory_limit:g}; raise the limit or take schedule "
                "'auto', 'zb-1p' or 'v-min'"
            )
