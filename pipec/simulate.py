"""Simulation: the programs that will be executed, played against costs, give the timeline of one step.

Communication overlaps compute. A message leaves when its rank's program reaches the send and arrives
after the seconds of its link; messages do not slow each other down. A compute starts when its rank is
free and everything it reads has arrived.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from pipec.errors import InputError, VerifyError
from pipec.ir import Instruction, Link, Op, Phase, Program


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take: ``compute[stage, phase]``, and ``messages[link]`` between ranks.

    A link that ``messages`` lacks takes no time. ``unit`` is the unit of time, for those who show it.
    """

    compute: Mapping[tuple[int, Phase], float]
    messages: Mapping[Link, float] = field(default_factory=dict)
    unit: str = "s"

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        links: Iterable[Link] = (),
        message: float = 0.0,
        unit: str = "units",
    ) -> "Costs":
        """The same for every stage and every one of ``links``. A fused backward is the sum of its halves."""
        phases = {
            Phase.FORWARD: forward,
            Phase.RECOMPUTE: forward,
            Phase.BACKWARD: backward_input + backward_weight,
            Phase.BACKWARD_INPUT: backward_input,
            Phase.BACKWARD_WEIGHT: backward_weight,
        }
        compute = {(stage, phase): cost for stage in range(num_stages) for phase, cost in phases.items()}
        return cls(compute, dict.fromkeys(links, message), unit)

    def of_compute(self, stage: int, phase: Phase) -> float:
        """Time of one phase of a stage; raises ``InputError`` if it is not given."""
        if (stage, phase) not in self.compute:
            raise InputError(f"no cost is given for {phase} of stage {stage}; add it to Costs.compute")
        return self.compute[stage, phase]


@dataclass(frozen=True, slots=True)
class Event:
    """A compute while it runs, or a message from its send to its arrival at the peer."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def is_compute(self) -> bool:
        return self.instruction.op is not Op.SEND


@dataclass(frozen=True)
class Timeline:
    """One simulated step, from time 0. ``peak_in_flight[rank]`` counts pairs of stage and microbatch.

    ``events`` are ordered by rank, then as in its program.
    """

    events: tuple[Event, ...]
    peak_in_flight: tuple[int, ...]
    unit: str = "s"

    @property
    def num_ranks(self) -> int:
        return len(self.peak_in_flight)

    @cached_property
    def makespan(self) -> float:
        """When the last compute has ended and the last message has arrived."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time any rank takes from the start of its first compute to the end of its last."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for event in self.computes:
            first[event.rank] = min(event.start, first.get(event.rank, event.start))
            last[event.rank] = max(event.end, last.get(event.rank, event.end))
        return max((last[rank] - first[rank] for rank in first), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """The share of ``span`` in which the ranks, on average, compute nothing."""
        return self._share_outside(Phase.FORWARD, *_BACKWARDS, Phase.RECOMPUTE)

    @property
    def overhead_rate(self) -> float:
        """``bubble_rate`` with recomputing counted as lost: 1 - m(F+B+W) / span for equal stages."""
        return self._share_outside(Phase.FORWARD, *_BACKWARDS)

    @cached_property
    def computes(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.is_compute)

    @cached_property
    def messages(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if not event.is_compute)

    def _share_outside(self, *phases: Phase) -> float:
        busy = sum(event.end - event.start for event in self.computes if event.instruction.op.phase in phases)
        return 1 - busy / (self.num_ranks * self.span) if self.span else 0.0


_BACKWARDS = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def peak_in_flight(program: Program) -> int:
    """The most pairs of stage and microbatch a rank holds at once between their forward and their free."""
    changes = ((each.op is Op.FORWARD) - (each.op is Op.FREE) for each in program.instructions)
    return max(accumulate(changes, initial=0))


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Play ``programs`` against ``costs``. Time is linear in the number of instructions.

    Raises:
        InputError: ``costs`` lack a stage and phase that runs.
        VerifyError: a compute reads a message that is never sent.
    """
    arrivals: dict[_Message, float] = {}
    ranks = [_Rank(program, costs, arrivals) for program in programs]
    waiting: dict[_Message, _Rank] = {}
    runnable = deque(ranks)
    while runnable:
        rank = runnable.popleft()
        for message in rank.run():
            if message in waiting:
                runnable.append(waiting.pop(message))
        if rank.missing:
            waiting[rank.missing] = rank
    if waiting:
        where = ", ".join(
            f"rank {rank.program.rank} at instruction {rank.position}" for rank in waiting.values()
        )
        raise VerifyError(f"these wait for messages that are never sent: {where}; verify_programs tells why")
    events = tuple(event for rank in ranks for event in rank.events)
    return Timeline(events, tuple(map(peak_in_flight, programs)), costs.unit)


_Message = tuple[Link, int, int]
"""A link, its microbatch and the rank that receives it."""


class _Rank:
    """One rank as it plays its program."""

    def __init__(self, program: Program, costs: Costs, arrivals: dict[_Message, float]) -> None:
        self.program = program
        self.events: list[Event] = []
        self.position = 0
        self.missing: _Message | None = None
        self._costs = costs
        self._arrivals = arrivals
        self._clock = 0.0
        self._unread: dict[tuple[Phase, int, int], list[_Message]] = defaultdict(list)

    def run(self) -> Iterator[_Message]:
        """Go on to the end, or to a compute whose input is ``missing``; yields each message it sends."""
        while self.position < len(self.program.instructions):
            instruction = self.program.instructions[self.position]
            if instruction.op.phase and not self._compute(instruction, instruction.op.phase):
                return
            if instruction.op is Op.SEND:
                yield self._send(instruction)
            elif instruction.op is Op.RECV:
                self._receive(instruction)
            self.position += 1

    def _compute(self, instruction: Instruction, phase: Phase) -> bool:
        """Run a compute if its inputs are known to arrive; otherwise say which is missing."""
        stage, microbatch = instruction.stage, instruction.microbatch
        inputs = [*self._unread[phase, stage, microbatch], *self._unread[phase, stage, -1]]
        self.missing = next((message for message in inputs if message not in self._arrivals), None)
        if self.missing:
            return False
        start = max([self._clock, *(self._arrivals[message] for message in inputs)])
        self._clock = start + self._costs.of_compute(stage, phase)
        self.events.append(Event(self.program.rank, instruction, start, self._clock))
        return True

    def _send(self, instruction: Instruction) -> _Message:
        assert instruction.link
        message = (instruction.link, instruction.microbatch, instruction.peer)
        arrival = self._clock + self._costs.messages.get(instruction.link, 0.0)
        self._arrivals[message] = arrival
        self.events.append(Event(self.program.rank, instruction, self._clock, arrival))
        return message

    def _receive(self, instruction: Instruction) -> None:
        assert instruction.link
        for phase in instruction.link.payload.readers:
            message = (instruction.link, instruction.microbatch, self.program.rank)
            self._unread[phase, instruction.stage, instruction.microbatch].append(message)
