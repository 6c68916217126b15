"""The program verifier: each rule finds the program broken for it, and says where."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import networkx
import numpy as np
import pytest
from bare_programs import lower, verify_programs
from example_schedules import result_link, skip_links, tied_links, v_gpipe, value
from hypothesis import given
from hypothesis import strategies as st

from pipec.errors import VerifyError
from pipec.ir import Compute, Instruction, Link, Op, Payload, Phase, Program, Schedule, one_rank_per_stage
from pipec.programs.lower import chain_links
from pipec.programs.program_index import InstructionSite
from pipec.programs.rules.deadlock_rules import stalled_ranks, wait_cycle
from pipec.programs.verify import RULES
from pipec.schedules import forward_only, gpipe, make_schedule, zb_h1
from pipec.schedules.replicated import round_robin

LINKS = (*chain_links(3), *skip_links(0, 2), *tied_links(0, 2), result_link(2))
Edit = Callable[[list[Instruction]], None]


def find(
    instructions: Sequence[Instruction], op: Op, microbatch: int = 0, name: str = "", stage: int | None = None
) -> int:
    """The first instruction of that op and microbatch, with a value of that name and that stage if given."""
    return next(
        number
        for number, each in enumerate(instructions)
        if each.op is op
        and each.microbatch == microbatch
        and (not name or (each.link and name in [value.name for value in each.link.values]))
        and stage in (None, each.stage)
    )


def fault(
    rank: int, edit: Edit, schedule: Schedule | None = None, links: Sequence[Link] = LINKS, **options
) -> str:
    """What the verifier says after ``edit`` changed the program of ``rank``."""
    schedule = schedule or make_schedule("1f1b", 3, 4)
    programs = list(lower(schedule, links, options.get("recompute", ())))
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, **options)
    instructions = list(programs[rank].instructions)
    edit(instructions)
    programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        verify_programs(programs, schedule.placement, links, schedule.num_microbatches, **options)
    return str(caught.value)


def change(op: Op, at: int = 0, name: str = "", /, **fields) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, at, name)
        instructions[number] = replace(instructions[number], **fields)

    return edit


def drop(op: Op, microbatch: int = 0, name: str = "") -> Edit:
    return lambda instructions: instructions.pop(find(instructions, op, microbatch, name)) and None


Named = tuple[Op, int] | tuple[Op, int, str] | tuple[Op, int, str, int]
"""The arguments of ``find``."""


def move(
    op: Op,
    microbatch: int = 0,
    name: str = "",
    *,
    before: Named | None = None,
    behind: Named | None = None,
    by: int = 0,
) -> Edit:
    """Moves an instruction directly before or behind another, or by a number of places."""

    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, microbatch, name)
        moved, place = instructions.pop(number), number + by
        if before or behind:
            place = find(instructions, *(before or behind)) + (before is None)
        instructions.insert(place, moved)

    return edit


def repeat(op: Op, microbatch: int = 0, name: str = "") -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = find(instructions, op, microbatch, name)
        instructions.insert(number, instructions[number])

    return edit


def chain(*edits: Edit) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        for each in edits:
            each(instructions)

    return edit


def again(*ops: Op) -> Edit:
    """The same instructions of microbatch 1 a second time, behind the last of them."""

    def edit(instructions: list[Instruction]) -> None:
        numbers = [find(instructions, op, 1) for op in ops]
        instructions[max(numbers) + 1 : max(numbers) + 1] = [instructions[number] for number in numbers]

    return edit


def put_behind(op: Op, moved: Op, microbatch: int) -> Edit:
    """Moves the last instruction of an op and a microbatch directly behind the first of another op."""

    def edit(instructions: list[Instruction]) -> None:
        last = [k for k, x in enumerate(instructions) if x.op is moved and x.microbatch == microbatch][-1]
        instruction = instructions.pop(last)
        instructions.insert(find(instructions, op, microbatch) + 1, instruction)

    return edit


def unedited(instructions: list[Instruction]) -> None:
    pass


def test_the_message_shows_the_lines_around_the_fault_with_the_bad_one_marked() -> None:
    assert (
        fault(0, change(Op.FORWARD, 1, stage=1), links=chain_links(3))
        == """\
rank 0, instruction 2: forward names stage 1; expected a stage of this rank: [0]
   0  forward     stage 0  mb 0
   1  send        stage 0  mb 0  hidden_1 (0 -> 1)       to rank 1
>  2  forward     stage 1  mb 1
   3  send        stage 0  mb 1  hidden_1 (0 -> 1)       to rank 1
   4  recv        stage 0  mb 0  grad_hidden_1 (1 -> 0)  from rank 1  slot 0
   5  forward     stage 0  mb 2
  rank 0      F0 [F1] F2  B0  F3  B1  B2
  rank 1      F0  F1  B0  F2  B1  F3  B2
  rank 2      F0  B0  F1  B1  F2  B2  F3"""
    )


FOREIGN = Link(0, 1, Payload.ACTIVATION, (value("foreign"),))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(Op.FORWARD, 1, microbatch=9), "8: forward names microbatch 9; expected 0 to 3"),
        (change(Op.FORWARD, 1, slot=3), "8: forward names slot 3; expected none"),
        (
            change(Op.FREE, 1, peer=2**31 - 1),
            "24: free names peer 2147483647; expected none",
        ),
        (change(Op.FREE, 1, stage=-1), "24: free names stage -1; expected a stage of this rank: [1]"),
        (change(Op.SEND, 1, "hidden_2", link=None), "9: send carries no link; expected a link of the plan"),
        (
            change(Op.RECV, 1, "hidden_1", link=FOREIGN),
            "1: recv carries foreign (0 -> 1); expected a link of",
        ),
        (
            change(Op.SEND, 1, "hidden_2", peer=0),
            "9: send of hidden_2 (1 -> 2) names peer 0; expected 2",
        ),
        (change(Op.SEND, 1, "hidden_2", stage=2), "9: send of hidden_2 (1 -> 2) names stage 2; expected 1"),
        (
            change(Op.RECV, 1, "hidden_1", peer=2),
            "1: recv of hidden_1 (0 -> 1) names peer 2; expected 0",
        ),
        (
            change(Op.RECV, 1, "hidden_1", slot=-1),
            "1: recv of hidden_1 (0 -> 1) names slot -1; expected a slot",
        ),
        (change(Op.SEND, 1, "hidden_2", slot=0), "9: send of hidden_2 (1 -> 2) names slot 0; expected none"),
        (
            change(Op.RECV, 1, "hidden_1", microbatch=4),
            "1: recv of hidden_1 (0 -> 1) names microbatch 4; expected 0 to 3",
        ),
        (
            change(Op.RECV, -1, "loss", microbatch=0),
            "loss (2 -> all) names microbatch 0; expected none",
        ),
        (change(Op.RECV, -1, "loss", stage=1), "recv of result loss (2 -> all) names stage 1; expected -1"),
    ],
)
def test_every_field_fits_the_plan(edit: Edit, message: str) -> None:
    assert message in fault(1, edit)


def test_a_move_stays_on_its_rank_and_names_no_peer() -> None:
    v = v_gpipe(2, 2)
    options = {"schedule": v, "links": chain_links(4)}
    move_to = change(Op.MOVE, 0, "hidden_2", peer=0)
    assert "move of hidden_2 (1 -> 2) names peer 0; expected none" in fault(1, move_to, **options)
    sent = change(Op.MOVE, 0, "hidden_2", op=Op.SEND, peer=1, stage=1, slot=-1)
    assert "send of hidden_2 (1 -> 2) names peer 1; expected another rank, or a move" in fault(
        1, sent, **options
    )


def test_programs_and_links_fit_the_placement() -> None:
    programs = lower(gpipe(2, 2), chain_links(2))
    with pytest.raises(
        VerifyError, match=r"programs are of ranks \[1, 0\]; expected one for each of ranks 0 to 1"
    ):
        verify_programs(programs[::-1], one_rank_per_stage((0, 1)), chain_links(2), 2)
    with pytest.raises(VerifyError, match=r"hidden_2 \(1 -> 2\) names a stage beyond the plan's 2"):
        verify_programs(programs, one_rank_per_stage((0, 1)), chain_links(3), 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop(Op.FORWARD, 1),
            "instruction 20: forward of stage 1, microbatch 1 is missing on rank 1; expected once",
        ),
        (
            repeat(Op.FORWARD, 1),
            "instruction 9: forward of stage 1, microbatch 1 is there again; the first is at 8",
        ),
        (
            chain(drop(Op.BACKWARD, 1), drop(Op.ACCUMULATE, 1)),
            "backward or backward_input of stage 1, microbatch 1 is missing on rank 1; expected once",
        ),
        (
            repeat(Op.BACKWARD, 1),
            "22: backward of stage 1, microbatch 1 is there again; the first is at 21",
        ),
        (
            again(Op.BACKWARD, Op.ACCUMULATE),
            "backward of stage 1, microbatch 1 comes after send of grad_hidden_1 (1 -> 0), microbatch 1 at",
        ),
        (
            change(Op.BACKWARD, 1, op=Op.BACKWARD_INPUT),
            "backward or backward_weight of stage 1, microbatch 1 is missing on rank 1",
        ),
        (
            change(Op.BACKWARD, 1, op=Op.RECOMPUTE),
            "recompute of stage 1, microbatch 1 is not in the plan for rank 1; expected none",
        ),
    ],
)
def test_everything_is_computed_once(edit: Edit, message: str) -> None:
    assert message in fault(1, edit)


def test_a_stage_that_recomputes_does_so_for_every_microbatch() -> None:
    message = fault(1, drop(Op.RECOMPUTE, 2), recompute=[1])
    assert "recompute of stage 1, microbatch 2 is missing on rank 1; expected once" in message


def test_forwards_alone_must_all_run_and_need_no_backward() -> None:
    schedule = forward_only(make_schedule("gpipe", 3, 4))
    message = fault(2, drop(Op.FORWARD, 3), schedule, chain_links(3, training=False), recompute=[1])
    assert "forward of stage 2, microbatch 3 is missing on rank 2" in message


@pytest.mark.parametrize(
    ("schedule", "edit", "message"),
    [
        (
            make_schedule("1f1b", 3, 4),
            move(Op.RECOMPUTE, 0, behind=(Op.ACCUMULATE, 0)),
            "backward of stage 1, microbatch 0 runs before recompute of stage 1, microbatch 0 at",
        ),
        (
            make_schedule("1f1b", 3, 4),
            move(Op.RECOMPUTE, 0, before=(Op.FORWARD, 0)),
            "recompute of stage 1, microbatch 0 runs before forward of stage 1, microbatch 0 at",
        ),
        (
            zb_h1(3, 4),
            chain(
                move(Op.BACKWARD_WEIGHT, 3, before=(Op.BACKWARD_INPUT, 3)),
                put_behind(Op.BACKWARD_WEIGHT, Op.ACCUMULATE, 3),
            ),
            "backward_weight of stage 1, microbatch 3 runs before backward_input of stage 1, microbatch 3 at",
        ),
    ],
)
def test_the_phases_of_a_microbatch_run_in_order(schedule: Schedule, edit: Edit, message: str) -> None:
    assert message in fault(1, edit, schedule, chain_links(3), recompute=[1])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop(Op.SEND, 1, "hidden_2"),
            "send of hidden_2 (1 -> 2), microbatch 1 is missing on rank 1; expected once",
        ),
        (
            repeat(Op.SEND, 1, "hidden_2"),
            "instruction 10: send of hidden_2 (1 -> 2), microbatch 1 is there again; the first is at 9",
        ),
        (
            drop(Op.RECV, 1, "grad_hidden_2"),
            "recv or move of grad_hidden_2 (2 -> 1), microbatch 1 is missing on rank 1; expected once",
        ),
        (
            drop(Op.RECV, -1, "loss"),
            "rank 1, instruction 40: recv or move of result loss (2 -> all) is missing on rank 1",
        ),
    ],
)
def test_everything_is_delivered_once(edit: Edit, message: str) -> None:
    assert message in fault(1, edit)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop(Op.WAIT_RECV, 1, "hidden_1"),
            "instruction 7: forward of stage 1, microbatch 1 has no wait_recv before it",
        ),
        (
            repeat(Op.WAIT_RECV, 1, "grad_hidden_2"),
            "wait_recv of grad_hidden_2 (2 -> 1), microbatch 1 is there again; the first is at 20",
        ),
        (
            drop(Op.WAIT_RECV, -1, "loss"),
            "recv of result loss (2 -> all) has no wait_recv behind it",
        ),
    ],
)
def test_every_message_is_awaited_once(edit: Edit, message: str) -> None:
    assert message in fault(1, edit)


NOT_ADDED = "has no accumulate behind it"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.ACCUMULATE, 1), f"backward of stage 1, microbatch 1 {NOT_ADDED}"),
        (drop(Op.ACCUMULATE, 3), f"backward of stage 1, microbatch 3 {NOT_ADDED}"),
        (repeat(Op.ACCUMULATE, 1), "accumulate of stage 1, microbatch 1 has no backward or backward_input"),
        (
            move(Op.ACCUMULATE, 1, before=(Op.BACKWARD, 1)),
            "accumulate of stage 1, microbatch 1 runs before backward of stage 1, microbatch 1 at 22",
        ),
        (
            move(Op.ACCUMULATE, 1, behind=(Op.FORWARD, 3)),
            "accumulate of stage 1, microbatch 1 comes after free of stage 1, microbatch 1 at 23",
        ),
        (change(Op.ACCUMULATE, 1, microbatch=2), f"backward of stage 1, microbatch 1 {NOT_ADDED}"),
    ],
)
def test_gradients_are_accumulated_before_their_rank_computes_again(edit: Edit, message: str) -> None:
    found = fault(1, edit)
    assert found.startswith("rank 1, instruction ")
    assert message in found


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop(Op.ACCUMULATE, -1),
            "wait_recv of weight_gradient grad_tied_0_2 (2 -> 0) has no accumulate behind it",
        ),
        (repeat(Op.ACCUMULATE, -1), "grad_tied_0_2 (2 -> 0) is there again; the first is at 45"),
        (
            move(Op.ACCUMULATE, -1, before=(Op.WAIT_RECV, -1, "grad_tied_0_2")),
            "accumulate of weight_gradient grad_tied_0_2 (2 -> 0) runs before wait_recv of weight_gradient",
        ),
        (
            move(Op.ACCUMULATE, 3, behind=(Op.WAIT_RECV, -1, "grad_tied_0_2")),
            "accumulate of stage 0, microbatch 3 comes after free of stage 0, microbatch 3 at 41",
        ),
        (
            change(Op.ACCUMULATE, -1, link=chain_links(3)[0]),
            "accumulate carries hidden_1 (0 -> 1); expected gradients of a tied weight",
        ),
    ],
)
def test_gradients_of_tied_weights_are_accumulated_once_they_have_come(edit: Edit, message: str) -> None:
    assert message in fault(0, edit)


def test_weights_and_moves_are_delivered_once() -> None:
    assert "send of weight tied_0_2 (0 -> 2) is missing on rank 0" in fault(0, drop(Op.SEND, -1, "tied_0_2"))
    v, links = v_gpipe(2, 2), chain_links(4)
    assert "recv or move of hidden_2 (1 -> 2), microbatch 1 is missing on rank 1" in fault(
        1, drop(Op.MOVE, 1), v, links
    )


def test_messages_of_replicas_are_not_exchanged() -> None:
    """Each is sent once, and received once, but by another replica."""
    schedule, links = round_robin(4, [1, 2]), chain_links(2)
    programs = list(lower(schedule, links))
    for op in (Op.SEND, Op.RECV):
        own = [*programs[0].instructions]
        name = "hidden_1" if op is Op.SEND else "grad_hidden_1"
        numbers = [find(own, op, microbatch, name) for microbatch in (2, 3)]
        for number, other in zip(numbers, (2, 1), strict=True):
            own[number] = replace(own[number], peer=other)
        with pytest.raises(VerifyError, match=f"{op} of .* names peer [12]; expected [21]"):
            verify_programs([Program(0, tuple(own)), *programs[1:]], schedule.placement, links, 4)


SHARED = [
    Link(source, target, Payload.ACTIVATION, (value("shared"),))
    for source, target in ((0, 1), (0, 3), (1, 3))
]
"""What stage 0 makes for stages 1 and 3, which are on one rank: sent to each, or handed on."""


def test_a_value_goes_to_a_rank_once() -> None:
    schedule = make_schedule("interleaved-1f1b", 2, 4)
    links, twice = ((*chain_links(4), SHARED[0], SHARED[k]) for k in (2, 1))
    verify_programs(lower(schedule, links), schedule.placement, links, 4)
    with pytest.raises(VerifyError) as caught:
        verify_programs(lower(schedule, twice), schedule.placement, twice, 4)
    assert (
        "rank 1, instruction 2: shared (0 -> 3) and shared (0 -> 1) bring shared twice; "
        "expected the first stage to hand it on"
    ) in str(caught.value)


def test_a_rank_that_runs_its_stages_out_of_order_may_receive_a_value_for_each() -> None:
    orders = [[0, 2], [3, 1]]
    cells = [[Compute(Phase.FORWARD, stage, mb) for mb in range(2) for stage in order] for order in orders]
    schedule = Schedule("out-of-order", 2, one_rank_per_stage((0, 1, 0, 1)), cells)
    verify_programs(lower(schedule, SHARED[:2]), schedule.placement, SHARED[:2], 2)
    with pytest.raises(VerifyError, match="these computes wait for each other"):
        lower(schedule, [SHARED[0], SHARED[2]])


def test_nothing_is_sent_before_it_is_made() -> None:
    message = fault(1, move(Op.SEND, 1, "hidden_2", before=(Op.FORWARD, 1)))
    assert (
        "rank 1, instruction 8: send of hidden_2 (1 -> 2), microbatch 1 "
        "runs before forward of stage 1, microbatch 1 at 9" in message
    )
    message = fault(2, move(Op.SEND, -1, "grad_tied_0_2", before=(Op.BACKWARD, 3)))
    assert "comes after send of weight_gradient grad_tied_0_2 (2 -> 0) at" in message


def test_everything_is_received_before_it_is_read() -> None:
    message = fault(1, move(Op.WAIT_RECV, 0, "hidden_1", behind=(Op.FORWARD, 0)))
    assert (
        "rank 1, instruction 2: forward of stage 1, microbatch 0 "
        "runs before wait_recv of hidden_1 (0 -> 1), microbatch 0 at 3" in message
    )
    message = fault(2, move(Op.WAIT_RECV, -1, "tied_0_2", behind=(Op.FORWARD, 0)))
    assert (
        "instruction 8: forward of stage 2, microbatch 0 "
        "runs before wait_recv of weight tied_0_2 (0 -> 2) at 9" in message
    )
    message = fault(1, move(Op.MOVE, 0, behind=(Op.FORWARD, 0, "", 2)), v_gpipe(2, 2), chain_links(4))
    assert (
        "forward of stage 2, microbatch 0 runs before move of hidden_2 (1 -> 2), microbatch 0 at" in message
    )


def test_everything_is_received_before_it_is_awaited() -> None:
    message = fault(1, move(Op.RECV, 0, "hidden_1", behind=(Op.FORWARD, 0)))
    assert (
        "rank 1, instruction 1: wait_recv of hidden_1 (0 -> 1), microbatch 0 "
        "runs before recv of hidden_1 (0 -> 1), microbatch 0 at 3" in message
    )
    message = fault(2, move(Op.RECV, -1, "tied_0_2", behind=(Op.WAIT_RECV, -1, "tied_0_2")))
    assert (
        "wait_recv of weight tied_0_2 (0 -> 2) runs before recv of weight tied_0_2 (0 -> 2) at 8" in message
    )
    message = fault(1, move(Op.WAIT_RECV, -1, "loss", before=(Op.RECV, -1, "loss")))
    assert "wait_recv of result loss (2 -> all) runs before recv of result loss (2 -> all) at 36" in message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.FREE, 1), "free of stage 1, microbatch 1 is missing on rank 1; expected once"),
        (
            repeat(Op.FREE, 1),
            "rank 1, instruction 25: free of stage 1, microbatch 1 is there again; the first is at 24",
        ),
        (
            move(Op.FREE, 1, before=(Op.ACCUMULATE, 1)),
            "rank 1, instruction 24: accumulate of stage 1, microbatch 1 "
            "comes after free of stage 1, microbatch 1 at 23",
        ),
        (
            move(Op.FREE, 1, before=(Op.SEND, 1, "grad_hidden_1")),
            "24: accumulate of stage 1, microbatch 1 comes after free of stage 1, microbatch 1 at 22",
        ),
        (
            move(Op.FREE, 1, before=(Op.BACKWARD, 1)),
            "rank 1, instruction 22: backward of stage 1, microbatch 1 "
            "comes after free of stage 1, microbatch 1 at 21",
        ),
    ],
)
def test_each_microbatch_is_freed_after_its_last_use(edit: Edit, message: str) -> None:
    assert message in fault(1, edit)


def test_a_move_reads_from_a_microbatch_that_is_not_freed() -> None:
    schedule, links = forward_only(v_gpipe(2, 2)), chain_links(4, training=False)
    message = fault(1, move(Op.MOVE, 0, by=1), schedule, links)
    assert "move of hidden_2 (1 -> 2), microbatch 0 comes after free of stage 1, microbatch 0 at" in message


def test_a_slot_is_not_received_into_while_it_is_live() -> None:
    message = fault(1, change(Op.RECV, 1, "hidden_1", slot=0))
    assert (
        "rank 1, instruction 1: recv of hidden_1 (0 -> 1), microbatch 1 "
        "runs before free of stage 1, microbatch 0 at 14; expected of slot" in message
    )


def test_a_slot_is_live_until_all_stages_have_freed_it_that_its_values_are_handed_on_to() -> None:
    """Each forward of stage 1 is over, and freed, long before that of stage 3."""
    schedule = forward_only(make_schedule("looped-bfs", 2, 4))
    links = (*chain_links(4, training=False), SHARED[0], SHARED[2])
    message = fault(1, change(Op.RECV, 2, "shared", slot=0), schedule, links)
    assert (
        "recv of shared (0 -> 1), microbatch 2 "
        "runs before free of stage 3, microbatch 0 at 36; expected of slot" in message
    )


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    message = fault(1, move(Op.RECV, 1, "hidden_1", by=-1))
    assert (
        "rank 1, instruction 0: hidden_1 (0 -> 1), microbatch 1 is received before hidden_1 (0 -> 1), "
        "microbatch 0, but rank 0 sends them at 5 and 2"
    ) in message


def test_receiving_just_in_time_deadlocks_when_sends_wait() -> None:
    """The naive lowering of 1F1B: receive, compute, then a send that waits for its receive."""
    schedule, links = make_schedule("1f1b", 2, 2), chain_links(2)
    programs = [
        replace(each, instructions=just_in_time(each.instructions)) for each in lower(schedule, links)
    ]
    with pytest.raises(VerifyError) as caught:
        verify_programs(programs, schedule.placement, links, 2)
    heading, rank_0, rank_1, *shown = str(caught.value).splitlines()
    assert heading == "rank 0, instruction 3: deadlock if sends wait for their receives:"
    assert rank_0.startswith(
        "  rank 0 at '3 send stage 0 mb 1 hidden_1 (0 -> 1) to rank 1' waits for rank 1 to"
    )
    assert rank_0.endswith("reach '7 recv stage 1 mb 1 hidden_1 (0 -> 1) from rank 0 slot 1'")
    assert rank_1.startswith(
        "  rank 1 at '4 send stage 1 mb 0 grad_hidden_1 (1 -> 0) to rank 0' waits for rank 0"
    )
    assert rank_1.endswith("to reach '4 recv stage 0 mb 0 grad_hidden_1 (1 -> 0) from rank 1 slot 0'")
    assert [line for line in shown if line.startswith(">")] == [
        ">  3  send        stage 0  mb 1  hidden_1 (0 -> 1)       to rank 1"
    ]


def just_in_time(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Each receive moved to directly before its wait."""
    receives = {(each.link, each.microbatch, each.peer): each for each in instructions if each.op is Op.RECV}
    moved: list[Instruction] = []
    for each in instructions:
        if each.op is Op.WAIT_RECV:
            moved.append(receives[each.link, each.microbatch, each.peer])
        if each.op is not Op.RECV:
            moved.append(each)
    return tuple(moved)


def test_a_receive_is_not_posted_before_what_its_message_depends_on() -> None:
    """On a GPU it may hold that compute up. It depends on it by way of rank 1's forward and rank 2."""
    early = move(Op.RECV, 0, "grad_hidden_1", before=(Op.FORWARD, 1))
    message = fault(0, early, schedule=gpipe(3, 2), links=chain_links(3))
    assert message.startswith(
        "rank 0, instruction 2: grad_hidden_1 (1 -> 0), microbatch 0 is received before the next compute, "
        "which it depends on\n"
    )
    assert ">  2  recv        stage 0  mb 0  grad_hidden_1 (1 -> 0)  from rank 1  slot 0" in message


sites = st.tuples(st.integers(0, 3), st.integers(0, 4))


@given(st.lists(st.tuples(sites, sites).filter(lambda pair: pair[0][0] != pair[1][0]), max_size=12))
def test_programs_stall_exactly_where_the_waits_form_a_cycle(
    waits: list[tuple[InstructionSite, InstructionSite]],
) -> None:
    """To reach an instruction, a rank must have reached the one before and what that waits for."""
    graph = networkx.DiGraph(((rank, k + 1), (rank, k)) for rank in range(4) for k in range(5))
    for (rank, number), other in waits:
        graph.add_edge((rank, number + 1), other)
    columns = np.array([[*site, *other] for site, other in waits], np.int32).reshape(-1, 4).T
    stalled = stalled_ranks([5] * 4, columns)
    assert bool(stalled) == (not networkx.is_directed_acyclic_graph(graph))
    if stalled:
        ring = wait_cycle(stalled)
        for (_, ahead), (following, _) in zip(ring, ring[1:] + ring[:1], strict=True):
            assert ahead[0] == following[0]
            assert ahead[1] >= following[1]


def test_no_instruction_can_be_left_out_or_doubled() -> None:
    schedule = make_schedule("1f1b", 3, 3)
    programs = lower(schedule, LINKS, [1])
    for rank, program in enumerate(programs):
        for number, instruction in enumerate(program.instructions):
            for copies in ((), (instruction, instruction)):
                edited = (*program.instructions[:number], *copies, *program.instructions[number + 1 :])
                others = [*programs[:rank], Program(rank, edited), *programs[rank + 1 :]]
                with pytest.raises(VerifyError):
                    verify_programs(others, schedule.placement, LINKS, 3, recompute=[1])


def test_every_rule_is_broken_by_a_test() -> None:
    """A new rule needs a test here or in one of ``test_verify_*``, and this list a new line."""
    assert [rule.__name__ for rule in RULES] == [
        "asynchronous_supported",
        "fits_plan",
        "segments_in_order",
        "lives_are_complete",
        "collectives_meet",
        "each_value_received_once",
        "channels_in_order",
        "finishes",
        "receives_after_dependencies",
    ]
