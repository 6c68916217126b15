"""The program verifier: what it says of faults, and those that an edit of one instruction does not show."""

from dataclasses import replace
from typing import Any

import networkx
import numpy as np
import pytest
from bare_programs import lower, verify_programs
from broken_programs import Edit, golden_steps, verdict
from example_schedules import value
from hypothesis import given
from hypothesis import strategies as st
from symbolic_steps import make_step

from pipec.errors import VerifyError
from pipec.ir import Bucket, Op, ShardingLevel, Stage, SyncSpec, one_rank_per_stage
from pipec.programs.lower import bare_plan, chain_links
from pipec.programs.program_index import InstructionSite
from pipec.programs.rules.deadlock_rules import stalled_ranks, wait_cycle
from pipec.programs.verify import verify
from pipec.schedules import gpipe
from pipec.schedules.replicated import round_robin


def said(
    name: str, rank: int, op: Op, which: int, kind: str, amount: int = 0, everywhere: bool = False
) -> str:
    """What the verifier says of an edit of one of the instructions of a rank that have this op."""
    step = golden_steps()[name]
    programs = step.programs()
    number = [k for k, each in enumerate(programs[rank].instructions) if each.op is op][which]
    return verdict(step, Edit(rank, number, kind, amount, everywhere).applied_to(programs, step.plan.links))


def test_the_message_shows_the_lines_around_the_fault_with_the_bad_one_marked() -> None:
    assert (
        said("tied", 0, Op.FORWARD, 1, "stage", 1)
        == """\
rank 0, instruction 3: forward names stage 1; expected a stage of this rank: [0]
   0  send        stage 0        weight tied_0_2 (0 -> 2)           to rank 2
   1  forward     stage 0  mb 0
   2  send        stage 0  mb 0  hidden_1 (0 -> 1)                  to rank 1
>  3  forward     stage 1  mb 1
   4  send        stage 0  mb 1  hidden_1 (0 -> 1)                  to rank 1
   5  recv        stage 0  mb 0  grad_hidden_1 (1 -> 0)             from rank 1  slot 0
   6  forward     stage 0  mb 2
  rank 0      F0 [F1] F2  B0  B1  B2
  rank 1      F0  F1  B0  F2  B1  B2
  rank 2      F0  B0  F1  B1  F2  B2"""
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("1f1b", 1, Op.FORWARD, 1, "microbatch", 9), "8: forward names microbatch 10; expected 0 to 2"),
        (("1f1b", 1, Op.SEND, 0, "peer", 1), "4: send of hidden_2 (1 -> 2) names peer 3; expected 2"),
        (("replicas", 0, Op.REDUCE_GRAD, 0, "bucket", 1), "9: reduce_grad names bucket 1; expected [0]"),
        (
            ("stream of replicas", 1, Op.REDUCE_GRAD, 2, "microbatch", 1),
            "40: reduce_grad names microbatch 3; expected the first of a round",
        ),
        (("stream", 0, Op.FORWARD, 3, "version", 1), "24: forward names version 2; expected 1"),
        (("stream", 2, Op.UPDATE, 1, "version", 1), "26: update names version 3; expected 2"),
        (
            ("1f1b", 1, Op.FORWARD, 1, "drop"),
            "22: forward of stage 1, microbatch 1 is missing on rank 1; expected once",
        ),
        (
            ("1f1b", 1, Op.FORWARD, 1, "double"),
            "9: forward of stage 1, microbatch 1 is there again; the first is at 8",
        ),
        (
            ("1f1b", 1, Op.RECOMPUTE, 0, "move", 3),
            "11: backward of stage 1, microbatch 0 runs before recompute of stage 1, microbatch 0 at 13",
        ),
        (
            ("1f1b", 1, Op.RECV, 0, "drop"),
            "11: recv or move of hidden_1 (0 -> 1), microbatch 0 is missing on rank 1; expected once",
        ),
        (
            ("1f1b", 1, Op.WAIT_RECV, 0, "drop"),
            "2: forward of stage 1, microbatch 0 has no wait_recv before it",
        ),
        (
            ("1f1b", 1, Op.ACCUMULATE, 0, "drop"),
            "12: backward of stage 1, microbatch 0 has no accumulate behind it",
        ),
        (
            ("1f1b", 1, Op.RECV, 1, "slot", -1),
            "1: recv of hidden_1 (0 -> 1), microbatch 1 runs before free of stage 1, microbatch 0 at 15",
        ),
        (
            ("1f1b", 1, Op.RECV, 1, "move", -1),
            "0: hidden_1 (0 -> 1), microbatch 1 is received before hidden_1 (0 -> 1), microbatch 0, "
            "but rank 0 sends them at 4 and 1",
        ),
        (
            ("in segments", 1, Op.BACKWARD, 2, "drop"),
            "10: backward of stage 0, microbatch 3 runs its segments in the order [0, 2]; expected [0, 1, 2]",
        ),
        (
            ("in segments", 1, Op.REDUCE_GRAD, 1, "move", -2),
            "10: accumulate of stage 0, microbatch 3, segment 1 has no reduce_grad behind it",
        ),
        (
            ("replicas", 0, Op.UPDATE, 0, "move", -2, True),
            "10: update of stage 0 runs before wait_reduce_grad of stage 0, bucket 0 at 11",
        ),
        (
            ("skipping", 0, Op.CHECK, 0, "drop", 0, True),
            "11: check is there 0 times on rank 0; expected once",
        ),
        (
            ("offloaded", 0, Op.WAIT_PREFETCH, 0, "drop"),
            "20: backward of stage 0, microbatch 0 has no wait_prefetch before it",
        ),
        (
            ("stream", 1, Op.STASH, 0, "move", 3),
            "26: stash of stage 1, microbatch 0 comes after update of stage 1, microbatch 0 at 23",
        ),
    ],
)
def test_the_message_says_what_is_wrong_and_where(edit: tuple[Any, ...], message: str) -> None:
    assert said(*edit).startswith(f"rank {edit[1]}, instruction {message}")


def test_a_receive_is_not_posted_before_what_its_message_depends_on() -> None:
    """On a GPU it may hold that compute up. It depends on it by way of rank 1's forward and rank 2."""
    step = make_step(gpipe(3, 2))
    first, *others = step.programs()
    own = [*first.instructions]
    gradient = next(k for k, each in enumerate(own) if each.op is Op.RECV)
    second = [k for k, each in enumerate(own) if each.op is Op.FORWARD][1]
    own.insert(second, own.pop(gradient))
    assert verdict(step, [replace(first, instructions=tuple(own)), *others]).startswith(
        "rank 0, instruction 2: grad_hidden_1 (1 -> 0), microbatch 0 is received before the next compute, "
        "which it depends on\n"
    )


def test_programs_and_links_fit_the_placement() -> None:
    programs = lower(gpipe(2, 2), chain_links(2))
    with pytest.raises(
        VerifyError, match=r"programs are of ranks \[1, 0\]; expected one for each of ranks 0 to 1"
    ):
        verify_programs(programs[::-1], one_rank_per_stage((0, 1)), chain_links(2), 2)
    with pytest.raises(VerifyError, match=r"hidden_2 \(1 -> 2\) names a stage beyond the plan's 2"):
        verify_programs(programs, one_rank_per_stage((0, 1)), chain_links(3), 2)


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
    stalled = stalled_ranks(4, columns)
    assert bool(stalled) == (not networkx.is_directed_acyclic_graph(graph))
    if stalled:
        ring = wait_cycle(stalled)
        for (_, ahead), (following, _) in zip(ring, ring[1:] + ring[:1], strict=True):
            assert ahead[0] == following[0]
            assert ahead[1] >= following[1]


def test_a_deadlock_is_told_with_what_ranks_wait_for() -> None:
    """A receive is posted so late that sends, which may wait for it, wait for each other."""
    heading, rank_0, rank_1, *shown = said("handed on", 1, Op.RECV, 3, "move", 5).splitlines()
    assert heading == "rank 0, instruction 6: deadlock if sends wait for their receives:"
    assert rank_0 == (
        "  rank 0 at '6 send stage 0 mb 1 shared (0 -> 1) to rank 1' waits for rank 1 to reach "
        "'8 recv stage 1 mb 1 shared (0 -> 1) from rank 0 slot 1'"
    )
    assert rank_1 == (
        "  rank 1 at '6 send stage 1 mb 0 hidden_2 (1 -> 2) to rank 0' waits for rank 0 to reach "
        "'8 recv stage 2 mb 0 hidden_2 (1 -> 2) from rank 1 slot 0'"
    )
    assert [line for line in shown if line.startswith(">")] == [
        ">  6  send       stage 0  mb 1  shared (0 -> 1)    to rank 1"
    ]


# a sync spec fits the stages of a plan, and their tensors

BUCKET = Bucket(0, (value("w", 2),))


@pytest.mark.parametrize(
    ("sync_spec", "message"),
    [
        (SyncSpec(clips=True), "clips gradients or shards state, but it updates nothing"),
        (SyncSpec(shard=ShardingLevel.GRADIENTS), "clips gradients or shards state, but it updates nothing"),
        (SyncSpec(buffer_sync_stages=(1,)), "averages buffers of stage 1; expected a stage with several"),
        (SyncSpec((Bucket(1, BUCKET.parameters),)), "bucket 0 of stage 1; expected a stage with several"),
        (SyncSpec((Bucket(2, BUCKET.parameters),)), "bucket 0 of stage 2; expected a stage with several"),
        (SyncSpec((Bucket(0, ()),)), "bucket 0 of stage 0 has no parameters"),
        (SyncSpec((BUCKET, BUCKET)), "w of stage 0 is in buckets 0 and 1"),
        (SyncSpec((Bucket(0, (value("tied_0_1", 8),)),)), "bucket 0 is not tied, but weight tied_0_1"),
    ],
)
def test_the_sync_spec_fits_the_stages(sync_spec: SyncSpec, message: str) -> None:
    step = make_step(round_robin(4, [2, 1]), tied=(0, 1), updates=True)
    with pytest.raises(VerifyError, match=message):
        verify_programs(step.programs(), step.placement, step.plan.links, 4, sync_spec=sync_spec)


STAGES = (
    Stage(0, 0, 1, parameters=("w", "borrowed"), borrowed_parameters=("borrowed",)),
    Stage(1, 2, 3, parameters=("v",)),
)


@pytest.mark.parametrize(
    ("sync_spec", "first", "message"),
    [
        (SyncSpec((Bucket(0, (value("v", 2),)),)), {}, "bucket 0 has v; expected parameters"),
        (SyncSpec((Bucket(0, (value("borrowed", 2),)),)), {}, "bucket 0 has borrowed; expected"),
        (SyncSpec((Bucket(7, (value("w", 2),)),)), {}, "bucket 0 has w; expected"),
        (SyncSpec(buffer_sync_stages=(0,)), {}, r"averages buffers of stages \[0\]; .* change some: \[\]"),
        (
            SyncSpec(replicas_pass_own_rows=True),
            {"batch_counts": ("n",)},
            r"sums counts of stages \[\]; expected those that read some: \[0\]",
        ),
        (
            SyncSpec(),
            {"buffers": ("m",), "updated_buffers": ("m",)},
            r"averages buffers of stages \[\]; expected those that change some: \[0\]",
        ),
    ],
)
def test_the_sync_spec_fits_the_tensors_of_the_stages(
    sync_spec: SyncSpec, first: dict[str, Any], message: str
) -> None:
    plan = bare_plan(round_robin(4, [2, 1]), chain_links(2), sync_spec)
    plan = replace(plan, stages=(replace(STAGES[0], **first), STAGES[1]))
    with pytest.raises(VerifyError, match=message):
        verify(plan, ())
