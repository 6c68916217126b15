"""Stages that differ: schedules searched for each stage's own times and memory, and limits for each rank."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pipec.errors import InfeasibleError
from pipec.ir import Compute, Phase, Schedule, StageMemory
from pipec.programs.rank_memory import max_in_flight_of_order, microbatch_bytes
from pipec.schedules import Workload, make_schedule
from pipec.schedules.chain_simulation import simulate_schedule

UNIT = StageMemory(saved=1, weight_gradient_saved=1)


def uneven(
    *seconds: float, memory: StageMemory = UNIT, limit: float | tuple[float, ...] = math.inf
) -> Workload:
    """Stages whose phases take ``seconds`` each."""
    nothing = (0.0,) * len(seconds)
    return Workload(seconds, seconds, seconds, nothing, nothing[1:], (memory,) * len(seconds), limit)


def makespan(schedule: Schedule, work: Workload) -> float:
    return simulate_schedule(schedule, work)[0].makespan


def test_every_rank_stays_within_its_own_limit() -> None:
    """Ranks 0 and 2 hold as much as they like; rank 1 has room for two microbatches."""
    work = uneven(1, 1, 1, limit=(math.inf, 2.0, math.inf))
    tight, roomy = (
        make_schedule("zb-2p", 3, 8, each) for each in (work, replace(work, memory_limit=math.inf))
    )
    assert work.peak_memory(tight)[1] == 2
    assert work.peak_memory(roomy)[1] > 2
    assert makespan(tight, work) >= makespan(roomy, work)
    assert work.fits_memory(tight)
    assert not work.fits_memory(roomy)
    with pytest.raises(InfeasibleError, match=r"holds up to \d on a rank, but the memory limit is 2"):
        work.check_memory(roomy)


def test_weights_gradients_and_the_running_phase_count_against_the_limit() -> None:
    memory = StageMemory(
        weights=10, gradients=10, saved=2, weight_gradient_saved=1, transient=dict.fromkeys(Phase, 5.0)
    )
    schedule = make_schedule("1f1b", 2, 4)
    work = uneven(1, 1, memory=memory, limit=29)
    assert work.peak_memory(schedule) == (20 + 2 * 2 + 5, 20 + 2 + 5)
    assert work.available_memory(schedule.placement) == (4, 4)
    assert work.fits_memory(schedule)
    assert not replace(work, memory_limit=(28.0, 29.0)).fits_memory(schedule)
    assert replace(work, memory_limit=24.0).available_memory(schedule.placement) == (0, 0)
    with pytest.raises(InfeasibleError, match="limit of 1, but one microbatch holds 2"):
        make_schedule("zb-1p", 2, 4, replace(work, memory_limit=26.0))


def test_what_a_rank_holds_while_each_cell_runs() -> None:
    """The example of the docstring, with a replay and a whole backward."""
    phases = [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE]
    order = [Compute(phase, 0, 0) for phase in (*phases, Phase.BACKWARD)]
    memory = StageMemory(saved=2, weight_gradient_saved=1, transient=dict.fromkeys(Phase, 5.0))
    assert np.array_equal(microbatch_bytes(order, [memory]), [7, 9, 9, 8, 7, 7])
    assert max_in_flight_of_order(order) == 2
    assert max_in_flight_of_order(()) == 0


def test_a_stage_that_recomputes_takes_longer_backwards() -> None:
    work = replace(uneven(1, 1), recompute=(0.5, 0.0))
    assert [work.seconds(phase, 0) for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)] == [2.5, 1.5]
    assert work.seconds(Phase.BACKWARD_WEIGHT, 0) == 1
