"""Whatever is wrong with an instruction is found: the verifier accepts what means the same, and no more."""

import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from bare_programs import plan_of
from broken_programs import Edit, edits, golden_steps, verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_params import slow
from symbolic_steps import Step, Wrong, check_meaning, check_on_gpus, make_step, schedules, steps

from pipec.errors import VerifyError
from pipec.ir import Link, Op, Payload, Schedule, StepPart, plan_part, program_part
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify_step
from pipec.schedules import forward_only, make_schedule

NUM_SAMPLES = 60
ONCE = ("drop", "double")


def assert_judged_right(step: Step, chosen: Sequence[Edit]) -> None:
    """What the verifier accepts means the same. What is left out or doubled never does."""
    programs = step.programs()
    for edit in chosen:
        broken = edit.applied_to(programs, step.plan.links)
        found = verdict(step, broken)
        instruction = programs[edit.rank].instructions[edit.number]
        if found:
            assert re.match(r"rank \d+, instruction \d+: |rank \d+ |programs ", found), found
            continue
        assert edit.kind not in ONCE, (edit, instruction)
        try:
            check_meaning(step, broken)
        except Wrong as wrong:
            raise AssertionError(f"{edit} of {instruction} is accepted: {wrong}") from None


def test_golden_steps_have_every_op() -> None:
    found = {x.op for step in golden_steps().values() for p in step.programs() for x in p.instructions}
    assert found == {*Op}


@pytest.mark.parametrize("name", golden_steps())
def test_broken_programs_are_judged_right(name: str) -> None:
    step = golden_steps()[name]
    programs = step.programs()
    step.verify(programs)
    check_meaning(step, programs)
    check_on_gpus(step, programs)
    every = [*edits(programs, step.plan.links)]
    assert_judged_right(step, random.Random(0).sample(every, NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_steps())
def test_every_broken_program_is_judged_right(name: str) -> None:
    step = golden_steps()[name]
    assert_judged_right(step, [*edits(step.programs(), step.plan.links)])


@settings(max_examples=40, deadline=None)
@given(steps())
def test_programs_of_any_step_mean_what_it_asks_for_and_need_few_buffers(step: Step) -> None:
    programs = step.programs()
    step.verify(programs)
    check_meaning(step, programs)
    if not step.plan.recomputing_stages:
        check_on_gpus(step, programs)
    for program in programs:
        live = defaultdict[Link, set[int]](set)
        peak, slots = Counter[Link](), defaultdict[Link, set[int]](set)
        for each in program.instructions:
            if each.op is Op.FREE:
                for link, microbatches in live.items():
                    if link.target == each.stage:
                        microbatches.discard(each.microbatch)
            elif each.link and each.slot >= 0:
                live[each.link].add(each.microbatch)
                slots[each.link].add(each.slot)
                peak[each.link] = max(peak[each.link], len(live[each.link]))
        assert {link: set(range(count)) for link, count in peak.items()} == slots


@settings(max_examples=20, deadline=None)
@given(steps())
def test_the_forwards_of_any_step_are_an_evaluation(step: Step) -> None:
    kinds = (Payload.ACTIVATION, Payload.WEIGHT, Payload.RESULT)
    links = [link for link in step.plan.links if link.payload in kinds]
    forwards = forward_only(step.schedule)
    evaluation = Step(forwards, plan_of(forwards, links))
    evaluation.verify(evaluation.programs())


@settings(max_examples=40, deadline=None)
@given(schedules(), st.booleans())
def test_every_schedule_has_a_tail_behind_its_forwards(schedule: Schedule, has_gradients: bool) -> None:
    """And before its backwards, where it makes gradients. Else the schedule keeps its order."""
    step = make_step(with_forwards_first(schedule) if has_gradients else schedule, tail=True)
    if not has_gradients:
        *others, last = step.plan.stages
        last = replace(last, tail=replace(last.tail, gradients=()))
        step = replace(step, plan=replace(step.plan, stages=(*others, last)))
    step.verify(step.programs())
    check_meaning(step, step.programs())


def test_a_schedule_that_does_not_wait_for_the_tail_cannot_be_lowered() -> None:
    with pytest.raises(VerifyError, match="wait for each other"):
        make_step(make_schedule("1f1b", 3, 6), tail=True).programs()


@pytest.mark.parametrize("name", golden_steps())
def test_what_is_left_out_changes_the_meaning(name: str) -> None:
    """So the execution on symbols can fail. Without a pause, a script asks for its losses later."""
    step = golden_steps()[name]
    programs = step.programs()
    left_out = [
        each
        for each in edits(programs, step.plan.links)
        if each.kind == "drop" and programs[each.rank].instructions[each.number].op is not Op.PAUSE
    ]
    for each in random.Random(0).sample(left_out, min(len(left_out), NUM_SAMPLES)):
        with pytest.raises(Wrong):
            check_meaning(step, each.applied_to(programs, step.plan.links))


PARTS = [StepPart.ACCUMULATE, StepPart.UPDATE]
HAVE_PARTS = [name for name, x in golden_steps().items() if x.sync_spec.updates and not x.sync_spec.stream]


@pytest.mark.parametrize("most", [NUM_SAMPLES, slow(sys.maxsize)], ids=["some", "all"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", HAVE_PARTS)
def test_nothing_of_a_part_can_be_left_out_or_doubled(name: str, part: StepPart, most: int) -> None:
    """Of a step that accumulates, and of an update alone. Neither is taken for the other, or the whole."""
    step = golden_steps()[name]
    plan, whole = plan_part(step.plan, part), step.programs()
    parts = {each: [program_part(x, step.sync_spec, each) for x in whole] for each in PARTS}
    own = parts.pop(part)
    verify_step(plan, own)
    changes = [each for each in edits(own, plan.links) if each.kind in ONCE]
    drawn = random.Random(0).sample(changes, min(len(changes), most))
    for programs in (*(each.applied_to(own, plan.links) for each in drawn), *parts.values(), whole):
        with pytest.raises(VerifyError):
            verify_step(plan, programs)
