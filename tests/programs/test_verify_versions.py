"""Programs without end: what they are, and that each rule about versions finds the program broken for it."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from bare_programs import lower, lower_periodic, verify_periodic, verify_programs
from hypothesis import given, settings
from hypothesis import strategies as st

import pipec.ir.stream as stream_module
import pipec.schedules.replicated as replicated_module
from pipec.errors import InputError, VerifyError
from pipec.ir import (
    Instruction,
    Link,
    NonFiniteAction,
    Op,
    Payload,
    Program,
    Schedule,
    ShardingLevel,
    Stream,
    SyncSpec,
    Value,
    VersionPolicy,
)
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.stream import window
from pipec.ir.text_format import format_program, parse_program
from pipec.programs.lower import chain_links
from pipec.programs.lower_periodic import num_microbatches_to_lower, steady_excerpt
from pipec.programs.rank_memory import peak_in_flight
from pipec.schedules import Workload, make_schedule
from pipec.schedules.asynchronous import ASYNCHRONOUS_SCHEDULES, pipedream
from pipec.schedules.chain_simulation import chain_sync_spec
from pipec.timeline.simulate import SimulationCosts, simulate
from pipec.timeline.steady_state import SteadyState, steady_state

Edit = Callable[[list[Instruction]], object]


def rounds_of(name: str, *replicas: int, per_batch: int = 0) -> tuple[Schedule, tuple[Program, ...]]:
    per_batch = per_batch or ASYNCHRONOUS_SCHEDULES[name].min_microbatches(replicas)
    count = (
        num_microbatches_to_lower(Stream(ASYNCHRONOUS_SCHEDULES[name].versions, per_batch), replicas)
        // per_batch
    )
    schedule = ASYNCHRONOUS_SCHEDULES[name].for_batches(replicas, per_batch, count)
    return schedule, lower_periodic(schedule, chain_links(len(replicas)), (), ending_of(schedule))


def stream_links(num_stages: int) -> tuple[Link, ...]:
    """A chain of stages, of which the last one tells every rank the loss of each microbatch."""
    loss = Value("loss", "float32", ())
    return (*chain_links(num_stages), Link(num_stages - 1, -1, Payload.MICROBATCH_RESULT, (loss,)))


def ending_of(schedule: Schedule) -> SyncSpec:
    return replace(chain_sync_spec(schedule.placement, 0.5), updates=True, stream=schedule.stream)


def fault(
    edits: Mapping[int, Edit],
    name: str = "pipedream",
    num_batches: int = 4,
    replicas: Sequence[int] = (1, 1, 1),
    **options: object,
) -> str:
    """What the verifier says of stages with so many replicas after the programs of some ranks are changed."""
    per_batch = ASYNCHRONOUS_SCHEDULES[name].min_microbatches(replicas)
    schedule = ASYNCHRONOUS_SCHEDULES[name].for_batches(replicas, per_batch, num_batches)
    links, sync_spec = stream_links(len(replicas)), replace(ending_of(schedule), **options)  # type: ignore[arg-type]
    programs = list(lower(schedule, links, sync_spec=sync_spec))
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, sync_spec=sync_spec)
    for rank, edit in edits.items():
        instructions = list(programs[rank].instructions)
        edit(instructions)
        programs[rank] = Program(rank, tuple(instructions))
    with pytest.raises(VerifyError) as caught:
        verify_programs(programs, schedule.placement, links, schedule.num_microbatches, sync_spec=sync_spec)
    return str(caught.value)


def numbers_of(instructions: list[Instruction], op: Op) -> list[int]:
    return [number for number, each in enumerate(instructions) if each.op is op]


def change(op: Op, which: int, **fields: int) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = numbers_of(instructions, op)[which]
        instructions[number] = replace(instructions[number], **fields)  # type: ignore[arg-type]

    return edit


def move(op: Op, which: int, to: Op, other: int) -> Edit:
    """Put an instruction behind another one."""

    def edit(instructions: list[Instruction]) -> None:
        moved = instructions.pop(numbers_of(instructions, op)[which])
        instructions.insert(numbers_of(instructions, to)[other] + 1, moved)

    return edit


def drop(op: Op, which: int = 0) -> Edit:
    return lambda own: own.pop(numbers_of(own, op)[which])


def repeat(op: Op, which: int = 0) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        number = numbers_of(instructions, op)[which]
        instructions.insert(number, instructions[number])

    return edit


def chain(*edits: Edit) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        for each in edits:
            each(instructions)

    return edit


def swap_versions(instructions: list[Instruction]) -> None:
    first, second, *_ = numbers_of(instructions, Op.UPDATE)
    one, other = instructions[first], instructions[second]
    instructions[first] = replace(one, version=other.version)
    instructions[second] = replace(other, version=one.version)


def test_a_round_reads_as_the_program_of_a_step(golden: Callable[[str, str], None]) -> None:
    _, programs = rounds_of("pipedream", 1, 1, 1, 1)
    golden("\n".join(map(format_program, programs)), "programs/pipedream_4.txt")
    for program in programs:
        assert parse_program(format_program(program), chain_links(4)) == program


def test_prologue_body_and_epilogue_are_the_same_round() -> None:
    """The example of ``pipec.ir.periodic_program``: F2 B0 U0, for three microbatches."""
    op = {"F": Op.FORWARD, "B": Op.BACKWARD, "U": Op.UPDATE}
    numbers = [("F", 2, 0), ("B", 0, 0), ("U", 0, 1)]
    program = Program(0, tuple(Instruction(op[x], 0, mb, version=v) for x, mb, v in numbers), 1)
    letters = {value: key for key, value in op.items()}
    written = unroll(program, 3).instructions
    assert " ".join(f"{letters[x.op]}{x.microbatch}" for x in written) == "F0 F1 F2 B0 U0 B1 U1 B2 U2"
    assert [x.version for x in written] == [0, 0, 0, 0, 1, 1, 2, 2, 3]


@settings(max_examples=12)
@given(st.sampled_from(sorted(ASYNCHRONOUS_SCHEDULES)), st.integers(1, 6), st.integers(0, 4))
def test_rounds_are_right_for_any_number_of_mini_batches(name: str, num_ranks: int, more: int) -> None:
    """The verifier's own argument, of two windows, is tried on streams that are longer."""
    replicas = (1,) * num_ranks
    per_batch = ASYNCHRONOUS_SCHEDULES[name].min_microbatches(replicas) + (
        more if name == "pipedream-2bw" else 0
    )
    schedule, programs = rounds_of(name, *replicas, per_batch=per_batch)
    links, sync_spec = chain_links(num_ranks), ending_of(schedule)
    verify_periodic(programs, schedule.placement, links, (), sync_spec)
    for count in (7, 8 + 3 * num_ranks):
        written = [unroll(program, count * per_batch) for program in programs]
        verify_programs(written, schedule.placement, links, count * per_batch, sync_spec=sync_spec)
        assert [peak_in_flight(x) for x in written] == [
            min(num_ranks - rank, count * per_batch) for rank in range(num_ranks)
        ]


@pytest.mark.parametrize("reader", [5, 6])
def test_a_value_that_skips_stages_is_received_in_every_round(reader: int) -> None:
    """It is received far ahead: for a while the last ranks do the same again and again without a receive."""
    skip = Link(0, reader, Payload.ACTIVATION, (Value("skip", "float32", ()),))
    schedule, _ = rounds_of("pipedream", *[1] * 7)
    links, sync_spec = (*chain_links(7), skip), ending_of(schedule)
    verify_periodic(lower_periodic(schedule, links, (), sync_spec), schedule.placement, links, (), sync_spec)


@pytest.mark.parametrize("name", ASYNCHRONOUS_SCHEDULES)
def test_no_rank_is_idle_in_the_steady_state(name: str) -> None:
    schedule, programs = rounds_of(name, 1, 1, 1, 1)
    costs = SimulationCosts.uniform(4, links=chain_links(4), unit="units")
    played = steady_excerpt(programs, schedule.stream, schedule.placement)
    steady = steady_state(replace(simulate(played, costs), sync_spec=ending_of(schedule)))
    assert steady is not None
    assert steady.batch_interval == pytest.approx(
        3 * ASYNCHRONOUS_SCHEDULES[name].min_microbatches((1, 1, 1, 1))
    )
    assert steady.bubble_rate == pytest.approx(0)
    assert steady_state(simulate(lower(make_schedule("1f1b", 4, 8), chain_links(4)), costs)) is None


REPLICAS = [(2, 1), (3, 2, 1), (1, 3, 1), (2, 3), (2, 2), (15, 1)]


def steady_with(replicas: tuple[int, ...], links: tuple[Link, ...]) -> SteadyState:
    """The steady state where stages with r replicas take r times as long. Any length is proved."""
    schedule = rounds_of("pipedream", *replicas)[0]
    sync_spec = ending_of(schedule)
    programs = lower_periodic(schedule, links, (), sync_spec)
    if sum(replicas) < 16:  # 15-1 takes seconds
        verify_periodic(programs, schedule.placement, links, (), sync_spec)
    costs = Workload.uniform(len(replicas)).scaled(list(map(float, replicas))).costs(schedule, links)
    played = steady_excerpt(programs, schedule.stream, schedule.placement)
    steady = steady_state(replace(simulate(played, costs), sync_spec=sync_spec))
    assert steady is not None
    return steady


@pytest.mark.parametrize("replicas", REPLICAS)
def test_no_replica_is_idle_in_the_steady_state(replicas: tuple[int, ...]) -> None:
    steady = steady_with(replicas, chain_links(len(replicas)))
    assert steady.batch_interval == pytest.approx(3)
    assert steady.bubble_rate == pytest.approx(0)


@pytest.mark.parametrize(
    ("replicas", "interval"), [*zip(REPLICAS, [3, 3, 10 / 3, 5, 4, 14 / 3], strict=True)]
)
def test_scripts_that_want_each_loss_make_replicas_idle(replicas: tuple[int, ...], interval: float) -> None:
    """A rank pauses until its script has the losses before. Another replica may be making one of these."""
    steady = steady_with(replicas, stream_links(len(replicas)))
    assert steady.batch_interval == pytest.approx(interval)
    assert (steady.bubble_rate > 0.01) == (interval > 3)


@pytest.mark.parametrize("replicas", [(2, 1), (3, 2, 1), (1, 3, 1), (4, 2), (3, 1, 2)])
def test_smaller_windows_make_ranks_idle(replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage can have fewer mini-batches in flight, with the version rule that follows from that."""
    right = [window(stage, replicas) for stage in range(len(replicas))]
    for stage in range(len(replicas) - 1):
        fewer = [each - (number == stage) for number, each in enumerate(right)]
        for module in (stream_module, replicated_module):
            monkeypatch.setattr(module, "window", lambda stage, _, fewer=fewer: fewer[stage])
        schedule = pipedream.for_batches(replicas, 1, 40 * sum(replicas))
        links, sync_spec = chain_links(len(replicas)), ending_of(schedule)
        costs = Workload.uniform(len(replicas)).scaled(list(map(float, replicas))).costs(schedule, links)
        programs = lower(schedule, links, sync_spec=sync_spec)
        steady = steady_state(replace(simulate(programs, costs), sync_spec=sync_spec))
        assert steady is not None
        assert steady.bubble_rate > 0.01, fewer


def test_the_window_of_replicas() -> None:
    windows = {(1, 1, 1): [3, 2, 1], (2, 1): [2, 1], (2, 2): [2, 1], (15, 1): [2, 1], (3, 2, 1): [4, 2, 1]}
    for replicas, expected in windows.items():
        assert [window(stage, replicas) for stage in range(len(replicas))] == expected
    versions = Stream(VersionPolicy.STASHED)
    assert [versions.version(each, 0, (3, 2, 1)) for each in range(8, 17)] == [0] * 4 + [1] * 3 + [2] * 2
    assert [versions.version(each, 1, (3, 2, 1)) for each in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [versions.version(each, 2, (3, 2, 1)) for each in range(4)] == [0, 1, 2, 3]


def test_replicas_that_differ_in_their_updates_are_found() -> None:
    replicated = functools.partial(fault, num_batches=9, replicas=(2, 1))
    skipped = replicated({1: lambda own: own.pop(numbers_of(own, Op.UPDATE)[2])})
    assert "update of stage 0, round 2, bucket 0 is missing on rank 1; expected once" in skipped
    assert "update names version 2; expected 1" in replicated({1: swap_versions})
    other = replicated({1: change(Op.FORWARD, 3, version=1)})
    assert "forward names version 1; expected 2" in other
    read = replicated({1: change(Op.BACKWARD, 3, version=3)})
    assert "backward names version 3; expected 2" in read
    late = replicated({1: change(Op.UPDATE, 1, microbatch=4)})
    assert "update names version 2; expected 3" in late


def test_sums_that_are_missing_or_in_another_round_are_found() -> None:
    replicated = functools.partial(fault, num_batches=9, replicas=(2, 1))

    without = chain(drop(Op.REDUCE_GRAD, 1), drop(Op.WAIT_REDUCE_GRAD, 1))
    missing = "has no reduce_grad or update before it; expected of round"
    assert f"backward of stage 0, microbatch 5 {missing}" in replicated({1: without})
    assert f"backward of stage 0, microbatch 4 {missing}" in replicated({0: without, 1: without})
    other = chain(change(Op.REDUCE_GRAD, 1, microbatch=4), change(Op.WAIT_REDUCE_GRAD, 1, microbatch=4))
    too_early = (
        "reduce_grad of stage 0, microbatch 4, bucket 0 runs before update of stage 0, microbatch 2 at"
    )
    assert too_early in replicated({1: other})
    assert too_early in replicated({0: other, 1: other})
    early = replicated({1: move(Op.REDUCE_GRAD, 0, Op.FORWARD, 0)})
    assert (
        "backward of stage 0, microbatch 1 comes after reduce_grad of stage 0, microbatch 0, bucket 0"
        in early
    )
    late = replicated({0: move(Op.WAIT_REDUCE_GRAD, 0, Op.UPDATE, 0)})
    assert (
        "stash of stage 0, microbatch 0 runs before wait_reduce_grad of stage 0, microbatch 0, bucket 0 at"
        in late
    )
    next_one = replicated({0: move(Op.UPDATE, 3, Op.REDUCE_GRAD, 4)})
    assert (
        "reduce_grad of stage 0, microbatch 8, bucket 0 runs before update of stage 0, microbatch 6 at"
        in next_one
    )
    unawaited = replicated({0: drop(Op.WAIT_REDUCE_GRAD)})
    assert "stash of stage 0, microbatch 0 has no wait_reduce_grad before it" in unawaited
    assert "reduce_grad names bucket 3; expected [0]" in replicated({0: change(Op.REDUCE_GRAD, 1, bucket=3)})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Op.PAUSE), "wait_recv of loss (1 -> all), microbatch 0 has no pause before it"),
        (drop(Op.PAUSE, -1), "update of stage 0, microbatch 8 has no pause before it"),
        (repeat(Op.PAUSE, 1), "pause of microbatch 1 is there again; the first is at 5"),
        (
            chain(change(Op.PAUSE, 2, microbatch=3), change(Op.PAUSE, 3, microbatch=2)),
            "wait_recv of loss (1 -> all), microbatch 2 comes after pause of microbatch 3 at 11",
        ),
        (
            move(Op.PAUSE, 1, Op.PAUSE, 0),
            "wait_recv of loss (1 -> all), microbatch 0 comes after pause of microbatch 1 at 3",
        ),
        (
            move(Op.PAUSE, -1, Op.UPDATE, -1),
            "update of stage 0, microbatch 8 runs before pause of microbatch 8 at 71",
        ),
        (
            chain(drop(Op.PAUSE, 8), move(Op.PAUSE, 7, Op.UPDATE, 3)),
            "wait_recv of loss (1 -> all), microbatch 7 runs before pause of microbatch 7 at 67",
        ),
        (change(Op.PAUSE, 0, stage=0), "pause names stage 0; expected none"),
        (change(Op.PAUSE, 0, microbatch=9), "pause names microbatch 9; expected 0 to 8"),
    ],
)
def test_pauses_that_are_missing_or_out_of_order_are_found(edit: Edit, message: str) -> None:
    found = fault({1: edit}, num_batches=9, replicas=(2, 1))
    assert found.startswith("rank 1, instruction ")
    assert message in found


def test_a_script_that_would_wait_for_ever_is_found() -> None:
    """The loss of a mini-batch arrives only behind an update that the script says how to make."""

    def have_late(own: list[Instruction]) -> None:
        moved = own.pop(next(k for k, x in enumerate(own) if x.op is Op.WAIT_RECV and is_loss(x)))
        own.insert(numbers_of(own, Op.UPDATE)[0] + 1, moved)

    found = fault({1: have_late}, num_batches=9, replicas=(2, 1))
    assert "wait_recv of loss (1 -> all), microbatch 0 comes after pause of microbatch 1 at 4" in found


def is_loss(instruction: Instruction) -> bool:
    return instruction.link is not None and instruction.link.payload is Payload.MICROBATCH_RESULT


def test_a_version_that_another_one_should_be_is_found() -> None:
    found = fault({1: change(Op.FORWARD, 3, version=1)})
    assert "forward names version 1; expected 2" in found
    found = fault({0: change(Op.BACKWARD, 3, version=2)})
    assert "backward names version 2; expected 1" in found
    assert "send of hidden_1 (0 -> 1) names version 3; expected none" in fault(
        {0: change(Op.SEND, 0, version=3)}
    )


def test_updates_that_are_out_of_order_or_missing_are_found() -> None:
    assert "update names version 2; expected 1" in fault({2: swap_versions})
    missing = fault({2: lambda own: own.pop(numbers_of(own, Op.UPDATE)[1])})
    assert "update of stage 2, round 1 is missing on rank 2; expected once" in missing
    early = fault({2: move(Op.UPDATE, 1, Op.UPDATE, 0)})
    assert "backward of stage 2, microbatch 1 comes after update of stage 2, microbatch 1 at 12" in early


def test_an_update_that_comes_too_late_or_too_early_is_found() -> None:
    late = fault({2: move(Op.UPDATE, 0, Op.FORWARD, 1)})
    assert "forward of stage 2, microbatch 1 runs before update of stage 2, microbatch 0 at 14" in late
    schedule = pipedream.for_batches((1, 1, 1), 1, 4)
    sync_spec = replace(ending_of(schedule), stream=Stream(VersionPolicy.STASHED))
    gpipe_like = make_schedule("gpipe", 3, 4)
    programs = lower(replace(gpipe_like, stream=schedule.stream), chain_links(3), sync_spec=sync_spec)
    with pytest.raises(VerifyError, match="runs before update of stage"):
        verify_programs(programs, schedule.placement, chain_links(3), 4, sync_spec=sync_spec)


def test_weights_that_are_not_stashed_before_their_update_are_found() -> None:
    """Stage 1 of 3 stashes versions 1 and 2, which later backwards read."""
    assert "backward of stage 1, microbatch 1 has no stash before it" in fault({1: drop(Op.STASH)})
    stash = "stash of stage 1, microbatch"
    late = fault({1: move(Op.STASH, 0, Op.UPDATE, 0)})
    assert f"{stash} 0 comes after update of stage 1, microbatch 0 at 21" in late
    early = fault({1: move(Op.STASH, 1, Op.FORWARD, 0)})
    assert f"{stash} 1 runs before update of stage 1, microbatch 0 at 23" in early
    before_gradients = move(Op.STASH, 1, Op.BACKWARD, 1)
    assert f"accumulate of stage 1, microbatch 1 comes after {stash} 1 at" in fault({1: before_gradients})
    of_replicas = functools.partial(fault, num_batches=9, replicas=(2, 1))
    before_the_sum = move(Op.STASH, 1, Op.REDUCE_GRAD, 1)
    unsummed = "stash of stage 0, microbatch 2 runs before wait_reduce_grad of stage 0, microbatch 2"
    assert unsummed in of_replicas({0: before_the_sum})
    checked = functools.partial(fault, on_nan=NonFiniteAction.SKIP)
    before_the_check = move(Op.STASH, 1, Op.ACCUMULATE, 1)
    assert f"{stash} 1 runs before check of stage 1, microbatch 1 at" in checked({1: before_the_check})
    for version in (2, 9):
        other = fault({1: change(Op.STASH, 0, version=version)})
        assert f"stash names version {version}; expected 0" in other
    assert f"{stash} 0 is there again; the first is at 21" in fault({1: repeat(Op.STASH)})


@pytest.mark.parametrize("op", [Op.CHECK, Op.STAGE_NORM])
def test_updates_whose_gradients_are_not_checked_or_measured_are_found(op: Op) -> None:
    refused = functools.partial(fault, on_nan=NonFiniteAction.SKIP, clips=True)
    named = f"{op} of stage 1, microbatch 1"
    assert f"has no {op} before it; expected of round" in refused({1: drop(op, 1)})
    assert f"{named} is there again; the first is at" in refused({1: repeat(op, 1)})
    for edit in (move(op, 1, Op.UPDATE, 1), move(op, 1, Op.UPDATE, 0), move(op, 1, Op.SEND, 0)):
        found = refused({1: edit}).split("\n")[0]
        assert named in found
        assert "runs before" in found or "comes after" in found
    summed = functools.partial(refused, replicas=(2, 1), num_batches=9)
    before_the_sum = summed({0: move(op, 1, Op.ACCUMULATE, 1)})
    assert f"{op} of stage 0, microbatch 2" in before_the_sum.split("\n")[0]


def test_a_check_before_the_losses_that_it_looks_at_is_found() -> None:
    """On a rank that receives losses: the last one of the update's round comes behind the check."""

    def check_early(own: list[Instruction]) -> None:
        losses = [k for k, x in enumerate(own) if x.op is Op.WAIT_RECV and is_loss(x)]
        update = numbers_of(own, Op.UPDATE)[-1]
        own.insert(update, own.pop(max(k for k in losses if k < update)))

    found = fault({0: check_early}, on_nan=NonFiniteAction.SKIP)
    assert (
        "wait_recv of loss (2 -> all), microbatch 3 comes after check of stage 0, microbatch 3 at 47" in found
    )


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_no_instruction_of_a_stream_can_be_left_out_or_doubled(replicas: tuple[int, ...]) -> None:
    schedule = pipedream.for_batches(replicas, 1, 4)
    links = stream_links(len(replicas))
    sync_spec = replace(ending_of(schedule), clips=True, on_nan=NonFiniteAction.SKIP)
    programs = lower(schedule, links, sync_spec=sync_spec)
    assert {Op.PAUSE, Op.CHECK, Op.STAGE_NORM, Op.STASH} <= {x.op for x in programs[0].instructions}
    for rank, program in enumerate(programs):
        own = program.instructions
        for number, each in enumerate(own):
            for copies in ((), (each, each)):
                edited = Program(rank, (*own[:number], *copies, *own[number + 1 :]))
                others = [*programs[:rank], edited, *programs[rank + 1 :]]
                with pytest.raises(VerifyError):
                    verify_programs(others, schedule.placement, links, 4, sync_spec=sync_spec)


def test_an_update_before_the_gradients_that_it_uses_is_found() -> None:

    def hold_back(instructions: list[Instruction]) -> None:
        first = numbers_of(instructions, Op.FORWARD)[0]
        assert instructions[first].version == 0
        for number in numbers_of(instructions, Op.UPDATE)[:1]:
            instructions.insert(first, instructions.pop(number))

    assert "backward of stage 0, microbatch 0 comes after update of stage 0, microbatch 0 at 0" in fault(
        {0: hold_back}
    )


@given(st.data(), st.sampled_from(VersionPolicy), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_stage_holds_no_more_versions_than_it_may(
    data: st.DataObject, policy: VersionPolicy, replicas: list[int]
) -> None:
    """When gradients are made: from the version that they are of to the latest that can be made before."""
    if policy is not VersionPolicy.STASHED:
        replicas = [1 if policy is VersionPolicy.VERTICAL else replicas[0]] * len(replicas)
    fewest = len(replicas) * replicas[0] if policy is VersionPolicy.DOUBLE else 1
    stream = Stream(policy, fewest * data.draw(st.integers(1, 3)) if fewest > 1 else 1)
    stage, microbatch = data.draw(st.integers(0, len(replicas) - 1)), data.draw(st.integers(0, 200))
    made = microbatch // stream.microbatches_per_update(stage, replicas)
    live = made - stream.version(microbatch, stage, replicas) + 1
    assert live <= stream.max_live_versions(stage, replicas)


def test_the_first_of_four_stages_holds_four_versions() -> None:
    stream = Stream(VersionPolicy.STASHED)
    assert [stream.max_live_versions(stage, (1, 1, 1, 1)) for stage in range(4)] == [4, 3, 2, 1]


def test_fields_of_updates_are_checked() -> None:
    assert "update names stage 0; expected a stage of this rank: [1]" in fault(
        {1: change(Op.UPDATE, 1, stage=0)}
    )
    assert "update names peer 0; expected none" in fault({1: change(Op.UPDATE, 1, peer=0)})
    replicated = fault({1: change(Op.REDUCE_GRAD, 1, microbatch=3)}, num_batches=9, replicas=(2, 1))
    assert "reduce_grad names microbatch 3; expected the first of a round" in replicated


def test_what_has_no_rule_of_versions_is_refused() -> None:
    schedule, programs = rounds_of("pipedream", 1, 1)
    sync_spec, links = ending_of(schedule), chain_links(2)
    with pytest.raises(VerifyError, match="replicas share state or buffers"):
        verify_periodic(
            programs, schedule.placement, links, (), replace(sync_spec, shard=ShardingLevel.OPTIMIZER)
        )
    flat = pipedream.for_batches((1, 1), 1, 3)
    sharing = (*links, Link(0, 1, Payload.WEIGHT, (Value("w", "float32", (2,)),)))
    with pytest.raises(VerifyError, match="stages share tied weights"):
        verify_programs(
            lower(flat, sharing, sync_spec=sync_spec), flat.placement, sharing, 3, sync_spec=sync_spec
        )
    refused = {
        "3 microbatches are no whole number of mini-batches of 2": (flat, Stream(VersionPolicy.DOUBLE, 2)),
        "a mini-batch has 3 microbatches; versions that are stashed need 1": (
            flat,
            Stream(VersionPolicy.STASHED, 3),
        ),
        "a mini-batch has 1 microbatches; two versions need 2": (flat, Stream(VersionPolicy.DOUBLE, 1)),
        "a stage has 2 replicas; vertical sync": (
            pipedream.for_batches((2, 1), 1, 3),
            Stream(VersionPolicy.VERTICAL),
        ),
        "two versions need as many microbatches for each replica": (
            pipedream.for_batches((2, 1), 1, 3),
            Stream(VersionPolicy.DOUBLE, 3),
        ),
    }
    for told, (made, stream) in refused.items():
        other = replace(ending_of(made), stream=stream)
        with pytest.raises(VerifyError, match=re.escape(told)):
            verify_programs(lower(made, links), made.placement, links, 3, sync_spec=other)


def test_rounds_that_are_no_rounds_are_refused() -> None:
    schedule, (first, second) = rounds_of("pipedream", 1, 1)
    verify = functools.partial(
        verify_periodic,
        placement=schedule.placement,
        links=chain_links(2),
        recompute=(),
        sync_spec=ending_of(schedule),
    )
    with pytest.raises(VerifyError, match="rank 1 does not repeat instructions for microbatches 0 to 8"):
        verify([first, replace(second, period=2)])
    far = replace(second.instructions[0], microbatch=10**8)
    with pytest.raises(VerifyError, match="rank 1 does not repeat"):
        verify([first, replace(second, instructions=(far, *second.instructions[1:]))])
    without = replace(second, instructions=tuple(x for x in second.instructions if x.op is not Op.FREE))
    with pytest.raises(VerifyError, match="free of stage 1, microbatch 0 is missing on rank 1"):
        verify([first, without])
    with pytest.raises(VerifyError, match="the program of rank 0 repeats; expected that of a single step"):
        verify_programs([first, second], schedule.placement, chain_links(2), 1)
    assert [microbatch_window(first), microbatch_window(second)] == [2, 2]


def test_schedules_without_a_flush_say_what_they_cannot_do() -> None:
    assert make_schedule("pipedream", 4, 12).num_microbatches == 12
    with pytest.raises(InputError, match="runs a mini-batch as one microbatch, but microbatches is 4"):
        pipedream.for_batches((1, 1), 4, 2)
    with pytest.raises(InputError, match="needs a mini-batch of 4 microbatches or more on 4 ranks"):
        ASYNCHRONOUS_SCHEDULES["pipedream-2bw"].for_batches((1, 1, 1, 1), 3, 2)
    with pytest.raises(InputError, match="num_microbatches is 6; take a multiple of 4"):
        make_schedule("pipedream-2bw", 4, 6)
