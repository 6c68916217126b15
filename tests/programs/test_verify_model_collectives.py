"""Model collectives: lowered between segments, simulated, and each rule finds what breaks it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from bare_programs import lower, verify_programs

from pipec.errors import VerifyError
from pipec.ir import WAIT_OF, Instruction, ModelCollective, Op, Phase, Program, SegmentCounts, Value
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.lower import chain_links
from pipec.programs.rank_memory import peak_in_flight
from pipec.schedules import SCHEDULES, make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.simulate import SimulationCosts, simulate

Edit = Callable[[list[Instruction]], object]

LINKS = chain_links(2)
NUM_MICROBATCHES, COLLECTIVE_TIME = 4, 5.0


def collective(op: Op, phase: Phase, segment: int) -> ModelCollective:
    return ModelCollective(op, phase, segment, Value(f"{op}_{segment}", "float32", ("b", 8)))


@dataclass(frozen=True)
class Step:
    """Two stages on two ranks each. Stage 1 gathers features, sums a count, and scatters gradients."""

    name: str

    @property
    def schedule(self):  # type: ignore[no-untyped-def]
        make = functools.partial(make_schedule, self.name, 2)
        return replicate_schedule(make, NUM_MICROBATCHES, 2)

    @property
    def backward(self) -> Phase:
        return Phase.BACKWARD_INPUT if self.name.startswith("zb") else Phase.BACKWARD

    @property
    def model_collectives(self) -> dict[int, tuple[ModelCollective, ...]]:
        return {
            1: (
                collective(Op.ALL_GATHER, Phase.FORWARD, 1),
                collective(Op.ALL_REDUCE, Phase.FORWARD, 2),
                collective(Op.REDUCE_SCATTER, self.backward, 1),
            )
        }

    @property
    def segments(self) -> SegmentCounts:
        return {(1, Phase.FORWARD): 3, (1, self.backward): 2}

    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, LINKS, segments=self.segments, model_collectives=self.model_collectives)

    def verify(self, programs: tuple[Program, ...]) -> None:
        placement = self.schedule.placement
        verify_programs(
            programs,
            placement,
            LINKS,
            NUM_MICROBATCHES,
            segments=self.segments,
            model_collectives=self.model_collectives,
        )


GPIPE = Step("gpipe")


def fault(rank: int, edit: Edit) -> str:
    """What the verifier says after the program of a rank of stage 1 is changed."""
    programs = list(GPIPE.programs())
    instructions = list(programs[rank].instructions)
    edit(instructions)
    programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        GPIPE.verify(tuple(programs))
    return str(caught.value)


def find(instructions: list[Instruction], op: Op, turn: int = 0) -> int:
    return [number for number, each in enumerate(instructions) if each.op is op][turn]


def drop(op: Op) -> Edit:
    return lambda instructions: instructions.pop(find(instructions, op))


def repeat(op: Op) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op)
        instructions.insert(number, instructions[number])

    return edit


def with_wait(edit: Callable[[Op], Edit], op: Op) -> Edit:
    """The same edit of an instruction and of its wait."""

    def both(instructions: list[Instruction]) -> None:
        edit(op)(instructions)
        edit(WAIT_OF[op])(instructions)

    return both


def again(op: Op) -> Edit:
    """The same collective, with a wait of its own, before an instruction."""

    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op)
        instructions[number:number] = instructions[number : number + 2]

    return edit


def swap(first: tuple[Op, int], second: tuple[Op, int]) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        one, other = find(instructions, *first), find(instructions, *second)
        instructions[one], instructions[other] = instructions[other], instructions[one]

    return edit


def change(op: Op, **fields: object) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op)
        instructions[number] = replace(instructions[number], **fields)

    return edit


def exchange_microbatches(instructions: list[Instruction]) -> None:
    """Let the second microbatch of a rank come before the first, with all that belongs to it."""
    others = {1: 3, 3: 1}
    instructions[:] = [replace(x, microbatch=others.get(x.microbatch, x.microbatch)) for x in instructions]


def interleave_forwards(instructions: list[Instruction]) -> None:
    """Let the first segment of a rank's second forward come before the second segment of its first one."""
    first = find(instructions, Op.FORWARD, 1)
    instructions.insert(first, instructions.pop(find(instructions, Op.FORWARD, 3)))


FAULTS = {
    "left out": (
        with_wait(drop, Op.ALL_REDUCE),
        "forward of stage 1, microbatch 1, segment 2 has no all_reduce",
    ),
    "twice": (
        again(Op.ALL_GATHER),
        "all_gather of stage 1, microbatch 1, model collective 0 comes after wait_all_gather of stage 1",
    ),
    "before its value": (
        swap((Op.ALL_GATHER, 0), (Op.FORWARD, 0)),
        "all_gather of stage 1, microbatch 1, model collective 0 "
        "runs before forward of stage 1, microbatch 1",
    ),
    "behind its reader": (
        swap((Op.WAIT_ALL_REDUCE, 0), (Op.FORWARD, 2)),
        "forward of stage 1, microbatch 1, segment 2 runs before wait_all_reduce of stage 1, microbatch 1",
    ),
    "started twice": (
        repeat(Op.ALL_GATHER),
        "all_gather of stage 1, microbatch 1, model collective 0 is there again; the first is at 3",
    ),
    "never awaited": (
        drop(Op.WAIT_REDUCE_SCATTER),
        "backward of stage 1, microbatch 1, segment 1 has no wait_",
    ),
    "never started": (
        drop(Op.ALL_REDUCE),
        "wait_all_reduce of stage 1, microbatch 1, model collective 1 has no all_reduce",
    ),
    "awaited before its start": (
        swap((Op.ALL_REDUCE, 0), (Op.WAIT_ALL_REDUCE, 0)),
        "wait_all_reduce of stage 1, microbatch 1, model collective 1 runs before all_reduce of stage 1",
    ),
    "awaited twice": (
        repeat(Op.WAIT_ALL_GATHER),
        "wait_all_gather of stage 1, microbatch 1, model collective 0 is there again; the first is at 4",
    ),
    "another one": (
        change(Op.ALL_GATHER, model_collective=1),
        "all_gather names model collective 1; expected all_gather, model collective 0, all_reduce",
    ),
    "another stage": (change(Op.ALL_GATHER, stage=0), "all_gather names stage 0; expected a stage of this"),
    "another microbatch": (change(Op.ALL_GATHER, microbatch=2), "expected one that rank 3 runs"),
    "a segment": (change(Op.ALL_GATHER, segment=1), "all_gather names segment 1; expected none"),
    "of a compute": (
        change(Op.FORWARD, model_collective=0),
        "forward names model collective 0; expected none",
    ),
    "in the forward of another microbatch": (
        interleave_forwards,
        "the forward of stage 1, microbatch 1 goes on behind that of microbatch 3",
    ),
    "of the other round": (
        exchange_microbatches,
        "all_gather of stage 1, microbatch 0, model collective 0 meets "
        "all_gather of stage 1, microbatch 3, model collective 0 of rank 3",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_verifier_finds(name: str) -> None:
    edit, message = FAULTS[name]
    assert message in fault(3, edit)


def test_a_phase_that_is_run_as_a_whole_leaves_no_place_for_a_collective() -> None:
    def edit(instructions: list[Instruction]) -> None:
        parts = [number for number, each in enumerate(instructions) if each.op is Op.FORWARD][:3]
        instructions[parts[0]] = replace(instructions[parts[0]], segment=-1)
        del instructions[parts[2]], instructions[parts[1]]

    assert "of stage 1, microbatch 1, model collective 0 is missing on rank 3" in fault(3, edit)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_model_collective_can_be_left_out_or_doubled(name: str) -> None:
    step = Step(name)
    programs = step.programs()
    step.verify(programs)
    for rank, program in enumerate(programs):
        for number, instruction in enumerate(program.instructions):
            for copies in ((), (instruction, instruction)) if instruction.model_collective >= 0 else ():
                edited = (*program.instructions[:number], *copies, *program.instructions[number + 1 :])
                with pytest.raises(VerifyError):
                    step.verify((*programs[:rank], Program(rank, edited), *programs[rank + 1 :]))


def test_a_forward_in_segments_is_one_microbatch_in_flight() -> None:
    segmented = [*map(peak_in_flight, GPIPE.programs())]
    assert segmented == [*map(peak_in_flight, lower(GPIPE.schedule, LINKS))]


def test_programs_with_model_collectives_read_back_from_their_text() -> None:
    program = GPIPE.programs()[3]
    text = format_program(program)
    line = next(line for line in text.splitlines() if "model_collective 1" in line)
    assert line.split()[1:] == ["all_reduce", "stage", "1", "mb", "1", "model_collective", "1"]
    assert parse_program(text, LINKS) == program


def test_a_segment_begins_when_the_last_replica_has_reached_its_collective() -> None:
    """Stage 1 waits for three collectives of each of its two microbatches a rank; stage 0 has none."""
    costs = replace(
        SimulationCosts.uniform(2),
        segments={(1, phase): [1 / count] * count for (_, phase), count in GPIPE.segments.items()},
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
        SimulationCosts.uniform(schedule.num_stages, links=links, message=0.5),
        segments=dict.fromkeys(parts, (0.5, 0.5)),
        model_collectives={(stage, number): 0.25 for stage in stages for number in range(len(of_each))},
    )
    found = [event for event in simulate(programs, costs).columns if event.instruction.model_collective >= 0]
    assert len(found) == len(of_each) * schedule.num_stages * schedule.num_microbatches
