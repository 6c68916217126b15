"""What a step does besides its microbatches: the sums in it, and what its sync spec has to fit."""

import functools

import pytest
from bare_programs import verify_programs
from example_schedules import value
from symbolic_steps import Step, make_step

from pipec.errors import VerifyError
from pipec.ir import (
    Bucket,
    Plan,
    ShardingLevel,
    Stage,
    SyncSpec,
)
from pipec.programs.lower import chain_links
from pipec.programs.verify import verify
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin


def data_parallel(microbatches: int = 4, replicas: int = 2, **options: object) -> Step:
    schedule = replicate_schedule(functools.partial(make_schedule, "gpipe", 1), microbatches, replicas)
    return make_step(schedule, **options)  # type: ignore[arg-type]


TIED_TO_TWO = make_step(round_robin(4, [2, 1]), tied=(0, 1), updates=True)


BUCKET = Bucket(0, (value("w", 2),))


@pytest.mark.parametrize(
    ("sync_spec", "message"),
    [
        (SyncSpec(clips=True), "the step clips gradients or shards state, but it updates nothing"),
        (
            SyncSpec(shard=ShardingLevel.GRADIENTS),
            "the step clips gradients or shards state, but it updates nothing",
        ),
        (
            SyncSpec(buffer_sync_stages=(1,)),
            r"averages buffers of stage 1; expected a stage with several",
        ),
        (
            SyncSpec((Bucket(1, BUCKET.parameters),)),
            r"has bucket 0 of stage 1; expected a stage with several",
        ),
        (
            SyncSpec((Bucket(2, BUCKET.parameters),)),
            r"has bucket 0 of stage 2; expected a stage with several",
        ),
        (SyncSpec((Bucket(0, ()),)), "bucket 0 of stage 0 has no parameters; expected at least one"),
        (SyncSpec((BUCKET, BUCKET)), "w of stage 0 is in buckets 0 and 1; expected one"),
        (
            SyncSpec((Bucket(0, (value("tied_0_1", 8),)),)),
            r"bucket 0 is not tied, but weight tied_0_1 \(0 -> 1\) shares tied_0_1",
        ),
    ],
)
def test_the_sync_spec_fits_the_stages(sync_spec: SyncSpec, message: str) -> None:
    step = TIED_TO_TWO
    programs = step.programs()
    with pytest.raises(VerifyError, match=message):
        verify_programs(programs, step.placement, step.plan.links, 4, sync_spec=sync_spec)


def plan(**options: object) -> Plan:
    stages = (
        Stage(0, 0, 1, parameters=("w", "borrowed"), borrowed_parameters=("borrowed",)),
        Stage(1, 2, 3, parameters=("v",)),
    )
    placement = round_robin(4, [2, 1]).placement
    return Plan(
        **{  # type: ignore[arg-type]
            "mode": "train",
            "schedule": "1f1b",
            "num_microbatches": 4,
            "microbatch_size": 1,
            "placement": placement,
            "stages": stages,
            "links": chain_links(2),
            **options,
        }
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sync_spec": SyncSpec((Bucket(0, (value("v", 2),)),))},
            "bucket 0 has v; expected parameters",
        ),
        (
            {"sync_spec": SyncSpec((Bucket(0, (value("borrowed", 2),)),))},
            "bucket 0 has borrowed; expected",
        ),
        (
            {"sync_spec": SyncSpec((Bucket(7, (value("w", 2),)),))},
            "bucket 0 has w; expected",
        ),
        (
            {"sync_spec": SyncSpec(buffer_sync_stages=(0,))},
            r"averages buffers of stages \[0\]; expected those that change some: \[\]",
        ),
        (
            {
                "sync_spec": SyncSpec(replicas_pass_own_rows=True),
                "stages": (Stage(0, 0, 1, batch_counts=("n",)),),
            },
            r"sums counts of stages \[\]; expected those that read some: \[0\]",
        ),
        (
            {"stages": (Stage(0, 0, 1, buffers=("m",), updated_buffers=("m",)), Stage(1, 2, 3))},
            r"averages buffers of stages \[\]; expected those that change some: \[0\]",
        ),
    ],
)
def test_the_sync_spec_fits_the_tensors_of_the_stages(options: dict[str, object], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(plan(**options), ())
