"""Properties of steps with replicas, whatever their schedule, placement and ending."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import pytest
from bare_programs import lower, verify_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_steps import EQUAL, Step, check_meaning, make_step, schedules, steps

from pipec.errors import InputError
from pipec.ir import Link, Op, Phase, Program, Schedule, ShardingLevel, rank_of
from pipec.ir.stream import window
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.lower import chain_links
from pipec.programs.rank_memory import in_flight, peak_in_flight
from pipec.schedules import make_schedule
from pipec.schedules.replicated import (
    adjacent_pipelines,
    replicate_placement,
    replicate_schedule,
    round_robin,
)
from pipec.timeline.simulate import SimulationCosts, simulate


@settings(max_examples=40)
@given(steps())
def test_programs_verify_and_deliver_every_gradient_once(step: Step) -> None:
    programs = step.programs()
    step.verify(programs)
    check_meaning(step, programs)


def costs_of(step: Step, **endings: float) -> SimulationCosts:
    """Every phase takes one unit, a message as long as it is told, and each op of an ending, too."""
    uniform = SimulationCosts.uniform(
        step.schedule.num_stages, links=step.plan.links, message=endings.get("message", 0)
    )
    seconds = {
        (each.op, each.stage, each.bucket): endings.get(each.op.value, 0.0)
        for program in step.programs()
        for each in program.instructions
    }
    return replace(
        uniform,
        sync_times=seconds,
        segments={key: halves(count) for key, count in step.plan.segments.items()},
    )


def halves(count: int) -> list[float]:
    """Shares that add up without rounding."""
    return [*(2.0**-k for k in range(1, count)), 2.0 ** (1 - count)]


def renumbered(schedule: Schedule, numbers: Sequence[int]) -> Schedule:
    """The same schedule with rank k called ``numbers[k]``."""
    placement = tuple(tuple(numbers[rank] for rank in ranks) for ranks in schedule.placement)
    orders = {numbers[rank]: order for rank, order in enumerate(schedule.orders)}
    return replace(schedule, placement=placement, orders=tuple(orders[k] for k in sorted(orders)))


seconds = st.integers(0, 5).map(float)
prices = st.fixed_dictionaries({op.value: seconds for op in Op if op.traits.timed} | {"message": seconds})


@pytest.mark.slow
@pytest.mark.slow
@settings(max_examples=30)
@given(steps(), prices, st.randoms(use_true_random=False))
def test_the_numbers_of_ranks_change_no_time(step: Step, price: Mapping[str, float], random) -> None:
    numbers = list(range(step.schedule.num_ranks))
    random.shuffle(numbers)
    other = replace(step, schedule=renumbered(step.schedule, numbers))
    times = [simulate(each.programs(), costs_of(each, **price)) for each in (step, other)]
    assert times[0].makespan == times[1].makespan
    assert sorted(times[0].events.ends.tolist()) == sorted(times[1].events.ends.tolist())


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(EQUAL), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_equal_replicas_take_as_long_as_one_pipeline_with_its_share(
    name: str, ranks: int, replicas: int, rounds: int
) -> None:
    make = functools.partial(make_schedule, name, ranks)
    try:
        one = make_step(make(rounds))
    except InputError:
        return
    several = make_step(replicate_schedule(make, rounds * replicas, replicas))
    assert several.schedule.placement == replicate_placement(one.schedule.placement, replicas)
    price = {"message": 0.5}
    alone, together = (simulate(each.programs(), costs_of(each, **price)) for each in (one, several))
    assert together.makespan == alone.makespan


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(2, 4), seconds, seconds, seconds, seconds)
def test_data_parallelism_takes_its_computes_and_what_comes_behind(
    rounds: int, replicas: int, reduce: float, norm: float, update: float, gather: float
) -> None:
    count = max(rounds * replicas - 1, replicas)
    schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 1), count, replicas)
    price = {"reduce_grad": reduce, "grad_norm": norm, "update": update, "unshard": gather}

    def makespan(**options: object) -> float:
        step = make_step(schedule, **options)  # type: ignore[arg-type]
        return simulate(step.programs(), costs_of(step, **price)).makespan

    assert makespan() == 3 * rounds + reduce
    assert makespan(updates=True) == 3 * rounds + reduce + update
    assert makespan(updates=True, clips=True) == 3 * rounds + reduce + norm + update
    assert makespan(updates=True, shard=ShardingLevel.OPTIMIZER) == 3 * rounds + reduce + update + gather
    assert makespan(updates=True, shard=ShardingLevel.PARAMETERS) >= gather + 3 * rounds + reduce + update


@settings(max_examples=15)
@given(st.integers(2, 4), st.integers(1, 3), seconds)
def test_a_reduce_runs_beside_what_its_rank_computes_next(ranks: int, rounds: int, reduce: float) -> None:
    """In looped BFS a rank's later stages end first: only the reduce of its first stage is in the way."""
    schedule = replicate_schedule(
        functools.partial(make_schedule, "looped-bfs", ranks), 2 * rounds * ranks, 2
    )
    step = make_step(schedule)
    free = simulate(step.programs(), costs_of(step)).makespan
    taken = simulate(step.programs(), costs_of(step, reduce_grad=reduce)).makespan
    assert free + reduce <= taken <= free + reduce * schedule.num_stages / ranks


def cells(schedule: Schedule) -> list[list[object]]:
    return [list(order) for order in schedule.orders]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_round_robin_on_equal_numbers_is_1f1b_lifted(stages: int, replicas: int, rounds: int) -> None:
    several = round_robin(rounds * replicas, [replicas] * stages)
    other = replicate_schedule(functools.partial(make_schedule, "1f1b", stages), rounds * replicas, replicas)
    assert several.placement == other.placement
    assert cells(several) == cells(other)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 12))
def test_round_robin_keeps_a_window_of_microbatches_in_flight(replicas: list[int], more: int) -> None:
    schedule = round_robin(max(replicas) + more, replicas)
    links = chain_links(len(replicas))
    programs = lower(schedule, links)
    limits = [window(stage, replicas) for stage, number in enumerate(replicas) for _ in range(number)]
    count = schedule.num_microbatches
    verify_programs(programs, schedule.placement, links, count)
    assert all(found <= most for found, most in zip(map(peak_in_flight, programs), limits, strict=True))
    first = [k for k, program in enumerate(programs) if schedule.placement[0][0] == program.rank]
    needed = min(limits[0], ceil(count / replicas[0]))
    assert int(in_flight(programs[first[0]].instructions).max()) == needed


@given(schedules())
def test_every_cell_runs_on_the_replica_of_its_microbatch(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule.orders):
        for cell in order:
            assert rank_of(schedule.placement, cell.stage, cell.microbatch) == rank


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: round_robin(2, [3, 1]),
            "a stage has 3 replicas, which need a microbatch each",
        ),
        (
            lambda: replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 1, 2),
            "2 replicas need a microbatch each, but there are 1; pass microbatches=2 or more",
        ),
    ],
)
def test_a_replica_without_a_microbatch_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@given(st.integers(1, 4), st.integers(1, 4))
def test_side_by_side_puts_the_ranks_of_a_pipeline_next_to_each_other(replicas: int, num_ranks: int) -> None:
    acting = adjacent_pipelines(num_ranks, replicas)
    assert sorted(rank for ranks in acting for rank in ranks) == list(range(replicas * num_ranks))
    for pipeline in zip(*acting, strict=True):
        assert list(pipeline) == list(range(pipeline[0], pipeline[0] + num_ranks))
    assert adjacent_pipelines(3, 2) == ((0, 3), (1, 4), (2, 5))


@settings(max_examples=20)
@given(steps())
def test_the_text_of_a_program_is_read_back_with_its_buckets(step: Step) -> None:
    for program in step.programs():
        text = format_program(program)
        again = parse_program(text, step.plan.links)
        assert again == Program(program.rank, tuple(program.instructions))
        assert format_program(again) == text


def test_the_text_of_an_ending_is_readable() -> None:
    step = make_step(
        round_robin(2, [2]), buffer_sync_stages=(0,), updates=True, clips=True, shard=ShardingLevel.PARAMETERS
    )
    assert (
        format_program(step.programs()[1])
        == """\
rank 1: 13 instructions
 0  unshard               stage 0        bucket 0
 1  wait_unshard          stage 0        bucket 0
 2  forward               stage 0  mb 1
 3  average_buffers       stage 0
 4  backward              stage 0  mb 1
 5  accumulate            stage 0  mb 1
 6  free                  stage 0  mb 1
 7  reshard               stage 0        bucket 0
 8  reduce_grad           stage 0        bucket 0
 9  wait_reduce_grad      stage 0        bucket 0
10  grad_norm
11  update                stage 0
12  wait_average_buffers  stage 0
"""
    )


def test_links_of_a_replicated_stage_lead_to_the_replica_of_the_microbatch() -> None:
    programs = lower(round_robin(3, [2, 1]), chain_links(2))
    sends = [
        (each.microbatch, program.rank, each.peer)
        for program in programs
        for each in program.instructions
        if each.op is Op.SEND and isinstance(each.link, Link) and each.link.source == 1
    ]
    assert sorted(sends) == [(0, 2, 0), (1, 2, 1), (2, 2, 0)]
    assert Phase.BACKWARD in {each.op.phase for each in programs[0].instructions}
