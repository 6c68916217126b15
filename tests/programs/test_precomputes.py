"""What stages compute once of their weights: where programs do so, and what the verifier refuses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from bare_programs import plan_of

from pipec.errors import VerifyError
from pipec.ir import NO_SYNC, Bucket, Instruction, Op, Phase, Plan, Program, ShardingLevel, SyncSpec, Value
from pipec.programs.lower import chain_links, lower
from pipec.programs.verify import verify_step
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule

Edit = Callable[[list[Instruction]], Any]


def step(schedule: Any, links: Any, sync_spec: SyncSpec = NO_SYNC) -> tuple[Plan, list[Program]]:
    plan = plan_of(schedule, links, sync_spec=sync_spec)
    stages = tuple(replace(each, precomputed_phases=(Phase.FORWARD, Phase.BACKWARD)) for each in plan.stages)
    plan = replace(plan, stages=stages)
    return plan, [*lower(schedule, plan)]


def places(program: Program, op: Op, stage: int = 0) -> list[int]:
    own = enumerate(program.instructions)
    return [number for number, each in own if each.op is op and each.stage == stage]


def test_once_a_step_before_the_first_reader() -> None:
    plan, programs = step(make_schedule("1f1b", 2, 4), chain_links(2))
    for program in programs:
        (made,) = places(program, Op.PRECOMPUTE, program.rank)
        assert program.instructions[made + 1].op is Op.FORWARD
    verify_step(plan, programs)


TWO_PIPELINES = replicate_schedule(partial(make_schedule, "looped-bfs", 2), 8, 2)
GATHERED = SyncSpec(
    (Bucket(0, (Value("w", "float32", (2,)),)),), updates=True, shard=ShardingLevel.PARAMETERS
)


def test_again_where_weights_are_gathered_again() -> None:
    plan, programs = step(TWO_PIPELINES, chain_links(4), GATHERED)
    for program in programs[:2]:
        gathered, made, freed = (places(program, op) for op in (Op.WAIT_UNSHARD, Op.PRECOMPUTE, Op.RESHARD))
        assert len(gathered) == len(made) == len(freed) == 2
        assert all(a < b < c for a, b, c in zip(gathered, made, freed, strict=True))
    verify_step(plan, programs)


def pop(instructions: list[Instruction]) -> Instruction:
    return instructions.pop(next(k for k, each in enumerate(instructions) if each.op is Op.PRECOMPUTE))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (pop, "forward of stage 0, microbatch 0 has no precompute before it"),
        (
            lambda own: own.append(pop(own)),
            "forward of stage 0, microbatch 0 runs before precompute of stage 0 at 28",
        ),
        (
            lambda own: own.append(own[places(Program(0, own), Op.PRECOMPUTE)[0]]),
            "precompute of stage 0 comes after backward of stage 0, microbatch 3 at 26",
        ),
        (lambda own: own.insert(0, replace(pop(own), microbatch=0)), "names microbatch 0; expected"),
        (
            lambda own: own.insert(0, replace(pop(own), stage=1)),
            "names stage 1; expected a stage of this",
        ),
        (lambda own: own.insert(0, replace(pop(own), bucket=0)), "precompute names bucket 0; expected none"),
    ],
)
def test_a_precompute_in_the_wrong_place_is_refused(edit: Edit, message: str) -> None:
    plan, programs = step(make_schedule("1f1b", 2, 4), chain_links(2))
    own = [*programs[0].instructions]
    edit(own)
    with pytest.raises(VerifyError, match=message):
        verify_step(plan, [Program(0, tuple(own)), programs[1]])


def test_a_precompute_that_nobody_reads_is_refused() -> None:
    """Its weights are freed before any compute of the stage."""
    plan, programs = step(TWO_PIPELINES, chain_links(4), GATHERED)
    changed = []
    for program in programs:
        own = [*program.instructions]
        if program.rank in plan.placement[0]:
            gathering = [own[places(program, op)[0]] for op in (Op.UNSHARD, Op.WAIT_UNSHARD)]
            again = [*gathering, own[places(program, Op.PRECOMPUTE)[0]], own[places(program, Op.RESHARD)[0]]]
            own[:0] = again
        changed.append(Program(program.rank, tuple(own)))
    with pytest.raises(VerifyError, match="precompute of stage 0 is not read"):
        verify_step(plan, changed)


def test_a_precompute_of_weights_that_have_not_come_is_refused() -> None:
    plan, programs = step(TWO_PIPELINES, chain_links(4), GATHERED)
    own = [*programs[0].instructions]
    number = places(programs[0], Op.PRECOMPUTE)[0]
    own.insert(places(programs[0], Op.WAIT_UNSHARD)[0], own.pop(number))
    with pytest.raises(VerifyError, match="precompute of stage 0 runs before wait_unshard of stage 0"):
        verify_step(plan, [Program(0, tuple(own)), *programs[1:]])


def test_what_was_freed_with_the_weights_is_not_read() -> None:
    plan, programs = step(TWO_PIPELINES, chain_links(4), GATHERED)
    changed = []
    for program in programs:
        own = [*program.instructions]
        if program.rank in plan.placement[0]:
            own.pop(places(program, Op.PRECOMPUTE)[-1])
        changed.append(Program(program.rank, tuple(own)))
    with pytest.raises(VerifyError, match="backward of stage 0, microbatch 0 has no precompute before it"):
        verify_step(plan, changed)
