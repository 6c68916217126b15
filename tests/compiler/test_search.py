"""The search for a way to run a step: what it tries, what it takes, and how the plan explains it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipec
from pipec.compiler.schedule_policy import default_num_microbatches, microbatch_counts_to_try
from pipec.compiler.search import best_result
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE, EvaluatedPlan
from pipec.errors import InputError
from pipec.hardware.devices import DEVICES
from pipec.ir import Alternative, HostCost, Plan
from pipec.pipeline import Pipeline
from pipec.plan.predictions import plan_memory

pytestmark = pytest.mark.slow


def heavy() -> nn.Module:
    """Wide enough that smaller microbatches pay, in the model of the device, and not endlessly."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))


def prepared(devices: int = 4, rows: int = 32, **options: Any) -> Pipeline:
    pipe = pipec.compile(heavy(), devices, loss_fn=nn.functional.mse_loss, **options)
    x = torch.empty(rows, 64, 256)
    return pipe.prepare(x, target=x)


@pytest.fixture(scope="module")
def searched() -> Pipeline:
    return prepared()


def alternative(plan: Plan, **wanted: object) -> Alternative:
    def is_wanted(each: Alternative) -> bool:
        return all(getattr(each, name) == value for name, value in wanted.items())

    return next(filter(is_wanted, plan.alternatives))


@given(batch=st.integers(1, 3000), num_ranks=st.integers(1, 64))
def test_numbers_of_microbatches_worth_a_try(batch: int, num_ranks: int) -> None:
    counts, most = microbatch_counts_to_try(batch, num_ranks), min(batch, 8 * num_ranks)
    assert counts[0] == 1
    assert counts[-1] <= most
    assert all(low < high < 4 * low for low, high in itertools.pairwise(counts))
    assert {num_ranks, 8 * num_ranks} & {*range(most + 1)} <= {*counts}
    for power in range(most.bit_length()):
        octave = range(1 << power, min(2 << power, most + 1))
        even = [count for count in octave if batch % count == 0]
        assert max(even, default=1 << power) in counts


@given(batch=st.integers(1, 3000), num_ranks=st.integers(1, 64))
def test_the_usual_number_of_microbatches(batch: int, num_ranks: int) -> None:
    count = default_num_microbatches(batch, num_ranks)
    assert 1 <= count <= min(batch, 4 * num_ranks)
    assert batch % count == 0 or all(batch % each for each in range(num_ranks, 4 * num_ranks + 1))


def test_no_other_number_of_microbatches_is_predicted_to_be_much_faster(searched: Pipeline) -> None:
    """The usual number, 16, and those around it are tried, and more of them while they are no slower."""
    taken = searched.simulate().makespan
    counts = {each.num_microbatches for each in searched.plan.alternatives}
    assert {8, 16, 32} <= counts | {searched.plan.num_microbatches}
    every = {count: prepared(microbatches=count).simulate().makespan for count in (1, 2, 4, 8, 16, 32)}
    assert taken <= (1 + PREDICTION_TOLERANCE) * min(every.values())
    for count in counts:
        other = alternative(searched.plan, num_microbatches=count, replicas=(1,) * 4)
        if other.seconds > taken:
            assert other.rejection_reason == f"{other.seconds / taken - 1:.1%} slower"
        else:
            assert count > searched.plan.num_microbatches
            assert other.seconds > taken / (1 + PREDICTION_TOLERANCE)
            assert other.rejection_reason == "about as fast, with more and smaller microbatches"


def test_an_alternative_takes_what_it_is_said_to_take(searched: Pipeline) -> None:
    pipelines = [{"num_microbatches": count, "replicas": (1,) * 4} for count in (4, 16)]
    for wanted in (*pipelines, {"replicas": (4,)}):
        said = alternative(searched.plan, **wanted)
        options = {} if wanted in pipelines else {"replicas": 4}
        pipe = prepared(microbatches=said.num_microbatches, **options)
        assert said.seconds == pytest.approx(pipe.simulate().makespan)
        assert said.peak_bytes == max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs))
        assert pipe.plan.alternatives == ()
    assert pipe.plan.placement == ((0, 1, 2, 3),)
    assert said.rejection_reason.endswith(("slower", "faster, with replicas=4"))


def test_a_search_goes_on_until_something_fits(searched: Pipeline) -> None:
    """The usual 16 microbatches do not fit, but more of fewer rows do."""
    tight = 1 + alternative(searched.plan, num_microbatches=32, replicas=(1,) * 4).peak_bytes
    pipe = prepared(memory_limit=int(tight), recompute="none")
    assert max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)) <= tight
    assert pipe.plan.num_microbatches == 32


@dataclass(frozen=True)
class Tried:
    """What the choice asks of a trial, as if each schedule had more instructions than the one before."""

    name: str
    num_instructions: int
    seconds: float
    schedule = property(lambda self: SimpleNamespace(name=self.name, placement=((0,), (1,))))
    plan = SimpleNamespace(num_microbatches=8)
    score = property(lambda self: (0.0, self.seconds))
    is_close = EvaluatedPlan.is_close
    is_asynchronous, peak_bytes = False, 1.0


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((57.6, 55.6, 54.0), "zb-h2"),
        ((56.0, 55.6, 54.0), "1f1b"),
        ((60.0, 55.6, 54.0), "zb-h1"),
        ((60.0, 59.0, 55.0), "zb-h2"),
    ],
)
def test_a_simpler_schedule_is_given_up_for_a_clear_gain_alone(seconds: Sequence[float], taken: str) -> None:
    names = ("1f1b", "zb-h1", "zb-h2")
    trials = [Tried(name, n, each) for n, (name, each) in enumerate(zip(names, seconds, strict=True))]
    for order in itertools.permutations(trials):
        best = best_result([SimpleNamespace(best=trial) for trial in order])  # type: ignore[misc]
        assert best.best.schedule.name == taken


def test_auto_tries_every_schedule_and_takes_the_simplest_where_calls_cost_more_than_bubbles() -> None:
    free, dear = (
        prepared(devices=2, schedule="auto", microbatches=8, costs=replace(DEVICES["cpu"], **cost))
        for cost in ({"host": HostCost()}, {"host": HostCost(call_seconds=1e-2)})
    )
    tried = {each.schedule for pipe in (free, dear) for each in pipe.plan.alternatives}
    assert {"gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"} <= tried
    assert not any(each.rejection_reason == "" for pipe in (free, dear) for each in pipe.plan.alternatives)
    alone = [each for each in free.plan.alternatives if {*each.replicas} == {1}]
    assert all(each.seconds > free.simulate().makespan / (1 + PREDICTION_TOLERANCE) for each in alone)
    simple = alternative(free.plan, schedule="1f1b", replicas=(1, 1))
    assert simple.seconds > 1.05 * free.simulate().makespan
    assert dear.plan.placement == ((0,), (1,))
    looped = alternative(dear.plan, schedule="interleaved-1f1b", replicas=(1, 1, 1, 1))
    assert looped.rejection_reason.endswith("slower")
    gpipe = alternative(dear.plan, schedule="gpipe", replicas=(1, 1))
    assert max(need.peak_bytes for need in plan_memory(dear.plan, dear.programs)) < gpipe.peak_bytes


def test_a_schedule_gets_a_number_of_microbatches_it_can_do_with() -> None:
    assert prepared(rows=10, schedule="interleaved-1f1b").plan.num_microbatches in (4, 8)
    with pytest.raises(InputError, match="multiple of the 4 ranks"):
        prepared(rows=3, schedule="interleaved-1f1b", microbatches=None)


def test_the_plan_prints_and_keeps_what_was_tried(searched: Pipeline, tmp_path: Path) -> None:
    printed = str(searched.plan)
    assert "instead" in printed
    assert "faster, with replicas=4" in printed
    assert "bounded by stage" in printed
    searched.save(tmp_path / "artifact")
    assert pipec.load(tmp_path / "artifact").plan.alternatives == searched.plan.alternatives
