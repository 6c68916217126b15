"""A tail runs between the forwards and the backwards of its stage."""

from dataclasses import replace

import pytest
from hypothesis import given
from symbolic_steps import schedules

from pipec.errors import VerifyError
from pipec.ir import Op, Plan, Schedule, Tail, Value
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify
from pipec.schedules import make_schedule

ROWS = Value("z_rows", "float32", ("b", 4))


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
