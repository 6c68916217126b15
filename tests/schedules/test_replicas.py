"""Properties of steps with replicas, whatever their schedule, placement and ending."""

import functools
from dataclasses import replace
from math import ceil

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_steps import make_step

from pipec.errors import InputError
from pipec.ir import ShardingLevel
from pipec.ir.stream import window
from pipec.programs.lower import chain_links
from pipec.programs.rank_memory import in_flight, peak_in_flight
from pipec.schedules import make_schedule
from pipec.schedules.replicated import (
    adjacent_pipelines,
    replicate_schedule,
    round_robin,
)
from pipec.timeline.simulate import simulate

seconds = st.integers(0, 5).map(float)


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
        programs = step.programs()
        endings = {(x.op, x.stage, x.bucket): price.get(x.op, 0.0) for p in programs for x in p.instructions}
        return simulate(programs, replace(uniform_costs(1), sync_times=endings)).makespan

    assert makespan() == 3 * rounds + reduce
    assert makespan(updates=True) == 3 * rounds + reduce + update
    assert makespan(updates=True, clips=True) == 3 * rounds + reduce + norm + update
    assert makespan(updates=True, shard=ShardingLevel.OPTIMIZER) == 3 * rounds + reduce + update + gather
    assert makespan(updates=True, shard=ShardingLevel.PARAMETERS) >= gather + 3 * rounds + reduce + update


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_round_robin_on_equal_numbers_is_1f1b_lifted(stages: int, replicas: int, rounds: int) -> None:
    several = round_robin(rounds * replicas, [replicas] * stages)
    other = replicate_schedule(functools.partial(make_schedule, "1f1b", stages), rounds * replicas, replicas)
    assert several.placement == other.placement
    assert [*map(list, several.orders)] == [*map(list, other.orders)]


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


def test_a_replica_without_a_microbatch_is_refused() -> None:
    with pytest.raises(InputError, match="a stage has 3 replicas, which need a microbatch each"):
        round_robin(2, [3, 1])


@given(st.integers(1, 4), st.integers(1, 4))
def test_side_by_side_puts_the_ranks_of_a_pipeline_next_to_each_other(replicas: int, num_ranks: int) -> None:
    acting = adjacent_pipelines(num_ranks, replicas)
    assert sorted(rank for ranks in acting for rank in ranks) == list(range(replicas * num_ranks))
    for pipeline in zip(*acting, strict=True):
        assert list(pipeline) == list(range(pipeline[0], pipeline[0] + num_ranks))
    assert adjacent_pipelines(3, 2) == ((0, 3), (1, 4), (2, 5))
