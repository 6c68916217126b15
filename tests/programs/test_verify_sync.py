"""The rules for what a step does besides its microbatches: each finds the program broken for it."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from bare_programs import plan_of, verify_programs
from example_schedules import value
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from symbolic_steps import Step, Wrong, check_meaning, make_step, steps

from pipec.errors import VerifyError
from pipec.ir import (
    WAIT_OF,
    Bucket,
    Instruction,
    NonFiniteAction,
    Op,
    Payload,
    Plan,
    Program,
    ShardingLevel,
    Stage,
    StepPart,
    SyncSpec,
    one_rank_per_stage,
    plan_part,
    program_part,
)
from pipec.ir.text_format import instruction_lines
from pipec.programs.lower import chain_links
from pipec.programs.verify import verify, verify_step
from pipec.schedules import gpipe, make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin

Edit = Callable[[list[Instruction]], object]


def data_parallel(microbatches: int = 4, replicas: int = 2, **options: object) -> Step:
    schedule = replicate_schedule(functools.partial(make_schedule, "gpipe", 1), microbatches, replicas)
    return make_step(schedule, **options)  # type: ignore[arg-type]


WHOLE = data_parallel(buffer_sync_stages=(0,), updates=True, clips=True)
TIED_TO_ONE = make_step(round_robin(3, [1, 2]), tied=(0, 1), updates=True, clips=True)
TIED_TO_TWO = make_step(round_robin(4, [2, 1]), tied=(0, 1), updates=True)
IN_PARTS = data_parallel(updates=True, num_segments=3)
SKIPPING = data_parallel(updates=True, on_nan=NonFiniteAction.SKIP)
COUNTED = data_parallel(count_stages=(0,), updates=True)
SHARDED = data_parallel(updates=True, shard=ShardingLevel.OPTIMIZER)
IN_ROUNDS = data_parallel(updates=True, shard=ShardingLevel.GRADIENTS)
GATHERED = data_parallel(updates=True, shard=ShardingLevel.PARAMETERS)


def fault(step: Step, edits: dict[int, Edit]) -> str:
    """What the verifier says after the programs of some ranks are changed."""
    programs = list(step.programs())
    step.verify(programs)
    for rank, edit in edits.items():
        instructions = list(programs[rank].instructions)
        edit(instructions)
        programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        step.verify(programs)
    return str(caught.value)


def find(instructions: Sequence[Instruction], op: Op, bucket: int = -1, turn: int = 0) -> int:
    """An instruction of that op, and of that bucket if it is given."""
    found = [k for k, each in enumerate(instructions) if each.op is op and bucket in (-1, each.bucket)]
    return found[turn]


def drop(op: Op, bucket: int = -1, turn: int = 0) -> Edit:
    return lambda instructions: instructions.pop(find(instructions, op, bucket, turn))


def repeat(op: Op, bucket: int = -1, turn: int = 0) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, bucket, turn)
        instructions.insert(number, instructions[number])

    return edit


Named = tuple[Op] | tuple[Op, int] | tuple[Op, int, int]
"""The arguments of ``find``."""


def move(
    op: Op,
    bucket: int = -1,
    turn: int = 0,
    *,
    before: Named | None = None,
    behind: Named | None = None,
) -> Edit:
    """Moves an instruction directly before or behind another, or to the beginning."""

    def edit(instructions: list[Instruction]) -> None:
        moved = instructions.pop(find(instructions, op, bucket, turn))
        other = before or behind
        instructions.insert(find(instructions, *other) + (before is None) if other else 0, moved)

    return edit


def drop_both(op: Op, bucket: int = -1, turn: int = 0) -> Edit:
    """Leaves out an instruction and its wait."""
    return chain(drop(op, bucket, turn), drop(WAIT_OF[op], bucket, turn))


def repeat_both(op: Op, bucket: int = -1, turn: int = 0) -> Edit:
    """Does the same before an instruction, and waits for it."""

    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, bucket, turn)
        again = instructions[number]
        instructions[number:number] = [again, replace(again, op=WAIT_OF[op])]

    return edit


def chain(*edits: Edit) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        for each in edits:
            each(instructions)

    return edit


def change(op: Op, bucket: int = -1, turn: int = 0, /, **fields: object) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, bucket, turn)
        instructions[number] = replace(instructions[number], **fields)  # type: ignore[arg-type]

    return edit


def test_the_message_shows_lines_and_cells_of_the_ranks_that_do_not_meet() -> None:
    step = data_parallel(2, updates=True, buffer_sync_stages=(0,))
    late = {0: move(Op.AVERAGE_BUFFERS, behind=(Op.REDUCE_GRAD,))}
    assert (
        fault(step, late)
        == """\
rank 0, instruction 4: deadlock in the order of collectives:
  rank 0 at '4 reduce_grad stage 0 bucket 0' waits for rank 1 to reach '5 reduce_grad stage 0 bucket 0'
  rank 1 at '1 average_buffers stage 0' waits for rank 0 to reach '5 average_buffers stage 0'
  1  backward              stage 0  mb 0
  2  accumulate            stage 0  mb 0
  3  free                  stage 0  mb 0
> 4  reduce_grad           stage 0        bucket 0
  5  average_buffers       stage 0
  6  wait_reduce_grad      stage 0        bucket 0
  7  update                stage 0
  rank 0      F0 [B0]
  rank 1      F1 [B1]"""
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            change(Op.REDUCE_GRAD, microbatch=0),
            "reduce_grad names microbatch 0; expected none",
        ),
        (
            change(Op.GRAD_NORM, peer=1),
            "grad_norm names peer 1; expected none",
        ),
        (
            change(Op.UPDATE, slot=0),
            "update names slot 0; expected none",
        ),
        (
            change(Op.REDUCE_GRAD, bucket=1),
            "reduce_grad names bucket 1; expected [0]",
        ),
        (change(Op.UPDATE, stage=1), "update names stage 1; expected a stage of this rank: [0]"),
        (change(Op.GRAD_NORM, stage=0), "grad_norm names stage 0; expected none"),
        (
            change(Op.GRAD_NORM, op=Op.UNSHARD, stage=0, bucket=0),
            "unshard of stage 0, bucket 0 is not in the plan for",
        ),
        (change(Op.FORWARD, bucket=0), "forward names bucket 0; expected none"),
        (change(Op.FREE, bucket=0), "free names bucket 0; expected none"),
    ],
)
def test_every_field_fits_the_plan(edit: Edit, message: str) -> None:
    found = fault(WHOLE, {0: edit})
    assert found.startswith("rank 0, instruction ")
    assert message in found


def test_messages_have_no_bucket() -> None:
    assert "send of weight tied_0_1 (0 -> 1) names bucket 0; expected none" in fault(
        TIED_TO_TWO, {0: change(Op.SEND, bucket=0)}
    )


def test_a_rank_updates_its_own_stages_alone() -> None:
    message = fault(TIED_TO_TWO, {2: change(Op.UPDATE, stage=0)})
    assert "rank 2, instruction 31: update names stage 0; expected a stage of this rank: [1]" in message


@pytest.mark.parametrize(
    ("step", "edit", "message"),
    [
        (
            WHOLE,
            drop_both(Op.REDUCE_GRAD),
            "reduce_grad of stage 0, bucket 0 is there 0 times on rank 0",
        ),
        (
            WHOLE,
            repeat_both(Op.REDUCE_GRAD),
            "reduce_grad of stage 0, bucket 0 is there 2 times on rank 0",
        ),
        (WHOLE, drop_both(Op.AVERAGE_BUFFERS), "average_buffers of stage 0 is there 0 times on rank 0"),
        (WHOLE, drop(Op.GRAD_NORM), "grad_norm is there 0 times on rank 0; expected once"),
        (WHOLE, drop(Op.UPDATE), "update of stage 0 is there 0 times on rank 0; expected once"),
        (WHOLE, repeat(Op.UPDATE), "update of stage 0 is there 2 times on rank 0; expected once"),
        (
            SHARDED,
            drop_both(Op.UNSHARD),
            "unshard of stage 0, bucket 0 is there 0 times on rank 0; expected once",
        ),
        (SHARDED, repeat_both(Op.UNSHARD), "unshard of stage 0, bucket 0 is there 2 times on rank 0"),
        (IN_ROUNDS, drop_both(Op.REDUCE_GRAD, 0), "bucket 0 is there 1 times on rank 0; expected 2 times"),
        (IN_ROUNDS, repeat_both(Op.REDUCE_GRAD, 0), "bucket 0 is there 3 times on rank 0; expected 2 times"),
        (GATHERED, drop_both(Op.REDUCE_GRAD, 0, 1), "bucket 0 is there 1 times on rank 0; expected 2 times"),
    ],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_everything_is_done_once(step: Step, edit: Edit, message: str, everywhere: bool) -> None:
    """Nor may all ranks leave it out together, or do it twice, so that nobody waits for anybody."""
    assert message in fault(step, dict.fromkeys((0, 1) if everywhere else (0,), edit))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    ("step", "op", "what"),
    [
        (WHOLE, Op.REDUCE_GRAD, "of stage 0, bucket 0"),
        (WHOLE, Op.AVERAGE_BUFFERS, "of stage 0"),
        (COUNTED, Op.SUM_COUNTS, "of stage 0"),
        (IN_PARTS, Op.REDUCE_GRAD, "of stage 0, bucket 0"),
        (IN_ROUNDS, Op.REDUCE_GRAD, "of stage 0, bucket 0"),
        (SHARDED, Op.UNSHARD, "of stage 0, bucket 0"),
        (GATHERED, Op.UNSHARD, "of stage 0, bucket 0"),
    ],
)
def test_every_collective_is_awaited_once(step: Step, op: Op, what: str, everywhere: bool) -> None:
    def found(edit: Edit) -> str:
        return fault(step, dict.fromkeys((0, 1) if everywhere else (0,), edit))

    wait = WAIT_OF[op]
    for twice, other in ((wait, op), (op, wait)):
        for edit in (drop(twice), repeat(twice)):
            message = found(edit)
            counted = f"{twice} {what} is there" in message
            unpaired = any(f"has no {wait} {way} it" in message for way in ("before", "behind"))
            assert counted or f"{wait} {what}" in message or unpaired, other
    assert f"{wait} {what} runs before {op} {what} at" in found(move(wait, before=(op,)))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("step", "behind"),
    [
        (WHOLE, Op.REDUCE_GRAD),
        (WHOLE, Op.GRAD_NORM),
        (IN_PARTS, Op.REDUCE_GRAD),
        (SHARDED, Op.UPDATE),
        (data_parallel(1, replicas=1, updates=True, clips=True), Op.GRAD_NORM),
        (data_parallel(1, replicas=1, updates=True), Op.UPDATE),
    ],
)
def test_gradients_are_accumulated_before_they_are_read(
    step: Step, behind: Op, ranks: tuple[int, ...]
) -> None:
    members = [rank for rank in ranks if rank < len(step.programs())]
    last = turn_of_last_accumulate(step, behind)
    message = fault(step, dict.fromkeys(members, move(Op.ACCUMULATE, turn=last, behind=(behind,))))
    assert "accumulate of stage 0, microbatch" in message


def turn_of_last_accumulate(step: Step, behind: Op) -> int:
    """Which of the accumulations is the last one before an op."""
    ops = [each.op for each in step.programs()[0].instructions]
    return ops[: ops.index(behind)].count(Op.ACCUMULATE) - 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.CHECK), "check is there 0 times on rank 0; expected once"),
        (repeat(Op.CHECK), "check is there 2 times on rank 0; expected once"),
        (move(Op.CHECK, before=(Op.GRAD_NORM,)), "check runs before grad_norm at"),
        (move(Op.CHECK, before=(Op.BACKWARD,)), "check runs before grad_norm at"),
        (move(Op.CHECK, behind=(Op.UPDATE,)), "update of stage 0 runs before check at"),
        (change(Op.CHECK, stage=0), "check names stage 0; expected none"),
    ],
)
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_step_that_may_be_skipped_is_checked(edit: Edit, message: str, ranks: tuple[int, ...]) -> None:
    assert message in fault(SKIPPING, dict.fromkeys(ranks, edit))


def test_a_step_that_is_never_skipped_has_no_check() -> None:
    message = fault(WHOLE, {0: lambda own: own.insert(find(own, Op.UPDATE), Instruction(Op.CHECK, -1))})
    assert "check is not in the plan for rank 0; expected" in message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.RESHARD), "backward of stage 0, microbatch 2 has no reshard behind it"),
        (
            drop_both(Op.UNSHARD),
            "forward of stage 0, microbatch 0 has no unshard before it",
        ),
        (
            repeat_both(Op.UNSHARD),
            "unshard of stage 0, bucket 0 runs before reshard of stage 0, bucket 0 at 13",
        ),
        (repeat(Op.RESHARD), "reshard of stage 0, bucket 0 has no unshard before it"),
        (move(Op.RESHARD), "reshard of stage 0, bucket 0 runs before unshard of stage 0, bucket 0 at 1"),
        (move(Op.RESHARD, behind=(Op.FORWARD,)), "forward of stage 0, microbatch 2 has no unshard before it"),
        (
            move(Op.WAIT_UNSHARD, behind=(Op.FORWARD,)),
            "forward of stage 0, microbatch 0 runs before wait_unshard of stage 0, bucket 0 at 2",
        ),
    ],
)
def test_parameters_are_gathered_while_their_stage_computes(edit: Edit, message: str) -> None:
    assert message in fault(GATHERED, {0: edit, 1: edit})


def test_what_is_never_gathered_is_refused() -> None:
    def edit(instructions: list[Instruction]) -> None:
        gathering = (Op.UNSHARD, Op.WAIT_UNSHARD, Op.RESHARD)
        instructions[:] = [each for each in instructions if each.op not in gathering]

    message = fault(GATHERED, {0: edit, 1: edit})
    assert "forward of stage 0, microbatch 0 has no unshard before it" in message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            move(Op.AVERAGE_BUFFERS, before=(Op.FORWARD, -1, 1)),
            "forward of stage 0, microbatch 2 comes after average_buffers of stage 0 at 1",
        ),
        (
            move(Op.REDUCE_GRAD, before=(Op.BACKWARD, -1, 1)),
            "8: accumulate of stage 0, microbatch 2 has no reduce_grad behind it",
        ),
        (
            move(Op.GRAD_NORM, before=(Op.WAIT_REDUCE_GRAD,)),
            "grad_norm runs before wait_reduce_grad of stage 0, bucket 0 at 11",
        ),
        (move(Op.UPDATE, before=(Op.GRAD_NORM,)), "update of stage 0 runs before grad_norm at 12"),
        (
            move(Op.UPDATE, before=(Op.WAIT_REDUCE_GRAD,)),
            "update of stage 0 runs before wait_reduce_grad of stage 0, bucket 0 at 11",
        ),
        (
            move(Op.UPDATE, before=(Op.BACKWARD, -1, 1)),
            "accumulate of stage 0, microbatch 2 comes after update of stage 0 at 6",
        ),
        (move(Op.UPDATE), "update of stage 0 runs before average_buffers of stage 0 at 3"),
        (
            move(Op.AVERAGE_BUFFERS, behind=(Op.UPDATE,)),
            "update of stage 0 runs before average_buffers",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_everything_is_done_in_order(edit: Edit, message: str, ranks: tuple[int, ...]) -> None:
    """Also if all ranks do it in the same wrong order."""
    found = fault(WHOLE, dict.fromkeys(ranks, edit))
    assert found.startswith("rank 0, instruction ")
    assert message in found
    assert "  rank 1      F1  F3  B1 " in found


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_counts_are_summed_before_their_stage_computes(ranks: tuple[int, ...]) -> None:
    late = move(Op.WAIT_SUM_COUNTS, behind=(Op.FORWARD,))
    assert "forward of stage 0, microbatch 0 runs before wait_sum_counts of stage 0 at 2" in fault(
        COUNTED, dict.fromkeys(ranks, late)
    )


def test_the_last_of_several_rounds_comes_after_the_last_backward() -> None:
    before = (Op.BACKWARD, -1, 1)
    early = chain(move(Op.WAIT_REDUCE_GRAD, 0, 0, before=before), move(Op.REDUCE_GRAD, 0, 1, before=before))
    message = fault(IN_ROUNDS, {0: early})
    assert "9: accumulate of stage 0, microbatch 2 has no reduce_grad behind it" in message


def test_shares_are_gathered_after_their_update() -> None:
    early = move(Op.UNSHARD, 0, before=(Op.UPDATE,))
    assert "unshard of stage 0, bucket 0 runs before update of stage 0 at 11" in fault(
        SHARDED, {0: early, 1: early}
    )


def last_gradients(instructions: list[Instruction]) -> list[Instruction]:
    """Removes and returns the last wait for a tied weight's gradient, and the accumulation behind it."""
    wait = max(
        number
        for number, each in enumerate(instructions)
        if each.op is Op.WAIT_RECV and each.link and each.link.payload is Payload.WEIGHT_GRADIENT
    )
    removed, instructions[wait : wait + 2] = instructions[wait : wait + 2], []
    return removed


def bring_last(instructions: list[Instruction]) -> None:
    """Moves the last gradient of a tied weight to the end of the program."""
    instructions.extend(last_gradients(instructions))


def bring_after(op: Op) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        sent_back = last_gradients(instructions)
        place = find(instructions, op) + 1
        instructions[place:place] = sent_back

    return edit


@pytest.mark.parametrize(
    ("step", "edit", "message"),
    [
        (
            TIED_TO_TWO,
            bring_last,
            "accumulate of weight_gradient tied_0_1 (1 -> 0) comes after update of stage 0 at 20",
        ),
        (
            TIED_TO_ONE,
            bring_after(Op.GRAD_NORM),
            "accumulate of weight_gradient tied_0_1 (1 -> 0) comes after grad_norm at",
        ),
        (TIED_TO_ONE, bring_last, "tied_0_1 (1 -> 0) comes after update of stage 0 at"),
        (
            make_step(round_robin(3, [1, 2]), tied=(0, 1), updates=True),
            bring_last,
            "accumulate of weight_gradient tied_0_1 (1 -> 0) comes after update of stage 0 at",
        ),
    ],
)
def test_the_gradient_of_a_tied_weight_arrives_first(step: Step, edit: Edit, message: str) -> None:
    assert message in fault(step, {0: edit})


def test_what_is_sent_back_on_one_rank_comes_before_the_update() -> None:
    """Stage 0 and the stage that borrows from it are on one rank, so that a move brings the gradient."""
    step = make_step(make_schedule("zb-v", 2, 3), tied=(0, 3), updates=True)
    programs = [each.instructions for each in step.programs()]
    moved = [
        number
        for number, each in enumerate(programs[0])
        if each.op is Op.MOVE and each.link and each.link.payload is Payload.WEIGHT_GRADIENT
    ]
    message = fault(step, {0: lambda instructions: instructions.append(instructions.pop(moved[0]))})
    assert "move of weight_gradient tied_0_3 (3 -> 0) comes after update of stage 0 at 56" in message


TWO_BUCKETS = replace(
    WHOLE,
    sync_spec=replace(WHOLE.sync_spec, buckets=(*WHOLE.sync_spec.buckets, Bucket(0, (value("bias", 2),)))),
)


def test_two_collectives_swapped_on_one_member_are_refused() -> None:
    def swap(instructions: list[Instruction]) -> None:
        one, other = (find(instructions, Op.REDUCE_GRAD, bucket) for bucket in (0, 1))
        instructions[one], instructions[other] = instructions[other], instructions[one]

    message = fault(TWO_BUCKETS, {1: swap})
    assert message.startswith(
        "rank 0, instruction 9: deadlock in the order of collectives:\n"
        "  rank 0 at '9 reduce_grad stage 0 bucket 0' waits for rank 1 to reach"
    )
    assert "rank 0      F0  F2  B0 [B2]\n  rank 1      F1  F3  B1 [B3]" in message
    both = list(TWO_BUCKETS.programs())
    for program in both:
        instructions = list(program.instructions)
        swap(instructions)
        both[program.rank] = replace(program, instructions=tuple(instructions))
    TWO_BUCKETS.verify(both)


def test_a_rank_that_gathers_more_often_waits_for_nobody() -> None:
    def again(instructions: list[Instruction]) -> None:
        number = find(instructions, Op.UNSHARD)
        gathering = instructions[number : number + 2]
        instructions[number:number] = [*gathering, instructions[find(instructions, Op.RESHARD)]]

    for rank in (0, 1):
        message = fault(GATHERED, {rank: again})
        assert "meets" in message or f"waits for rank {1 - rank}, which has no such" in message

    def late(instructions: list[Instruction]) -> None:
        instructions += [*instructions[:2], instructions[find(instructions, Op.RESHARD)]]

    assert (
        "rank 1, instruction 16: unshard of stage 0, bucket 0 waits for rank 0, which has no such"
        in fault(GATHERED, {1: late})
    )


def test_nobody_gets_past_a_collective_before_the_last_rank_has_come() -> None:
    """The last two of three ranks have come, and the first needs what the second would send it afterwards."""
    step = make_step(round_robin(3, [1, 1, 1]), updates=True, clips=True)

    def norm_before_the_last_send(instructions: list[Instruction]) -> None:
        norm = instructions.pop(find(instructions, Op.GRAD_NORM))
        sends = [k for k, each in enumerate(instructions) if each.op is Op.SEND]
        sent, added = instructions[sends[-1] : sends[-1] + 2]
        instructions[sends[-1] : sends[-1] + 2] = [added, norm, sent]

    programs = list(step.programs())
    edits = [list(each.instructions) for each in programs]
    norm_before_the_last_send(edits[1])
    with pytest.raises(Wrong, match="is stuck"):
        check_meaning(step, [Program(rank, tuple(own)) for rank, own in enumerate(edits)])
    assert "deadlock if sends wait" in fault(step, {1: norm_before_the_last_send})


def test_a_gradient_that_leaves_after_the_norm_that_needs_it_is_a_deadlock() -> None:
    def send_last(instructions: list[Instruction]) -> None:
        sends = [k for k, each in enumerate(instructions) if each.op is Op.SEND]
        instructions.append(instructions.pop(sends[-1]))

    message = fault(TIED_TO_ONE, {2: send_last})
    heading, *lines = message.splitlines()
    assert heading == "rank 0, instruction 25: deadlock if sends wait for their receives:"
    assert lines[0].startswith("  rank 0 at '25 wait_recv stage 0 weight_gradient tied_0_1 (1 -> 0) from")
    assert lines[0].endswith("to reach '13 send stage 1 weight_gradient tied_0_1 (1 -> 0) to rank 0'")
    assert lines[1] == "  rank 2 at '11 grad_norm' waits for rank 0 to reach '29 grad_norm'"


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
        verify_programs(programs, step.placement, step.links, 4, sync_spec=sync_spec)


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


def is_sync_instruction(each: Instruction) -> bool:
    """Whether an instruction belongs to no microbatch, or is run in parts because of such ones.

    Waits and accumulations are edited as well.
    """
    once = each.link is not None and not each.link.payload.per_microbatch
    if each.op in (Op.ACCUMULATE, Op.WAIT_RECV):
        return True
    return once or each.segment >= 0 or not (each.op.traits.per_microbatch or each.op.traits.carries_link)


def test_sums_stand_between_the_parts_of_the_last_backward_of_each_replica() -> None:
    lines = instruction_lines(IN_PARTS.programs()[1])
    assert (
        "\n".join(lines)
        == """\
 0  forward           stage 0  mb 1
 1  forward           stage 0  mb 3
 2  backward          stage 0  mb 1
 3  accumulate        stage 0  mb 1
 4  free              stage 0  mb 1
 5  backward          stage 0  mb 3  segment 0
 6  accumulate        stage 0  mb 3  segment 0
 7  reduce_grad       stage 0                   bucket 0
 8  backward          stage 0  mb 3  segment 1
 9  accumulate        stage 0  mb 3  segment 1
10  reduce_grad       stage 0                   bucket 1
11  backward          stage 0  mb 3  segment 2
12  accumulate        stage 0  mb 3  segment 2
13  free              stage 0  mb 3
14  reduce_grad       stage 0                   bucket 2
15  wait_reduce_grad  stage 0                   bucket 0
16  wait_reduce_grad  stage 0                   bucket 1
17  wait_reduce_grad  stage 0                   bucket 2
18  update            stage 0"""
    )


def test_gradients_that_are_summed_each_round_are_made_in_parts_each_time() -> None:
    step = data_parallel(updates=True, shard=ShardingLevel.GRADIENTS, num_segments=2)
    own = step.programs()[0].instructions
    assert [each.segment for each in own if each.op is Op.BACKWARD] == [0, 1, 0, 1]
    assert [each.bucket for each in own if each.op is Op.REDUCE_GRAD] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop(Op.BACKWARD, turn=1),
            "backward of stage 0, microbatch 2 runs its segments in the order [1, 2]",
        ),
        (
            drop(Op.BACKWARD, turn=2),
            "backward of stage 0, microbatch 2 runs its segments in the order [0, 2]",
        ),
        (repeat(Op.BACKWARD, turn=2), "runs its segments in the order [0, 1, 1, 2]; expected [0, 1, 2]"),
        (
            move(Op.BACKWARD, turn=2, behind=(Op.BACKWARD, -1, 2)),
            "runs its segments in the order [0, 2, 1]; expected [0, 1, 2]",
        ),
        (change(Op.BACKWARD, -1, 2, segment=3), "backward names segment 3; expected one of 3"),
        (change(Op.FORWARD, segment=0), "forward names segment 0; expected none"),
        (change(Op.FREE, segment=0), "free names segment 0; expected none"),
        (change(Op.BACKWARD, -1, 1, segment=-1), "runs its segments in the order [1, 2]"),
        (
            move(Op.REDUCE_GRAD, 1, before=(Op.BACKWARD, -1, 2)),
            "10: accumulate of stage 0, microbatch 2, segment 1 has no reduce_grad behind it",
        ),
        (
            move(Op.REDUCE_GRAD, 0, before=(Op.BACKWARD, -1, 1)),
            "7: accumulate of stage 0, microbatch 2, segment 0 has no reduce_grad behind it",
        ),
    ],
)
def test_parts_run_once_and_in_order_and_sums_behind_them(edit: Edit, message: str) -> None:
    found = fault(IN_PARTS, {0: edit})
    assert found.startswith("rank 0, instruction ")
    assert message in found


def test_a_bucket_is_complete_after_a_part_that_there_is() -> None:
    bucket = replace(IN_PARTS.sync_spec.buckets[2], segment=3)
    step = replace(
        IN_PARTS, sync_spec=replace(IN_PARTS.sync_spec, buckets=(*IN_PARTS.sync_spec.buckets[:2], bucket))
    )
    with pytest.raises(VerifyError, match="bucket 2 is complete after segment 3; stage 0 has 3"):
        step.verify(IN_PARTS.programs())


def test_a_bucket_that_a_later_part_completes_is_not_summed_before_it() -> None:
    late = replace(IN_PARTS.sync_spec.buckets[0], segment=2)
    step = replace(
        IN_PARTS, sync_spec=replace(IN_PARTS.sync_spec, buckets=(late, *IN_PARTS.sync_spec.buckets[1:]))
    )
    with pytest.raises(
        VerifyError, match="accumulate of stage 0, microbatch 2, segment 2 has no reduce_grad behind it"
    ):
        step.verify(IN_PARTS.programs())


@st.composite
def edited(draw: st.DrawFn, step: Step) -> Sequence[Program]:
    """Programs in which an instruction of the sync_spec is left out, doubled, moved or swapped with another.

    It happens on one rank, or on all that have the same instruction.
    """
    programs = [list(each.instructions) for each in step.programs()]
    assume(any(map(is_sync_instruction, itertools.chain(*programs))))
    sites = [(rank, each) for rank, own in enumerate(programs) for each in own if is_sync_instruction(each)]
    rank, each = draw(st.sampled_from(sites))
    how, everywhere = draw(st.sampled_from(["drop", "double", "move", "swap"])), draw(st.booleans())
    place = draw(st.integers(0, max(map(len, programs))))
    for where, own in enumerate(programs):
        if each in own and (where == rank or everywhere):
            at, to = own.index(each), min(place, len(own) - 1)
            if how == "double":
                own.insert(to, each)
            elif how == "swap":
                own[at], own[to] = own[to], own[at]
            else:
                own.pop(at)
                own[to:to] = [each] if how == "move" else []
    return [Program(rank, tuple(own)) for rank, own in enumerate(programs)]


@pytest.mark.slow
@settings(max_examples=75)
@given(st.data())
def test_an_edited_program_is_refused_unless_it_means_the_same(data: st.DataObject) -> None:
    step = data.draw(
        steps().filter(
            lambda step: any(is_sync_instruction(x) for p in step.programs() for x in p.instructions)
        )
    )
    programs = data.draw(edited(step))
    try:
        step.verify(programs)
    except VerifyError:
        return
    check_meaning(step, programs)


@pytest.mark.parametrize("part", StepPart)
@pytest.mark.parametrize(
    "step", [WHOLE, SKIPPING, COUNTED, IN_PARTS, TIED_TO_ONE, TIED_TO_TWO, SHARDED, IN_ROUNDS, GATHERED]
)
def test_no_instruction_of_the_sync_can_be_left_out_or_doubled(step: Step, part: StepPart) -> None:
    """Also of a step that accumulates, and of an update alone."""
    plan = plan_part(
        plan_of(step.schedule, step.links, sync_spec=step.sync_spec, segments=step.segments), part
    )
    programs = [program_part(each, step.sync_spec, part) for each in step.programs()]
    verify_step(plan, programs)
    assert any(each.op is Op.UPDATE for each in programs[0].instructions) == plan.sync_spec.runs_update
    for rank, program in enumerate(programs):
        own = program.instructions
        for number, each in enumerate(own):
            for copies in ((), (each, each)) if is_sync_instruction(each) else ():
                others = list(programs)
                others[rank] = Program(rank, (*own[:number], *copies, *own[number + 1 :]))
                with pytest.raises(VerifyError):
                    verify_step(plan, others)


def test_a_part_is_not_taken_for_another() -> None:
    plan = plan_of(SHARDED.schedule, SHARDED.links, sync_spec=SHARDED.sync_spec)
    parts = {
        part: [program_part(each, SHARDED.sync_spec, part) for each in SHARDED.programs()]
        for part in StepPart
    }
    for part, other in itertools.permutations(StepPart, 2):
        with pytest.raises(VerifyError):
            verify_step(plan_part(plan, part), parts[other])


def test_what_executes_programs_on_symbols_notices_what_is_wrong() -> None:
    """The oracle of the test above is one that can fail."""
    for step, edit in (
        (WHOLE, drop(Op.REDUCE_GRAD)),
        (WHOLE, move(Op.GRAD_NORM, before=(Op.REDUCE_GRAD,))),
        (TIED_TO_ONE, bring_after(Op.GRAD_NORM)),
        (TIED_TO_ONE, drop(Op.WAIT_RECV)),
        (WHOLE, drop(Op.ACCUMULATE)),
        (WHOLE, drop(Op.WAIT_REDUCE_GRAD)),
        (COUNTED, drop(Op.WAIT_SUM_COUNTS)),
        (WHOLE, move(Op.GRAD_NORM, before=(Op.WAIT_REDUCE_GRAD,))),
        (GATHERED, drop(Op.RESHARD)),
        (GATHERED, move(Op.WAIT_UNSHARD, behind=(Op.FORWARD,))),
        (IN_PARTS, move(Op.REDUCE_GRAD, 1, before=(Op.BACKWARD, -1, 2))),
        (SHARDED, move(Op.UNSHARD, before=(Op.UPDATE,))),
    ):
        programs = []
        for program in step.programs():
            instructions = list(program.instructions)
            if step is not TIED_TO_ONE or program.rank == 0:
                edit(instructions)
            programs.append(Program(program.rank, tuple(instructions)))
        with pytest.raises(Wrong):
            check_meaning(step, programs)


def test_a_stage_of_one_rank_meets_nobody() -> None:
    schedule = gpipe(2, 2)
    assert schedule.placement == one_rank_per_stage((0, 1))
    step = make_step(schedule, updates=True)
    assert {x.op for p in step.programs() for x in p.instructions} >= {Op.UPDATE}
    assert not any(x.op is Op.REDUCE_GRAD for p in step.programs() for x in p.instructions)
