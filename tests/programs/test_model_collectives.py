"""Model collectives: lowered between segments, and simulated."""

import functools
from dataclasses import replace

import pytest
from bare_programs import lower, uniform_costs, verify_programs
from symbolic_steps import make_step

from pipec.ir import ModelCollective, Op, Phase, Value
from pipec.programs.lower import chain_links
from pipec.schedules import SCHEDULES, make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.simulate import simulate

COLLECTIVE_TIME = 5.0


GPIPE = make_step(replicate_schedule(functools.partial(make_schedule, "gpipe", 2), 4, 2), collectives=True)


def collective(op: Op, phase: Phase, segment: int) -> ModelCollective:
    return ModelCollective(op, phase, segment, Value(f"{op}_{segment}", "float32", ("b", 8)))


def test_a_segment_begins_when_the_last_replica_has_reached_its_collective() -> None:
    """Stage 1 waits for three collectives of each of its two microbatches a rank; stage 0 has none."""
    costs = replace(
        uniform_costs(2),
        segments={key: [1 / count] * count for key, count in GPIPE.plan.segments.items()},
    )
    without = simulate(GPIPE.programs(), costs).makespan
    times = {(1, number): COLLECTIVE_TIME for number in range(3)}
    timeline = simulate(GPIPE.programs(), replace(costs, model_collectives=times))
    assert timeline.makespan == pytest.approx(without + 2 * 3 * COLLECTIVE_TIME)
    for event in timeline.computes:
        if event.instruction.segment > 0:
            ends = [each.end for each in timeline.overlapped if each.rank == event.rank]
            assert any(end == pytest.approx(event.start) for end in ends)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_one_order_of_collectives_where_every_stage_has_some(
    name: str, replicas: int
) -> None:
    """Also where a rank has several stages, whose replicas are the same ranks."""
    schedule = replicate_schedule(functools.partial(SCHEDULES[name], 2), 4 * replicas, replicas)
    phases = {Phase(op) for order in schedule.orders for op in {cell.phase for cell in order}}
    backward = Phase.BACKWARD if Phase.BACKWARD in phases else Phase.BACKWARD_INPUT
    of_each = (
        *(collective(Op.ALL_GATHER, Phase.FORWARD, 1), collective(Op.ALL_REDUCE, Phase.FORWARD, 1)),
        collective(Op.REDUCE_SCATTER, backward, 1),
    )
    stages, links = range(schedule.num_stages), chain_links(schedule.num_stages)
    parts = {(stage, phase): 2 for stage in stages for phase in (Phase.FORWARD, backward)}
    step = {"segments": parts, "model_collectives": dict.fromkeys(stages, of_each), "recompute": stages}
    programs = lower(schedule, links, **step)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, **step)
    costs = replace(
        uniform_costs(schedule.num_stages, links=links, message=0.5),
        segments=dict.fromkeys(parts, (0.5, 0.5)),
        model_collectives={(stage, number): 0.25 for stage in stages for number in range(len(of_each))},
    )
    found = [event for event in simulate(programs, costs).columns if event.instruction.model_collective >= 0]
    assert len(found) == len(of_each) * schedule.num_stages * schedule.num_microbatches
