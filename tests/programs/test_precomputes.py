"""What stages compute once of their weights: where programs do so."""

from dataclasses import replace
from functools import partial
from typing import Any

from bare_programs import plan_of

from pipec.ir import NO_SYNC, Bucket, Op, Phase, Plan, Program, ShardingLevel, SyncSpec, Value
from pipec.programs.lower import chain_links, lower
from pipec.programs.verify import verify_step
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule


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
