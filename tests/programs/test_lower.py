"""Lowering: whatever the schedule and the links, the programs verify and use no more than they need."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from bare_programs import lower, verify_programs
from example_schedules import result_link, skip_links, tied_links, v_gpipe, value
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import VerifyError
from pipec.ir import Compute, Instruction, Link, Op, Payload, Phase, Program, Schedule, one_rank_per_stage
from pipec.ir.text_format import format_program
from pipec.programs.lower import chain_links
from pipec.schedules import SCHEDULES, dualpipe_v, forward_only, interleaved_1f1b, make_schedule, zb_h1


def checked(schedule: Schedule, links: Sequence[Link], recompute: Sequence[int] = ()) -> tuple[Program, ...]:
    programs = lower(schedule, links, recompute)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, recompute=recompute)
    return programs


MIDDLE_RANK = """\
rank 1: 35 instructions
 0  recv        stage 1  mb 0  hidden_1 (0 -> 1)       from rank 0  slot 0
 1  recv        stage 1  mb 1  hidden_1 (0 -> 1)       from rank 0  slot 1
 2  wait_recv   stage 1  mb 0  hidden_1 (0 -> 1)       from rank 0
 3  forward     stage 1  mb 0
 4  send        stage 1  mb 0  hidden_2 (1 -> 2)       to rank 2
 5  recv        stage 1  mb 2  hidden_1 (0 -> 1)       from rank 0  slot 2
 6  recv        stage 1  mb 0  grad_hidden_2 (2 -> 1)  from rank 2  slot 0
 7  wait_recv   stage 1  mb 1  hidden_1 (0 -> 1)       from rank 0
 8  forward     stage 1  mb 1
 9  send        stage 1  mb 1  hidden_2 (1 -> 2)       to rank 2
10  recompute   stage 1  mb 0
11  wait_recv   stage 1  mb 0  grad_hidden_2 (2 -> 1)  from rank 2
12  backward    stage 1  mb 0
13  send        stage 1  mb 0  grad_hidden_1 (1 -> 0)  to rank 0
14  accumulate  stage 1  mb 0
15  free        stage 1  mb 0
16  recv        stage 1  mb 1  grad_hidden_2 (2 -> 1)  from rank 2  slot 1
17  wait_recv   stage 1  mb 2  hidden_1 (0 -> 1)       from rank 0
18  forward     stage 1  mb 2
19  send        stage 1  mb 2  hidden_2 (1 -> 2)       to rank 2
20  recv        stage 1  mb 2  grad_hidden_2 (2 -> 1)  from rank 2  slot 0
21  recompute   stage 1  mb 1
22  wait_recv   stage 1  mb 1  grad_hidden_2 (2 -> 1)  from rank 2
23  backward    stage 1  mb 1
24  send        stage 1  mb 1  grad_hidden_1 (1 -> 0)  to rank 0
25  accumulate  stage 1  mb 1
26  free        stage 1  mb 1
27  recv                       result loss (2 -> all)  from rank 2
28  recompute   stage 1  mb 2
29  wait_recv   stage 1  mb 2  grad_hidden_2 (2 -> 1)  from rank 2
30  backward    stage 1  mb 2
31  send        stage 1  mb 2  grad_hidden_1 (1 -> 0)  to rank 0
32  accumulate  stage 1  mb 2
33  free        stage 1  mb 2
34  wait_recv                  result loss (2 -> all)  from rank 2
"""

FORWARD_ALONE = """\
rank 0: 8 instructions
0  forward    stage 0  mb 0
1  send       stage 0  mb 0  hidden_1 (0 -> 1)       to rank 1
2  free       stage 0  mb 0
3  forward    stage 0  mb 1
4  send       stage 0  mb 1  hidden_1 (0 -> 1)       to rank 1
5  free       stage 0  mb 1
6  recv                      result loss (1 -> all)  from rank 1
7  wait_recv                 result loss (1 -> all)  from rank 1
"""


def test_the_program_of_a_middle_rank_of_1f1b() -> None:
    programs = checked(make_schedule("1f1b", 3, 3), (*chain_links(3), result_link(2)), recompute=[1])
    assert format_program(programs[1]) == MIDDLE_RANK


def test_forwards_alone_are_freed_once_sent() -> None:
    links = (*chain_links(2, training=False), result_link(1))
    programs = checked(forward_only(make_schedule("gpipe", 2, 2)), links)
    assert format_program(programs[0]) == FORWARD_ALONE


def test_weights_are_lent_first_and_their_gradients_go_home_last() -> None:
    programs = checked(make_schedule("1f1b", 3, 4), (*chain_links(3), *tied_links(0, 2), *tied_links(1, 0)))
    assert [each.op for each in programs[0].instructions[:2]] == [Op.RECV, Op.SEND]
    last = programs[2].instructions[-1]
    assert (last.op, last.link and last.link.payload, last.peer) == (Op.SEND, Payload.WEIGHT_GRADIENT, 0)


def test_results_go_from_the_last_rank_to_every_other() -> None:
    programs = checked(make_schedule("1f1b", 4, 4), (*chain_links(4), result_link(3)))
    sends = [each for each in programs[3].instructions if each.link == result_link(3)]
    assert [(each.op, each.stage, each.peer) for each in sends] == [(Op.SEND, 3, peer) for peer in range(3)]
    for program in programs[:3]:
        receive, wait = [each for each in program.instructions if each.link == result_link(3)]
        assert (receive.op, receive.stage, receive.microbatch, receive.slot) == (Op.RECV, -1, -1, -1)
        assert wait == replace(receive, op=Op.WAIT_RECV) == program.instructions[-1]


def test_a_link_within_a_rank_is_a_move_right_after_its_producer() -> None:
    programs = checked(v_gpipe(2, 3), (*chain_links(4), *tied_links(1, 2)))
    instructions = programs[1].instructions
    assert instructions[0].op is Op.MOVE
    for number, instruction in enumerate(instructions):
        if instruction.op is Op.MOVE and instruction.link == chain_links(4)[1]:
            before = instructions[number - 1]
            assert (before.op, before.stage, before.microbatch) == (Op.FORWARD, 1, instruction.microbatch)


def test_recomputing_goes_before_the_input_half_of_a_split_backward() -> None:
    programs = checked(zb_h1(2, 3), chain_links(2), recompute=[0, 1])
    ops = [each.op for each in programs[1].instructions if each.op.phase]
    assert ops[:4] == [Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.FORWARD]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    make = draw(st.sampled_from([*SCHEDULES.values(), v_gpipe]))
    num_ranks, num_microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 32))
    if make is interleaved_1f1b:
        num_microbatches = num_ranks * (1 + num_microbatches % 4)
    return make(num_ranks, max(num_microbatches, 2 * num_ranks) if make is dualpipe_v else num_microbatches)


@st.composite
def linked_schedules(draw: st.DrawFn) -> tuple[Schedule, tuple[Link, ...], list[int]]:
    """A schedule with a chain, some skip connections, tied weights and a result, in any order."""
    schedule = draw(schedules())
    stages = range(schedule.num_stages)
    pairs = st.lists(st.sampled_from([(i, j) for i in stages for j in stages if i < j] or [None]), max_size=4)
    skips = [link for pair in {*draw(pairs)} - {None} for link in skip_links(*pair)]
    ties = [link for pair in {*draw(pairs)} - {None} for link in tied_links(*pair)]
    links = [*chain_links(schedule.num_stages), *skips, *ties, result_link(schedule.num_stages - 1)]
    recompute = draw(st.lists(st.sampled_from(stages), unique=True))
    return schedule, tuple(draw(st.permutations(links))), recompute


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(linked_schedules())
def test_any_schedule_with_any_links_verifies(case: tuple[Schedule, tuple[Link, ...], list[int]]) -> None:
    schedule, links, recompute = case
    checked(schedule, links, recompute)
    forward = tuple(link for link in links if link.payload in (Payload.ACTIVATION, Payload.WEIGHT))
    checked(forward_only(schedule), forward)


@settings(max_examples=20, deadline=None)
@given(linked_schedules())
def test_buffers_are_as_few_as_can_be(case: tuple[Schedule, tuple[Link, ...], list[int]]) -> None:
    for program in lower(*case):
        live: dict[Link, set[int]] = {}
        peak: dict[Link, int] = {}
        slots: dict[Link, set[int]] = {}
        for each in program.instructions:
            if each.op is Op.FREE:
                for link, microbatches in live.items():
                    if link.target == each.stage:
                        microbatches.discard(each.microbatch)
            elif each.link and each.slot >= 0:
                live.setdefault(each.link, set()).add(each.microbatch)
                slots.setdefault(each.link, set()).add(each.slot)
                peak[each.link] = max(peak.get(each.link, 0), len(live[each.link]))
        assert {link: set(range(count)) for link, count in peak.items()} == slots


@settings(max_examples=15, deadline=None)
@given(linked_schedules())
def test_receives_are_posted_a_compute_ahead(case: tuple[Schedule, tuple[Link, ...], list[int]]) -> None:
    """Unless the message depends on that compute. None is posted before a compute that it depends on."""
    programs = lower(*case)
    needed = needed_by_sends(programs)
    for program in programs:
        computes = [number for number, each in enumerate(program.instructions) if each.op.phase]
        for number, each in enumerate(program.instructions):
            if each.op is not Op.RECV or not each.link:
                continue
            needs = needed[each.link, each.microbatch, program.rank]
            assert not any(needs((program.rank, later)) for later in computes if later > number)
            if each.link.payload.per_microbatch and number > computes[0]:
                read = min(k for k in computes if k > number and reads(program.instructions[k], each))
                between = [k for k in computes if number < k < read and not is_replay(program, k)]
                last = max(k for k in computes if k < number)
                assert between or needs((program.rank, last))


Place = tuple[int, int]


def reads(compute: Instruction, message: Instruction) -> bool:
    assert message.link
    same = (compute.stage, compute.microbatch) == (message.stage, message.microbatch)
    return same and compute.op.phase in message.link.payload.readers


def is_replay(program: Program, number: int) -> bool:
    return program.instructions[number].op is Op.RECOMPUTE


def needed_by_sends(programs: Sequence[Program]) -> dict[tuple[Link, int, int], Callable[[Place], bool]]:
    """For each message to a rank, which instructions come before it is sent, however long any takes."""
    waits: dict[Place, list[Place]] = {}
    sends: dict[tuple[Link | None, int, int], Place] = {}
    for rank, program in enumerate(programs):
        for number, each in enumerate(program.instructions):
            waits[rank, number] = [(rank, number - 1)] if number else []
            if each.op is Op.SEND:
                sends[each.link, each.microbatch, each.peer] = rank, number
    for rank, program in enumerate(programs):
        received = defaultdict(list)
        for number, each in enumerate(program.instructions):
            if each.op is Op.RECV:
                received[each.stage, each.microbatch].append(each)
            for message in received[each.stage, each.microbatch]:
                if reads(each, message):
                    waits[rank, number].append(sends[message.link, message.microbatch, rank])
    numbers = {place: number for number, place in enumerate(waits)}
    before: dict[Place, int] = {}
    for place in TopologicalSorter(waits).static_order():
        before[place] = functools.reduce(
            int.__or__, (before[each] | 1 << numbers[each] for each in waits[place]), 0
        )
    return {
        message: lambda place, bits=before[site]: bool(bits >> numbers[place] & 1)
        for message, site in sends.items()
    }


def test_1f1b_needs_one_activation_buffer_more_than_microbatches_in_flight() -> None:
    for rank, program in enumerate(lower(make_schedule("1f1b", 4, 16), chain_links(4))):
        received = Link(rank - 1, rank, Payload.ACTIVATION, (value(f"hidden_{rank}"),))
        slots = {each.slot for each in program.instructions if each.op is Op.RECV and each.link == received}
        assert len(slots) == (4 - rank + 1 if rank else 0)


def test_a_cell_that_a_link_needs_must_be_scheduled() -> None:
    schedule = forward_only(make_schedule("gpipe", 2, 3))
    with pytest.raises(
        VerifyError, match=r"'gpipe' never runs backward or backward_input of stage 1, microbatch 0"
    ):
        lower(schedule, chain_links(2))


def test_cells_that_wait_for_each_other_are_named() -> None:
    forward = [Compute(Phase.FORWARD, stage, 0) for stage in range(2)]
    backward = [Compute(Phase.BACKWARD, stage, 0) for stage in range(2)]
    orders = ((backward[0], forward[0]), (forward[1], backward[1]))
    with pytest.raises(VerifyError, match=r"rank 0 at backward 0 of mb 0; rank 1 at forward 1 of mb 0"):
        lower(Schedule("broken", 1, one_rank_per_stage((0, 1)), orders), chain_links(2))
