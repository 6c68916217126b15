"""Equal replicas: what is made and proved of a few of them is what all of them do."""

import functools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from bare_programs import lower, uniform_costs
from cli_models import mlp
from example_schedules import result_link, value
from hypothesis import given, settings
from hypothesis import strategies as st

import pipec
from pipec.ir import (
    Compute,
    Link,
    Op,
    Payload,
    Phase,
    RepresentativeRanks,
    Schedule,
    ShardingLevel,
)
from pipec.programs.lower import chain_links
from pipec.programs.representative_replicas import representative_replicas
from pipec.schedules import make_schedule, remap_ranks
from pipec.schedules.chain_simulation import chain_sync_spec
from pipec.schedules.replicated import adjacent_pipelines, adjacent_replicas, replicate_schedule, round_robin
from pipec.timeline.simulate import simulate


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "looped-bfs"]),
    st.integers(2, 3),
    st.integers(5, 7),
    st.floats(1, 4, exclude_max=True),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, *ShardingLevel]),
)
def test_a_few_replicas_do_what_all_do(
    name: str, num_ranks: int, replicas: int, rounds: float, apart: bool, told: bool, shard: ShardingLevel
) -> None:
    """The ranks of a pipeline are next to each other or ``apart``; all are ``told`` the loss, or the last."""
    schedule = replicate_schedule(
        functools.partial(make_schedule, name, num_ranks), int(rounds * replicas), replicas
    )
    if not apart:
        members = zip(
            adjacent_replicas(num_ranks, replicas), adjacent_pipelines(num_ranks, replicas), strict=True
        )
        ranks = {old: new for pair in members for old, new in zip(*pair, strict=True)}
        schedule = remap_ranks(schedule, [ranks[rank] for rank in range(num_ranks * replicas)])
    few = representative_replicas(schedule, most_ranks=0)
    assert few is not None
    sync_spec = replace(chain_sync_spec(schedule.placement, 0.5), updates=True, clips=True, shard=shard)
    last = schedule.num_stages - 1
    links = (*chain_links(schedule.num_stages), result_link(last, -1 if told else last))
    if not shard:  # a tied weight stays whole, and nothing is lent here
        links = (*links, Link(0, last, Payload.WEIGHT, (value("tied", 2),)))
    whole = lower(schedule, links, sync_spec=sync_spec)
    made = lower(few.schedule, links, sync_spec=sync_spec)
    shown = few.in_step(made)
    for program in shown:
        assert list(program.instructions) == list(whole[program.rank].instructions)
    costs = uniform_costs(schedule.num_stages, backward_weight=2.0, links=links, message=0.25)
    costs = replace(costs, sync_times={(Op.REDUCE_GRAD, stage, stage): 0.5 for stage in range(2)})
    representatives = RepresentativeRanks.of(schedule.placement, [each.rank for each in shown])
    assert representatives
    assert sum(representatives.counts) == schedule.num_ranks
    expected = simulate(whole, costs)
    found = replace(simulate(shown, costs), representatives=representatives)
    assert found.makespan == expected.makespan
    assert found.span == expected.span
    assert found.bubble_rate == pytest.approx(expected.bubble_rate)
    for rank in range(schedule.num_ranks):
        stand_in = representatives.ranks.index(representatives.represented_by[rank])
        assert found.peak_in_flight[stand_in] == expected.peak_in_flight[rank]
        mine, its = expected.columns.of_rank(rank), found.columns.of_rank(stand_in)
        for times in ("starts", "ends"):
            own, others = (
                getattr(events, times)[events.is_blocking | events.is_collective] for events in (mine, its)
            )
            np.testing.assert_array_equal(own, others)


def test_what_is_not_alike_is_not_taken_together() -> None:
    def is_alike(schedule: Schedule, most_ranks: int = 0) -> bool:
        return representative_replicas(schedule, most_ranks=most_ranks) is not None

    schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 12, 6)
    assert is_alike(schedule, most_ranks=11)
    assert not is_alike(schedule, most_ranks=12)
    orders = list(schedule.orders)
    orders[3] = (*orders[3][1:], orders[3][0])
    assert not is_alike(replace(schedule, orders=tuple(orders)))
    other = Compute(Phase.FORWARD, 0, 1)
    orders[3] = tuple(other if each == orders[3][0] else each for each in orders[3])
    assert not is_alike(replace(schedule, orders=tuple(orders)))
    assert not is_alike(round_robin(12, (3, 2, 1)))
    assert not is_alike(make_schedule("1f1b", 4, 4))
    assert not is_alike(replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 4, 2))


def prepared() -> pipec.Pipeline:
    example = mlp()
    options = {"optimizer": functools.partial(torch.optim.Adam, lr=1e-3), "shard": "optimizer"}
    pipe = pipec.compile(example.model, 10, stages=2, microbatches=7, loss_fn=example.loss_fn, **options)
    return pipe.prepare(torch.ones(70, 16), target=torch.zeros(70, 4))


def test_programs_of_all_ranks_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every rank holds what its stand-in holds, for the same time."""
    whole = prepared()
    monkeypatch.setattr("pipec.programs.representative_replicas.MAX_RANKS_WITHOUT_REPRESENTATIVES", 4)
    pipe = prepared()
    assert pipe.simulate().representatives is not None
    assert whole.simulate().representatives is None
    assert pipe.simulate().makespan == whole.simulate().makespan
    for found, expected in zip(pipe.memory(), whole.memory(), strict=True):
        assert found.rank == expected.rank
        assert found.bytes_by_category == expected.bytes_by_category
    artifact = pipe._artifact
    assert {each.rank for each in artifact.representative_programs} < {*range(10)}
    for each in artifact.representative_programs:
        assert list(each.instructions) == list(whole.programs[each.rank].instructions)
    assert artifact.programs == whole.programs
    sent = pickle.loads(pickle.dumps(artifact))
    assert (list(sent.representative_programs), sent.programs) == (list(artifact.programs), artifact.programs)
