"""Programs without end: what they are, how busy they keep ranks, and what cannot be one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bare_programs import lower, plan_of, uniform_costs
from example_schedules import tied_links, value
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import InputError, VerifyError
from pipec.ir import (
    Link,
    NonFiniteAction,
    Op,
    Payload,
    Plan,
    Program,
    Schedule,
    ShardingLevel,
    Stream,
    VersionPolicy,
)
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.text_format import format_program, parse_program
from pipec.programs import lower as lowering
from pipec.programs.lower import chain_links
from pipec.programs.lower_periodic import lower_periodic, num_microbatches_to_lower, steady_excerpt
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.verify import verify_periodic, verify_step
from pipec.schedules import Workload, make_schedule
from pipec.schedules.asynchronous import ASYNCHRONOUS_SCHEDULES, pipedream
from pipec.schedules.chain_simulation import chain_sync_spec
from pipec.timeline.simulate import simulate
from pipec.timeline.steady_state import SteadyState, steady_state


def schedule_of(name: str, replicas: Sequence[int], more: int = 0) -> Schedule:
    """As many mini-batches as are lowered, of ``more`` microbatches than the fewest."""
    how = ASYNCHRONOUS_SCHEDULES[name]
    per_batch = how.min_microbatches(replicas) + more
    count = num_microbatches_to_lower(Stream(how.versions, per_batch), replicas) // per_batch
    return how.for_batches(replicas, per_batch, count)


def updating(schedule: Schedule, links: Sequence[Link], **options: Any) -> Plan:
    """A plan that sums and updates all stages, with more options of its sync spec."""
    spec = chain_sync_spec(schedule.placement, 0.5)
    options = {"updates": True, "stream": schedule.stream, **options}
    return plan_of(schedule, links, (), replace(spec, **options))


def rounds_of(*replicas: int) -> tuple[Plan, tuple[Program, ...]]:
    schedule = schedule_of("pipedream", replicas)
    plan = updating(schedule, chain_links(len(replicas)))
    return plan, lower_periodic(schedule, plan)


def stream_links(num_stages: int) -> tuple[Link, ...]:
    """A chain of stages, of which the last one tells every rank the loss of each microbatch."""
    return (*chain_links(num_stages), Link(num_stages - 1, -1, Payload.MICROBATCH_RESULT, (value("loss"),)))


def test_a_round_reads_as_the_program_of_a_step(golden: Callable[[str, str], None]) -> None:
    _, programs = rounds_of(1, 1, 1, 1)
    golden("\n".join(map(format_program, programs)), "programs/pipedream_4.txt")
    for program in programs:
        assert parse_program(format_program(program), chain_links(4)) == program


@st.composite
def streams(draw: st.DrawFn) -> tuple[Schedule, Plan]:
    """Mini-batches of any asynchronous schedule, whose losses all ranks get, or none."""
    name = draw(st.sampled_from(sorted(ASYNCHRONOUS_SCHEDULES)))
    most = 2 if name == "pipedream" else 1
    replicas = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    schedule = schedule_of(name, replicas, draw(st.integers(0, 4)) if name == "pipedream-2bw" else 0)
    links = draw(st.sampled_from([chain_links, stream_links]))(len(replicas))
    options = {"clips": draw(st.booleans()), "on_nan": draw(st.sampled_from([None, *NonFiniteAction]))}
    return schedule, updating(schedule, links, **options)


@settings(max_examples=12, deadline=None)
@given(streams())
def test_streams_are_right_for_any_number_of_mini_batches(stream: tuple[Schedule, Plan]) -> None:
    """The verifier's own argument, of two windows, is tried on streams that are longer."""
    schedule, plan = stream
    programs = lower_periodic(schedule, plan)
    verify_periodic(plan, programs)
    num_ranks = len(programs)
    for batches in (7, 8 + 3 * num_ranks):
        count = batches * schedule.stream.microbatches
        written = [unroll(program, count) for program in programs]
        verify_step(replace(plan, num_microbatches=count), written)
        if num_ranks == schedule.num_stages:
            peaks = [min(num_ranks - rank, count) for rank in range(num_ranks)]
            assert [*map(peak_in_flight, written)] == peaks


@pytest.mark.parametrize("reader", [5, 6])
def test_a_value_that_skips_stages_is_received_in_every_round(reader: int) -> None:
    """It is received far ahead: for a while the last ranks do the same again and again without a receive."""
    skip = Link(0, reader, Payload.ACTIVATION, (value("skip"),))
    schedule = schedule_of("pipedream", [1] * 7)
    plan = updating(schedule, (*chain_links(7), skip))
    verify_periodic(plan, lower_periodic(schedule, plan))


def steady_with(name: str, replicas: tuple[int, ...], links: tuple[Link, ...]) -> SteadyState:
    """The steady state where stages with r replicas take r times as long. Any length is proved."""
    schedule = schedule_of(name, replicas)
    plan = updating(schedule, links)
    programs = lower_periodic(schedule, plan)
    if sum(replicas) < 16:  # 15-1 takes seconds
        verify_periodic(plan, programs)
    costs = Workload.uniform(len(replicas)).scaled(list(map(float, replicas))).costs(schedule, links)
    played = steady_excerpt(programs, schedule.stream, schedule.placement)
    steady = steady_state(replace(simulate(played, costs), sync_spec=plan.sync_spec))
    assert steady is not None
    return steady


@pytest.mark.parametrize("name", ASYNCHRONOUS_SCHEDULES)
def test_no_rank_is_idle_in_the_steady_state(name: str) -> None:
    links, least = chain_links(4), ASYNCHRONOUS_SCHEDULES[name].min_microbatches((1, 1, 1, 1))
    steady = steady_with(name, (1, 1, 1, 1), links)
    assert steady.batch_interval == pytest.approx(3 * least)
    assert steady.bubble_rate == pytest.approx(0)
    flushed = simulate(lower(make_schedule("1f1b", 4, 8), links), uniform_costs(4, links=links))
    assert steady_state(flushed) is None


@pytest.mark.parametrize(
    ("replicas", "interval"),
    [((2, 1), 3), ((3, 2, 1), 3), ((1, 3, 1), 10 / 3), ((2, 3), 5), ((2, 2), 4), ((15, 1), 14 / 3)],
)
def test_scripts_that_want_each_loss_make_replicas_idle(replicas: tuple[int, ...], interval: float) -> None:
    """A rank pauses until its script has the losses before. Another replica may be making one of these."""
    steady = steady_with("pipedream", replicas, chain_links(len(replicas)))
    assert (steady.batch_interval, steady.bubble_rate) == (pytest.approx(3), pytest.approx(0))
    steady = steady_with("pipedream", replicas, stream_links(len(replicas)))
    assert steady.batch_interval == pytest.approx(interval)
    assert (steady.bubble_rate > 0.01) == (interval > 3)


FLAT, UNEQUAL = pipedream.for_batches((1, 1), 1, 3), pipedream.for_batches((2, 1), 1, 3)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (FLAT, {"shard": ShardingLevel.OPTIMIZER}, "replicas share state or buffers"),
        (FLAT, {"stream": Stream(VersionPolicy.DOUBLE, 2)}, "3 microbatches are no whole number"),
        (FLAT, {"stream": Stream(VersionPolicy.STASHED, 3)}, "stashed runs a mini-batch as one microbatch"),
        (FLAT, {"stream": Stream(VersionPolicy.DOUBLE)}, "double needs a mini-batch of 2 microbatches"),
        (UNEQUAL, {"stream": Stream(VersionPolicy.VERTICAL)}, "vertical uses one version on all stages"),
        (UNEQUAL, {"stream": Stream(VersionPolicy.DOUBLE, 3)}, "double needs the same number of replicas"),
    ],
)
def test_what_has_no_rule_of_versions_is_refused(
    schedule: Schedule, options: dict[str, Any], message: str
) -> None:
    links = chain_links(2)
    with pytest.raises(VerifyError, match=message):
        verify_step(updating(schedule, links, **options), lower(schedule, links))


def test_tied_weights_of_a_stream_are_refused() -> None:
    plan = updating(FLAT, (*chain_links(2), tied_links(0, 1)[0]))
    with pytest.raises(VerifyError, match="stages share tied weights"):
        verify_step(plan, lowering.lower(FLAT, plan))


def test_rounds_that_are_no_rounds_are_refused() -> None:
    plan, (first, second) = rounds_of(1, 1)
    with pytest.raises(VerifyError, match="rank 1 does not repeat instructions for microbatches 0 to 8"):
        verify_periodic(plan, [first, replace(second, period=2)])
    far = replace(second.instructions[0], microbatch=10**8)
    with pytest.raises(VerifyError, match="rank 1 does not repeat"):
        verify_periodic(plan, [first, replace(second, instructions=(far, *second.instructions[1:]))])
    without = replace(second, instructions=tuple(x for x in second.instructions if x.op is not Op.FREE))
    with pytest.raises(VerifyError, match="free of stage 1, microbatch 0 is missing on rank 1"):
        verify_periodic(plan, [first, without])
    with pytest.raises(VerifyError, match="the program of rank 0 repeats; expected that of a single step"):
        verify_step(plan, [first, second])
    assert [microbatch_window(first), microbatch_window(second)] == [2, 2]


def test_schedules_without_a_flush_say_what_they_cannot_do() -> None:
    assert make_schedule("pipedream", 4, 12).num_microbatches == 12
    with pytest.raises(InputError, match="runs a mini-batch as one microbatch, but microbatches is 4"):
        pipedream.for_batches((1, 1), 4, 2)
    with pytest.raises(InputError, match="needs a mini-batch of 4 microbatches or more"):
        ASYNCHRONOUS_SCHEDULES["pipedream-2bw"].for_batches((1, 1, 1, 1), 3, 2)
    with pytest.raises(InputError, match="num_microbatches is 6; take a multiple of 4"):
        make_schedule("pipedream-2bw", 4, 6)
