"""A tail runs between the forwards and the backwards of its stage; rules find programs broken for it."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from symbolic_steps import schedules

from pipec.errors import VerifyError
from pipec.ir import Instruction, Link, Op, Payload, Plan, Program, Schedule, Tail, Value
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule

ROWS = Value("z_rows", "float32", ("b", 4))

Edit = Callable[[list[Instruction]], object]


def plan_with_tail(schedule: Schedule, has_gradients: bool = True) -> Plan:
    plan = bare_plan(schedule, chain_links(schedule.num_stages))
    stages = [*plan.stages]
    stages[-1] = replace(stages[-1], tail=Tail((ROWS,), (ROWS,) if has_gradients else ()))
    return replace(plan, stages=tuple(stages))


@given(schedules())
def test_every_schedule_has_a_tail_between_its_forwards_and_its_backwards(schedule: Schedule) -> None:
    plan = plan_with_tail(schedule)
    programs = lower(with_forwards_first(schedule), plan)
    verify(plan, programs)
    for rank in plan.placement[-1]:
        ops = [each.op for each in programs[rank].instructions if each.stage == len(plan.stages) - 1]
        tail = ops.index(Op.TAIL)
        assert Op.FORWARD not in ops[tail:]
        assert not {Op.BACKWARD, Op.BACKWARD_INPUT} & {*ops[:tail]}


@pytest.mark.slow
@given(schedules())
def test_a_tail_without_gradients_keeps_the_order_of_the_schedule(schedule: Schedule) -> None:
    plan = plan_with_tail(schedule, has_gradients=False)
    verify(plan, lower(schedule, plan))


def test_a_schedule_that_does_not_wait_for_the_tail_cannot_be_lowered() -> None:
    schedule = make_schedule("1f1b", 3, 6)
    with pytest.raises(VerifyError, match="wait for each other"):
        lower(schedule, plan_with_tail(schedule))


def find(instructions: list[Instruction], op: Op, turn: int = 0) -> int:
    return [number for number, each in enumerate(instructions) if each.op is op][turn]


def drop(op: Op) -> Edit:
    return lambda instructions: instructions.pop(find(instructions, op))


def repeat(op: Op) -> Edit:
    return lambda instructions: instructions.insert(
        find(instructions, op), instructions[find(instructions, op)]
    )


def move(op: Op, other: Op, turn: int, offset: int) -> Edit:
    """Moves an instruction before another (offset 0), or behind it (offset 1)."""

    def edit(instructions: list[Instruction]) -> None:
        moved = instructions.pop(find(instructions, op))
        instructions.insert(find(instructions, other, turn) + offset, moved)

    return edit


def of_stage_0(instructions: list[Instruction]) -> None:
    number = find(instructions, Op.TAIL)
    instructions[number] = replace(instructions[number], stage=0)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.TAIL), "tail of stage 1 is there 0 times on rank 2; expected once"),
        (repeat(Op.TAIL), "tail of stage 1 is there 2 times on rank 2; expected once"),
        (drop(Op.WAIT_GATHER_ROWS), "tail of stage 1 has no wait_gather_rows before it"),
        (move(Op.TAIL, Op.FORWARD, -1, 0), "forward of stage 1, microbatch 2 "
        "comes after tail of stage 1 at 5"),
        (move(Op.TAIL, Op.GATHER_ROWS, 0, 0), "tail of stage 1 runs before gather_rows of stage 1 at 7"),
        (move(Op.GATHER_ROWS, Op.FORWARD, -1, 0), "forward of stage 1, microbatch 2 "
        "comes after gather_rows of stage 1 at 5"),
        (move(Op.TAIL, Op.BACKWARD, 0, 1), "backward of stage 1, microbatch 0 "
        "runs before tail of stage 1 at 9"),
        (of_stage_0, "tail names stage 0; expected a stage of this rank: [1]"),
    ],
)  # fmt: skip
def test_programs_broken_for_a_rule_are_refused(edit: Edit, message: str, everywhere: bool) -> None:
    """On one replica, and on both alike: then nobody waits for anybody."""
    make = functools.partial(make_schedule, "1f1b", 2)
    schedule = replicate_schedule(make, 4, 2)
    plan = plan_with_tail(schedule)
    programs = list(lower(with_forwards_first(schedule), plan))
    verify(plan, programs)
    for rank in plan.placement[1] if everywhere else plan.placement[1][:1]:
        instructions = list(programs[rank].instructions)
        edit(instructions)
        programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        verify(plan, programs)
    assert message.replace("rank 2", f"rank {plan.placement[1][0]}") in str(caught.value)


def test_a_result_that_is_sent_before_the_tail_makes_it_is_refused() -> None:
    schedule, loss = make_schedule("1f1b", 2, 4), Value("loss", "float32", ())
    plan = plan_with_tail(schedule)
    last = replace(plan.stages[-1], tail=Tail((ROWS,), (ROWS,), results=(loss.name,)))
    links = (*plan.links, Link(1, -1, Payload.RESULT, (loss,)))
    plan = replace(plan, stages=(*plan.stages[:-1], last), links=links)
    programs = lower(with_forwards_first(schedule), plan)
    verify(plan, programs)
    instructions = list(programs[1].instructions)
    (result,) = [each for each in instructions if each.link == links[-1] and each.op is Op.SEND]
    instructions.remove(result)
    (tail,) = [number for number, each in enumerate(instructions) if each.op is Op.TAIL]
    instructions.insert(tail, result)
    with pytest.raises(VerifyError, match=r"send of result loss .* runs before tail of stage 1 at 13"):
        verify(plan, [programs[0], Program(1, tuple(instructions))])


def test_a_gathering_that_one_replica_lacks_is_refused() -> None:
    schedule = replicate_schedule(functools.partial(make_schedule, "gpipe", 1), 4, 2)
    plan = plan_with_tail(schedule)
    programs = list(lower(with_forwards_first(schedule), plan))
    instructions = [
        each for each in programs[0].instructions if each.op not in (Op.GATHER_ROWS, Op.WAIT_GATHER_ROWS)
    ]
    with pytest.raises(VerifyError, match="gather_rows of stage 0"):
        verify(plan, [Program(0, instructions), programs[1]])
