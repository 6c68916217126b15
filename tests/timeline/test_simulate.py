"""Simulation: hand-computed timelines, closed forms, and a simulator that goes one instruction at a time."""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from bare_programs import lower, uniform_costs
from example_schedules import result_link, skip_links, tied_links, v_gpipe
from hypothesis import given
from hypothesis import strategies as st
from simulated_steps import played

from pipec.errors import InputError, VerifyError
from pipec.ir import Bucket, Instruction, Link, Op, Phase, Program, SyncSpec, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.events import Event
from pipec.timeline.simulate import SimulationCosts, simulate


def test_a_wait_holds_its_rank_where_it_stands() -> None:
    """Rank 1 awaits its second input before its first forward: it begins when both have come."""
    links = chain_links(2)
    first, second = lower(make_schedule("gpipe", 2, 2), links)
    own = list(second.instructions)
    wait = next(each for each in own if each.op is Op.WAIT_RECV and each.microbatch == 1)
    own.remove(wait)
    own.insert(own.index(Instruction(Op.FORWARD, 1, 0)), wait)
    costs = uniform_costs(2, links=links, message=0.5)
    starts = [
        [each.start for each in simulate([first, program], costs).computes.of_rank(1)]
        for program in (second, Program(1, tuple(own)))
    ]
    assert starts == [[1.5, 2.5, 3.5, 5.5], [2.5, 3.5, 4.5, 6.5]]


def one_by_one(programs: Sequence[Program], costs: SimulationCosts) -> list[Event]:
    """What ``simulate`` says, by running each rank until it waits for a message that was not sent yet."""
    arrivals: dict[tuple[Link | None, int], float] = {}
    channels: dict[tuple[int, int], float] = defaultdict(float)
    clock, left = [0.0] * len(programs), [deque(program.instructions) for program in programs]
    events: list[list[Event]] = [[] for _ in programs]
    while any(left):
        for rank, own in enumerate(left):
            while own and (own[0].op is not Op.WAIT_RECV or (own[0].link, own[0].microbatch) in arrivals):
                each, start = own.popleft(), clock[rank]
                message = each.link, each.microbatch
                if each.op is Op.WAIT_RECV:
                    clock[rank] = max(start, arrivals[message])
                elif each.op is Op.SEND:
                    start = max(start, channels[rank, each.peer])
                    channels[rank, each.peer] = arrivals[message] = end = start + costs.messages[each.link]
                elif each.op.phase:
                    clock[rank] = end = start + costs.compute_time(each.stage, each.op.phase)
                if each.op is Op.SEND or each.op.phase:
                    events[rank].append(Event(rank, each, start, end))
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
    timeline, expected = simulate(programs, costs), one_by_one(programs, costs)
    assert [*timeline.events] == expected
    assert timeline.makespan == max(event.end for event in expected)
    computes = [[e for e in expected if e.rank == rank and e.is_compute] for rank in range(num_ranks)]
    assert timeline.span == pytest.approx(max(own[-1].end - own[0].start for own in computes))


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


def test_a_wait_for_a_message_that_is_never_sent_is_named() -> None:
    programs = lower(make_schedule("gpipe", 2, 2), chain_links(2))
    unsent = tuple(each for each in programs[0].instructions if each.op is not Op.SEND)
    with pytest.raises(VerifyError, match=r"^rank 1 at instruction 2 waits for what is never sent;"):
        simulate([Program(0, unsent), programs[1]], uniform_costs(2))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 waits for its gradient before it runs the forward that rank 1 needs."""
    programs = lower(make_schedule("gpipe", 2, 1), chain_links(2))
    own = [each for each in programs[0].instructions if each.op is not Op.WAIT_RECV]
    wait = next(each for each in programs[0].instructions if each.op is Op.WAIT_RECV)
    with pytest.raises(
        VerifyError, match="wait for each other: rank 0 at instruction 1, rank 1 at instruction"
    ):
        simulate([Program(0, (wait, *own)), programs[1]], uniform_costs(2))
