"""Waits and accumulations of any lowered program: each stands where it is needed, and none is left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from bare_programs import lower_periodic, verify_periodic
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_steps import Step, steps

from pipec.errors import VerifyError
from pipec.ir import (
    Instruction,
    Link,
    NonFiniteAction,
    Op,
    OpKind,
    Payload,
    Program,
    Schedule,
    Stream,
    SyncSpec,
    Value,
)
from pipec.ir.periodic_program import unroll
from pipec.programs.lower import chain_links
from pipec.programs.lower_periodic import num_microbatches_to_lower
from pipec.schedules.asynchronous import ASYNCHRONOUS_SCHEDULES
from pipec.schedules.chain_simulation import chain_sync_spec

PREPARING = (Op.PAUSE, Op.CHECK, Op.STAGE_NORM, Op.STASH)
"""What may stand between a wait and the update or the forward that it is for."""


def awaited(each: Instruction) -> tuple[object, ...]:
    """What a wait and its start have in common."""
    return each.stage, each.microbatch, each.link, each.peer, each.bucket


def reads(reader: Instruction, wait: Instruction, sync_spec: SyncSpec) -> bool:
    """Whether an instruction reads what a wait is for."""
    same_stage, updates = reader.stage == wait.stage, reader.op in (Op.GRAD_NORM, Op.UPDATE)
    if wait.link and wait.link.payload is Payload.WEIGHT_GRADIENT:
        names = sync_spec.buckets[reader.bucket].names if reader.op is Op.REDUCE_GRAD else ()
        own = {value.name for value in wait.link.values}
        return reader.op is Op.GRAD_NORM or (same_stage and (updates or not own.isdisjoint(names)))
    if wait.link:
        of_microbatch = wait.microbatch in (-1, reader.microbatch)
        return same_stage and of_microbatch and reader.op.phase in wait.link.payload.readers
    if wait.op is Op.WAIT_REDUCE_GRAD:
        every_round = sync_spec.reduces_every_round(sync_spec.buckets[wait.bucket])
        again = reader.op is Op.REDUCE_GRAD and every_round
        return reader.op is Op.GRAD_NORM or again or (same_stage and updates)
    return wait.op in (Op.WAIT_SUM_COUNTS, Op.WAIT_UNSHARD) and same_stage and reader.op.phase is not None


def misplaced(own: Sequence[Instruction], sync_spec: SyncSpec) -> Iterator[tuple[int, Instruction]]:
    """Waits that are not behind their start, or not directly before what reads it first, or else the end."""
    for number, wait in enumerate(own):
        if wait.op.traits.kind is not OpKind.WAIT:
            continue
        starts = [
            k
            for k, each in enumerate(own[:number])
            if each.op is wait.op.traits.awaits and awaited(each) == awaited(wait)
        ]
        if not starts:
            yield number, wait
            continue
        is_result = wait.link is not None and wait.link.payload.is_result
        readers = (k for k in range(starts[-1], len(own)) if reads(own[k], wait, sync_spec))
        first = next((k for k in readers if k != starts[-1]), len(own))
        between = own[number + 1 : first]
        gets_on = [
            each
            for each in between
            if each.op.traits.kind is not OpKind.WAIT
            and each.op not in PREPARING
            and not (each.op is Op.ACCUMULATE and each.link)
        ]
        if first < number or (gets_on and not (is_result and sync_spec.stream)):
            yield number, wait


def check(
    data: st.DataObject, programs: Sequence[Program], verify: Callable[[Sequence[Program]], None]
) -> None:
    """No wait and no accumulation can be left out, and each backward has its accumulation."""
    verify(programs)
    sites = []
    for rank, program in enumerate(programs):
        own = program.instructions
        kinds = OpKind.WAIT, OpKind.ACCUMULATE
        sites += [(rank, k) for k, each in enumerate(own) if each.op.traits.kind in kinds]
        backwards = sum(each.op.phase is not None and each.op.phase.startswith("backward") for each in own)
        assert backwards == sum(each.op is Op.ACCUMULATE and each.link is None for each in own)
    for rank, number in data.draw(st.lists(st.sampled_from(sites), max_size=3)) if sites else ():
        own = programs[rank].instructions
        without = replace(programs[rank], instructions=(*own[:number], *own[number + 1 :]))
        with pytest.raises(VerifyError):
            verify([*programs[:rank], without, *programs[rank + 1 :]])


@settings(max_examples=40, deadline=None)
@given(steps(), st.data())
def test_waits_of_a_step_serve_their_first_reader_and_are_needed(step: Step, data: st.DataObject) -> None:
    programs = step.programs()
    check(data, programs, step.verify)
    assert not [found for each in programs for found in misplaced(each.instructions, step.sync_spec)]


@st.composite
def streams(draw: st.DrawFn) -> tuple[Schedule, tuple[Link, ...], SyncSpec]:
    """Mini-batches of any asynchronous schedule, whose losses all ranks get, or none."""
    name = draw(st.sampled_from(sorted(ASYNCHRONOUS_SCHEDULES)))
    most = 2 if name == "pipedream" else 1
    replicas = draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
    how = ASYNCHRONOUS_SCHEDULES[name]
    per_batch = how.min_microbatches(replicas)
    count = num_microbatches_to_lower(Stream(how.versions, per_batch), replicas) // per_batch
    schedule = how.for_batches(replicas, per_batch, count)
    loss = Link(len(replicas) - 1, -1, Payload.MICROBATCH_RESULT, (Value("loss", "float32", ()),))
    links = (*chain_links(len(replicas)), *((loss,) if draw(st.booleans()) else ()))
    sync_spec = replace(
        chain_sync_spec(schedule.placement, 0.5),
        updates=True,
        stream=schedule.stream,
        clips=draw(st.booleans()),
        on_nan=draw(st.sampled_from([None, *NonFiniteAction])),
    )
    return schedule, links, sync_spec


@settings(max_examples=12, deadline=None)
@given(streams(), st.data())
def test_waits_of_a_stream_serve_their_first_reader_and_are_needed(
    stream: tuple[Schedule, tuple[Link, ...], SyncSpec], data: st.DataObject
) -> None:
    schedule, links, sync_spec = stream

    def verify(programs: Sequence[Program]) -> None:
        verify_periodic(programs, schedule.placement, links, (), sync_spec)

    programs = lower_periodic(schedule, links, (), sync_spec)
    check(data, programs, verify)
    for each in programs:
        written = unroll(each, schedule.num_microbatches).instructions
        assert not [*misplaced(written, sync_spec)]
