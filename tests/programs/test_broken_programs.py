"""Whatever is wrong with an instruction is found: the verifier accepts what means the same, and no more."""

import random
import re
from collections.abc import Sequence

import pytest
from broken_programs import Edit, edits, golden_steps
from hypothesis import given, settings
from symbolic_steps import Step, Wrong, check_meaning, check_on_gpus, steps

from pipec.errors import VerifyError
from pipec.ir import Op, Program

NUM_SAMPLES = 60


def verdict(step: Step, programs: Sequence[Program]) -> str:
    """What the verifier says; empty if it accepts the programs."""
    try:
        step.verify(programs)
    except VerifyError as error:
        return str(error)
    return ""


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
        assert edit.kind not in ("drop", "double"), (edit, instruction)
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
def test_programs_of_any_step_mean_what_it_asks_for(step: Step) -> None:
    programs = step.programs()
    step.verify(programs)
    check_meaning(step, programs)
    check_on_gpus(step, programs)
