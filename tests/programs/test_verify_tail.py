"""A tail runs between the forwards and the backwards of its stage; rules find programs broken for it."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from symbolic_steps import schedules

from pipec.errors import VerifyError
from pipec.ir import Instruction, Link, Op, Payload, Plan, Program, Schedule, Tail, Value
from pipec.ir.text_format import PHASE_LETTERS, format_program, parse_program
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.tail_order import (
    has_two_forwards,
    ordered_for_tail,
    with_forwards_first,
    with_two_forwards,
    without_first_forwards,
)
from pipec.programs.verify import verify, verify_step
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule

_FIRST = (Payload.FORWARD_ONLY,)
ROWS = Value("z_rows", "float32", ("b", 4))

Edit = Callable[[list[Instruction]], object]


def plan_with_tail(schedule: Schedule, has_gradients: bool = True, two_forwards: bool = False) -> Plan:
    plan = bare_plan(schedule, chain_links(schedule.num_stages, two_forwards=two_forwards))
    stages = [replace(stage, forward_only=two_forwards) for stage in plan.stages]
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


@given(schedules())
def test_every_schedule_follows_forwards_that_save_nothing(schedule: Schedule) -> None:
    """The tail runs between these and the backwards, with as many microbatches in flight as without it."""
    plan = plan_with_tail(schedule, two_forwards=True)
    ordered = ordered_for_tail(schedule, plan)
    programs = lower(ordered, plan)
    most = [
        peak_in_flight(each) for each in lower(schedule, bare_plan(schedule, chain_links(len(plan.stages))))
    ]
    verify_step(plan, programs)
    assert all(found <= limit for found, limit in zip(map(peak_in_flight, programs), most, strict=True))
    assert has_two_forwards(ordered)
    assert without_first_forwards(ordered) == schedule
    for rank in plan.placement[-1]:
        ops = [each.op for each in programs[rank].instructions if each.stage == len(plan.stages) - 1]
        tail = ops.index(Op.TAIL)
        assert Op.FORWARD_ONLY not in ops[tail:]
        assert not {Op.BACKWARD, Op.BACKWARD_INPUT} & {*ops[:tail]}
    slots = [x.slot for p in programs for x in p.instructions if x.link and x.link.payload in _FIRST]
    if len({*map(len, plan.placement)}) == 1:
        assert max(slots, default=0) < 2


TWO_FORWARDS = """\
rank 1: 21 instructions
 0  recv          stage 1  mb 0  forward_only hidden_1 (0 -> 1)  from rank 0  slot 0
 1  recv          stage 1  mb 1  forward_only hidden_1 (0 -> 1)  from rank 0  slot 1
 2  wait_recv     stage 1  mb 0  forward_only hidden_1 (0 -> 1)  from rank 0
 3  forward_only  stage 1  mb 0
 4  recv          stage 1  mb 0  hidden_1 (0 -> 1)               from rank 0  slot 0
 5  wait_recv     stage 1  mb 1  forward_only hidden_1 (0 -> 1)  from rank 0
 6  forward_only  stage 1  mb 1
 7  recv          stage 1  mb 1  hidden_1 (0 -> 1)               from rank 0  slot 1
 8  tail          stage 1
 9  wait_recv     stage 1  mb 0  hidden_1 (0 -> 1)               from rank 0
10  forward       stage 1  mb 0
11  backward      stage 1  mb 0
12  send          stage 1  mb 0  grad_hidden_1 (1 -> 0)          to rank 0
13  accumulate    stage 1  mb 0
14  free          stage 1  mb 0
15  wait_recv     stage 1  mb 1  hidden_1 (0 -> 1)               from rank 0
16  forward       stage 1  mb 1
17  backward      stage 1  mb 1
18  send          stage 1  mb 1  grad_hidden_1 (1 -> 0)          to rank 0
19  accumulate    stage 1  mb 1
20  free          stage 1  mb 1
"""


def test_the_program_of_two_forwards() -> None:
    """The same values travel twice, as two links. The buffers of the first ones are used again at once."""
    schedule = make_schedule("1f1b", 2, 2)
    plan = plan_with_tail(schedule, two_forwards=True)
    program = lower(ordered_for_tail(schedule, plan), plan)[1]
    assert format_program(program) == TWO_FORWARDS
    assert parse_program(TWO_FORWARDS, plan.links) == program


def test_a_rank_that_would_idle_before_the_tail_begins_with_the_schedule() -> None:
    """Rank 0 has the first stage and the last: while it waits for rank 1, it runs its second forwards."""
    ordered = with_two_forwards(make_schedule("zb-v", 2, 2), range(4))
    shown = [" ".join(f"{PHASE_LETTERS[x.phase]}{x.stage}.{x.microbatch}" for x in y) for y in ordered.orders]
    assert shown[0].startswith("f0.0 f0.1 F0.0 f3.0 F0.1 f3.1 F3.0 B3.0")
    assert shown[1].startswith("f1.0 f2.0 f1.1 f2.1 F1.0 F2.0")


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


def exchange(op: Op, other: Op, turn: int = 0) -> Edit:
    """Exchanges two instructions."""

    def edit(instructions: list[Instruction]) -> None:
        one, two = find(instructions, op, turn), find(instructions, other, turn)
        instructions[one], instructions[two] = instructions[two], instructions[one]

    return edit


def in_slot(turn: int) -> Edit:
    """Lets a receive of a first forward use the buffer of the one before."""

    def edit(instructions: list[Instruction]) -> None:
        receives = [
            number
            for number, each in enumerate(instructions)
            if each.op is Op.RECV and each.link and each.link.payload is Payload.FORWARD_ONLY
        ]
        before, after = instructions[receives[turn - 1]], instructions[receives[turn]]
        instructions[receives[turn]] = replace(after, slot=before.slot)

    return edit


def of_payload(payload: Payload) -> Edit:
    """Lets the first receive bring what another forward sends."""

    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, Op.RECV)
        link = instructions[number].link
        assert link
        instructions[number] = replace(instructions[number], link=replace(link, payload=payload))

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
        (drop(Op.WAIT_GATHER_ROWS), "gather_rows of stage 1 is never awaited"),
        (move(Op.TAIL, Op.FORWARD, -1, 0), "tail of stage 1 runs before"),
        (move(Op.TAIL, Op.GATHER_ROWS, 0, 0), "tail of stage 1 runs before wait_gather_rows of stage 1"),
        (move(Op.GATHER_ROWS, Op.FORWARD, -1, 0), "gather_rows of stage 1 runs before the last forward"),
        (move(Op.TAIL, Op.BACKWARD, 0, 1), "backward of stage 1 runs before tail of stage 1"),
        (of_stage_0, "tail of stage 0 is not in the plan for rank 2"),
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
    with pytest.raises(VerifyError, match=r"loss .* leaves before it is made"):
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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.FORWARD_ONLY), "forward_only of stage 1, microbatch 0 runs 0 times; expected 1"),
        (repeat(Op.FORWARD_ONLY), "forward_only of stage 1, microbatch 0 runs 2 times; expected 1"),
        (drop(Op.FORWARD), "forward of stage 1, microbatch 0 runs 0 times; expected once"),
        (exchange(Op.FORWARD_ONLY, Op.FORWARD), "runs before"),
        (move(Op.TAIL, Op.FORWARD_ONLY, -1, 0), "tail of stage 1 runs before the last forward_only of stage"),
        (move(Op.GATHER_ROWS, Op.FORWARD_ONLY, -1, 0), "gather_rows of stage 1 runs before the last forward"),
        (move(Op.TAIL, Op.BACKWARD, 0, 1), "backward of stage 1 runs before tail of stage 1"),
        (in_slot(1), "slot 0 of forward_only hidden_1 (0 -> 1) still holds microbatch"),
        (of_payload(Payload.ACTIVATION), "recv of forward_only hidden_1 (0 -> 1), microbatch 0 to rank"),
    ],
)  # fmt: skip
def test_programs_with_two_forwards_broken_for_a_rule_are_refused(edit: Edit, message: str) -> None:
    schedule = replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 8, 2)
    plan = plan_with_tail(schedule, two_forwards=True)
    programs = list(lower(ordered_for_tail(schedule, plan), plan))
    verify(plan, programs)
    rank = plan.placement[1][0]
    instructions = list(programs[rank].instructions)
    edit(instructions)
    programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        verify(plan, programs)
    assert message in str(caught.value)


def test_forwards_that_save_nothing_belong_to_the_plan() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    plan = plan_with_tail(schedule, two_forwards=True)
    with pytest.raises(VerifyError, match="never runs forward_only of stage 0, microbatch 0"):
        lower(schedule, plan)
    without = plan_with_tail(schedule)
    with pytest.raises(VerifyError, match="forward_only of stage 0, microbatch 0 runs 1 times; expected 0"):
        verify(without, lower(with_forwards_first(with_two_forwards(schedule, [0, 1])), without))
