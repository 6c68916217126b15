"""Lowering: programs as text, of many instructions, and with model collectives between segments."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from bare_programs import lower, uniform_costs, verified, verify_programs
from broken_programs import golden_steps
from example_schedules import value

from pipec.ir import Instruction, ModelCollective, Op, Phase
from pipec.ir.columns import InstructionColumns
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.compute_segments import split_into_segments
from pipec.programs.lower import chain_links
from pipec.schedules import SCHEDULES, make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.simulate import simulate


@pytest.mark.parametrize("name", golden_steps())
def test_programs_of_every_kind_of_step(name: str, golden: Callable[[str, str], None]) -> None:
    """As text, which reads back to the same program."""
    step = golden_steps()[name]
    texts = [*map(format_program, step.programs())]
    golden("\n".join(texts), f"programs/{name.replace(' ', '_')}.txt")
    assert [parse_program(text, step.plan.links) for text in texts] == list(step.programs())


def test_a_step_of_many_instructions_is_lowered_and_verified() -> None:
    programs = verified(make_schedule("1f1b", 100, 300))
    assert sum(len(program.instructions) for program in programs) == 10 * 100 * 300 - 6 * 300


# model collectives run between segments


def test_a_segment_begins_when_the_last_replica_has_reached_its_collective() -> None:
    """Stage 1 waits for three collectives of each of its two microbatches a rank; stage 0 has none."""
    step = golden_steps()["model collectives"]
    segments = {key: [1 / count] * count for key, count in step.plan.segments.items()}
    costs = replace(uniform_costs(2), segments=segments)
    without = simulate(step.programs(), costs).makespan
    times = {(1, number): 5.0 for number in range(3)}
    timeline = simulate(step.programs(), replace(costs, model_collectives=times))
    assert timeline.makespan == pytest.approx(without + 2 * 3 * 5.0)
    for event in timeline.computes:
        if event.instruction.segment > 0:
            ends = [each.end for each in timeline.overlapped if each.rank == event.rank]
            assert any(end == pytest.approx(event.start) for end in ends)


def test_a_compute_is_divided_into_its_segments() -> None:
    """One that is a segment already stays."""
    given = [Instruction(Op.FORWARD, 0, 0), *(Instruction(Op.BACKWARD, 0, k, segment=k - 1) for k in (0, 1))]
    divided, numbers = split_into_segments(InstructionColumns.of(given, ()), {(0, Phase.BACKWARD): 2})
    assert [each.segment for each in divided] == [-1, 0, 1, 0]
    assert [*numbers] == [0, 1, 1, 2]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_one_order_of_collectives_where_every_stage_has_some(
    name: str, replicas: int
) -> None:
    """Also where a rank has several stages, with the same ranks as replicas."""
    schedule = replicate_schedule(functools.partial(SCHEDULES[name], 2), 4 * replicas, replicas)
    phases = {Phase(op) for order in schedule.orders for op in {cell.phase for cell in order}}
    backward = Phase.BACKWARD if Phase.BACKWARD in phases else Phase.BACKWARD_INPUT
    kinds = (Op.ALL_GATHER, Phase.FORWARD), (Op.ALL_REDUCE, Phase.FORWARD), (Op.REDUCE_SCATTER, backward)
    of_each = tuple(ModelCollective(op, phase, 1, value(f"{op}_1", "b", 8)) for op, phase in kinds)
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
