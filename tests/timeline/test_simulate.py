"""Simulation: hand-computed timelines, closed forms, and a simulator that goes one instruction at a time."""

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from example_schedules import result_link, skip_links, tied_links, v_gpipe
from hypothesis import given
from hypothesis import strategies as st

from pipec.errors import InputError, VerifyError
from pipec.ir import Bucket, Instruction, Link, Op, Phase, Program, Schedule, SyncSpec, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import SimulationCosts, simulate


def played(schedule: Schedule, **costs: float) -> Timeline:
    links = chain_links(schedule.num_stages)
    return simulate(lower(schedule, links), uniform_costs(schedule.num_stages, links=links, **costs))


def test_a_wait_holds_its_rank_where_it_stands() -> None:
    """Rank 1 awaits its second input before its first forward: it begins when both have come."""
    links = chain_links(2)
    first, second = lower(make_schedule("gpipe", 2, 2), links)
    own = list(second.instructions)
    wait = next(each for each in own if each.op is Op.WAIT_RECV and each.microbatch == 1)
    own.remove(wait)
    own.insert(own.index(Instruction(Op.FORWARD, 1, 0)), wait)
    moved = Program(1, tuple(own))
    verify_programs([first, moved], make_schedule("gpipe", 2, 2).placement, links, 2)
    costs = uniform_costs(2, links=links, message=0.5)
    starts = [
        [each.start for each in simulate([first, program], costs).computes.of_rank(1)]
        for program in (second, moved)
    ]
    assert starts == [[1.5, 2.5, 3.5, 5.5], [2.5, 3.5, 4.5, 6.5]]


def one_by_one(
    programs: Sequence[Program], costs: SimulationCosts
) -> list[tuple[int, Op, int, int, float, float]]:
    """What ``simulate`` says, by running each rank until a message it reads has not been sent yet."""
    arrivals: dict[tuple[Link, int, int], float] = {}
    channels: dict[tuple[int, int], float] = {}
    position, clock = [0] * len(programs), [0.0] * len(programs)
    events: list[list[tuple[int, Op, int, int, float, float]]] = [[] for _ in programs]
    reads: list[list[tuple[Link, int, int]]] = [[] for _ in programs]

    def run(rank: int, each: Instruction) -> bool:
        start = end = clock[rank]
        if each.op is Op.RECV and each.link:
            reads[rank].append((each.link, each.microbatch, rank))
        elif each.op is Op.SEND and each.link:
            start = max(start, channels.get((rank, each.peer), 0.0))
            channels[rank, each.peer] = end = start + costs.messages[each.link]
            arrivals[each.link, each.microbatch, each.peer] = end
        elif each.op.phase:
            read = [
                message
                for message in reads[rank]
                if each.op.phase in message[0].payload.readers
                and (message[0].target, message[1]) in ((each.stage, each.microbatch), (each.stage, -1))
            ]
            if not all(message in arrivals for message in read):
                return False
            start = max([start, *map(arrivals.__getitem__, read)])
            clock[rank] = end = start + costs.compute_time(each.stage, each.op.phase)
        if each.op is Op.SEND or each.op.phase:
            events[rank].append((rank, each.op, each.stage, each.microbatch, start, end))
        position[rank] += 1
        return True

    while any(position[rank] < len(program.instructions) for rank, program in enumerate(programs)):
        for rank, program in enumerate(programs):
            while position[rank] < len(program.instructions):
                if not run(rank, program.instructions[position[rank]]):
                    break
    return [event for own in events for event in own]


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "v-gpipe"]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_all_ranks_at_once_take_the_time_of_one_instruction_after_another(
    name: str, num_ranks: int, rounds: int, replays: bool, random: Random
) -> None:
    """With skip connections, tied weights, results and recomputing, at costs that are no round numbers."""
    microbatches = rounds * num_ranks
    make = v_gpipe if name == "v-gpipe" else partial(make_schedule, name)
    schedule = make(num_ranks, microbatches)
    last = schedule.num_stages - 1
    links = (*chain_links(last + 1), *skip_links(0, last), *tied_links(0, last), result_link(last))
    programs = lower(schedule, links if last else (), [0] if replays else [])
    compute = {(stage, phase): random.random() for stage in range(last + 1) for phase in Phase}
    costs = SimulationCosts(compute, {link: random.random() for link in links})
    simulated = [
        (e.rank, e.instruction.op, e.instruction.stage, e.instruction.microbatch, e.start, e.end)
        for e in simulate(programs, costs).events
    ]
    assert simulated == one_by_one(programs, costs)


def test_a_weight_that_arrives_late_delays_the_first_forward_and_a_late_gradient_the_end() -> None:
    weight, gradient = tied_links(0, 1)
    links = (*chain_links(2), weight, gradient)
    compute = uniform_costs(2).compute
    timeline = simulate(
        lower(make_schedule("1f1b", 2, 1), links), SimulationCosts(compute, {weight: 7, gradient: 9})
    )
    forward = next(e for e in timeline.computes if e.rank == 1)
    assert forward.start == 7
    assert (timeline.makespan, timeline.span) == (10 + 9, 12)
    assert timeline.unit == "s"


def test_a_missing_cost_is_named() -> None:
    costs = SimulationCosts({(0, Phase.FORWARD): 1.0})
    with pytest.raises(InputError, match="no cost is given for backward of stage 0"):
        simulate(lower(make_schedule("gpipe", 1, 2), ()), costs)


def test_parts_take_their_shares_of_a_phase() -> None:
    """A sum begins behind its part, and the rank goes on meanwhile."""
    schedule = replicate_schedule(partial(make_schedule, "gpipe", 1), 2, 2)
    buckets = tuple(Bucket(0, (Value(name, "float32", (1,)),), segment=k) for k, name in enumerate("vw"))
    backward = (0, Phase.BACKWARD)
    programs = lower(schedule, (), sync_spec=SyncSpec(buckets), segments={backward: 2})
    endings = {(Op.REDUCE_GRAD, 0, number): 4.0 for number in range(2)}
    costs = SimulationCosts(
        {(0, Phase.FORWARD): 1.0, backward: 8.0}, sync_times=endings, segments={backward: (0.25, 0.75)}
    )
    events = simulate(programs, costs).columns.of_rank(0)
    found = [(each.instruction.op, each.instruction.segment, each.start, each.end) for each in events]
    assert found == [
        (Op.FORWARD, -1, 0, 1),
        (Op.BACKWARD, 0, 1, 3),
        (Op.REDUCE_GRAD, -1, 3, 7),
        (Op.BACKWARD, 1, 3, 9),
        (Op.REDUCE_GRAD, -1, 9, 13),
    ]


@pytest.mark.parametrize("costs", [{"message": float("inf")}, {"message": float("nan")}])
def test_a_cost_without_end_is_refused(costs: dict[str, float]) -> None:
    with pytest.raises(InputError, match="a cost is no finite number"):
        played(make_schedule("1f1b", 2, 2), **costs)


def test_a_wait_for_what_is_never_sent_is_named() -> None:
    programs = lower(make_schedule("gpipe", 2, 2), chain_links(2))
    unsent = tuple(each for each in programs[0].instructions if each.op is not Op.SEND)
    with pytest.raises(VerifyError, match=r"^rank 1 at instruction 2 waits for what is never sent;"):
        simulate([Program(0, unsent), programs[1]], uniform_costs(2))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 1 awaits its forward's input only after its backward, whose gradient that forward needs."""
    programs = lower(make_schedule("gpipe", 2, 1), chain_links(2))
    own = [each for each in programs[0].instructions if each.op is not Op.WAIT_RECV]
    wait = next(each for each in programs[0].instructions if each.op is Op.WAIT_RECV)
    with pytest.raises(
        VerifyError, match="wait for each other: rank 0 at instruction 1, rank 1 at instruction"
    ):
        simulate([Program(0, (wait, *own)), programs[1]], uniform_costs(2))
