"""Equal replicas: what is made and proved of a few of them is what all of them do."""

import functools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from bare_programs import lower, uniform_costs, verify_programs
from cli_models import mlp
from hypothesis import given, settings
from hypothesis import strategies as st

import pipec
from pipec.ir import (
    Compute,
    Instruction,
    Link,
    Op,
    Payload,
    Phase,
    RepresentativeRanks,
    Schedule,
    ShardingLevel,
    SyncSpec,
    Value,
)
from pipec.ir.columns import InstructionColumns
from pipec.plan.predictions import plan_memory, simulate_plan
from pipec.programs.lower import chain_links
from pipec.programs.representative_replicas import RepresentativeReplicas, representative_replicas
from pipec.schedules import make_schedule, remap_ranks
from pipec.schedules.chain_simulation import chain_sync_spec
from pipec.schedules.replicated import adjacent_pipelines, adjacent_replicas, replicate_schedule, round_robin
from pipec.timeline.simulate import simulate

Step = tuple[Schedule, RepresentativeReplicas, tuple[Link, ...], SyncSpec]


def links_of(num_stages: int, target: int = -1) -> tuple[Link, ...]:
    result = Link(num_stages - 1, target, Payload.RESULT, (Value("loss", "float32", ()),))
    tied = [
        Link(*ends, payload, (Value("tied", "float32", (2,)),))
        for ends, payload in [((0, num_stages - 1), Payload.WEIGHT)]
    ]
    return (*chain_links(num_stages), *tied, result)


def step(name: str, num_ranks: int, replicas: int, microbatches: int, apart: bool) -> Step:
    """A step with its few replicas, the ranks of a pipeline next to each other or ``apart``."""
    make = functools.partial(make_schedule, name, num_ranks)
    schedule = replicate_schedule(make, microbatches, replicas)
    if not apart:
        members = zip(
            adjacent_replicas(num_ranks, replicas), adjacent_pipelines(num_ranks, replicas), strict=True
        )
        ranks = {old: new for pair in members for old, new in zip(*pair, strict=True)}
        schedule = remap_ranks(schedule, [ranks[rank] for rank in range(num_ranks * replicas)])
    few = representative_replicas(schedule, most_ranks=0)
    assert few is not None
    sync_spec = replace(chain_sync_spec(schedule.placement, 0.5), updates=True, clips=True)
    return schedule, few, links_of(schedule.num_stages), sync_spec


@st.composite
def steps(draw: st.DrawFn) -> Step:
    replicas = draw(st.integers(5, 7))
    count = draw(st.integers(1, 3)) * replicas + draw(st.integers(0, replicas - 1))
    names = ["gpipe", "1f1b", "zb-h1", "zb-v", "looped-bfs"]
    name, num_ranks, apart = draw(st.sampled_from(names)), draw(st.integers(2, 3)), draw(st.booleans())
    schedule, few, links, sync_spec = step(name, num_ranks, replicas, count, apart)
    shard = draw(st.sampled_from([None, *ShardingLevel]))
    if draw(st.booleans()):
        links = links_of(schedule.num_stages, schedule.num_stages - 1)
    if shard:  # a tied weight stays whole, and nothing is lent here
        links = tuple(link for link in links if link.payload is not Payload.WEIGHT)
    return schedule, few, links, replace(sync_spec, shard=shard)


def is_result(instruction: Instruction) -> bool:
    return bool(instruction.link and instruction.link.payload is Payload.RESULT)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(steps())
def test_a_few_replicas_do_what_all_do(each: Step) -> None:
    schedule, few, links, sync_spec = each
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
    schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 12, 6)
    assert representative_replicas(schedule, most_ranks=11) is not None
    assert representative_replicas(schedule, most_ranks=12) is None
    orders = list(schedule.orders)
    orders[3] = (*orders[3][1:], orders[3][0])
    assert representative_replicas(replace(schedule, orders=tuple(orders)), most_ranks=0) is None
    other = Compute(Phase.FORWARD, 0, 1)
    orders[3] = tuple(other if each == orders[3][0] else each for each in orders[3])
    assert representative_replicas(replace(schedule, orders=tuple(orders)), most_ranks=0) is None
    assert representative_replicas(round_robin(12, (3, 2, 1)), most_ranks=0) is None
    assert representative_replicas(make_schedule("1f1b", 4, 4), most_ranks=0) is None
    assert (
        representative_replicas(
            replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 4, 2), most_ranks=0
        )
        is None
    )


@pytest.fixture(scope="module")
def pipe() -> pipec.Pipeline:
    example = mlp()
    pipe = pipec.compile(
        example.model,
        devices=10,
        stages=2,
        microbatches=7,
        loss_fn=example.loss_fn,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        shard="optimizer",
    )
    return pipe.prepare(torch.ones(70, 16), target=torch.zeros(70, 4))


@pytest.mark.slow
def test_every_rank_of_a_plan_holds_what_its_stand_in_holds(pipe: pipec.Pipeline) -> None:
    plan = pipe.plan
    orders = tuple(InstructionColumns.of(each.instructions, plan.links).computes for each in pipe.programs)
    few = representative_replicas(Schedule("1f1b", 7, plan.placement, orders), most_ranks=0)
    assert few is not None
    small = few.plan(plan)
    played = lower(few.schedule, plan.links, (), plan.sync_spec, plan.segments, plan.model_collectives)
    verify_programs(
        played,
        small.placement,
        plan.links,
        small.num_microbatches,
        sync_spec=plan.sync_spec,
        segments=plan.segments,
    )
    programs = few.in_step(played)
    assert [list(each.instructions) for each in programs] == [
        list(pipe.programs[each.rank].instructions) for each in programs
    ]
    for found, expected in zip(plan_memory(plan, programs), plan_memory(plan, pipe.programs), strict=True):
        assert found.rank == expected.rank
        assert found.bytes_by_category == expected.bytes_by_category
    assert simulate_plan(plan, programs).makespan == simulate_plan(plan, pipe.programs).makespan


def test_programs_of_all_ranks_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.programs.representative_replicas.MAX_RANKS_WITHOUT_REPRESENTATIVES", 4)
    example = mlp()
    pipe = pipec.compile(example.model, devices=10, stages=2, microbatches=5, loss_fn=example.loss_fn)
    pipe.prepare(torch.ones(70, 16), target=torch.zeros(70, 4))
    artifact = pipe._artifact
    assert [each.rank for each in artifact.representative_programs] == [0, 5]
    assert [each.rank for each in artifact.programs] == list(range(10))
    assert list(artifact.representative_programs[1].instructions) == list(artifact.programs[5].instructions)
    sent = pickle.loads(pickle.dumps(artifact))
    assert (list(sent.representative_programs), sent.programs) == (list(artifact.programs), artifact.programs)
    assert [each.rank for each in pipe.memory()] == list(range(10))
    assert pipe.simulate().representatives is not None
