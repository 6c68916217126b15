"""Properties of steps with replicas, whatever their schedule, placement and ending."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_steps import Step, make_step, steps

from pipec.errors import InputError
from pipec.ir import Op, Schedule, ShardingLevel
from pipec.ir.stream import window
from pipec.programs.lower import chain_links
from pipec.programs.rank_memory import in_flight, peak_in_flight
from pipec.schedules import make_schedule
from pipec.schedules.replicated import (
    adjacent_pipelines,
    replicate_schedule,
    round_robin,
)
from pipec.timeline.simulate import SimulationCosts, simulate


def costs_of(step: Step, **endings: float) -> SimulationCosts:
    """Every phase takes one unit, a message as long as it is told, and each op of an ending, too."""
    uniform = uniform_costs(
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
