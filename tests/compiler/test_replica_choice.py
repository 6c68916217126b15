"""Which replicas, ranks and schedules without a flush are chosen: by the costs of the model and its links."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from delayed_gradients import LOSS, SGD, assert_same, batches, delayed, model
from torch import Tensor, nn

import pipec
from pipec.compiler.candidate import Candidate
from pipec.hardware.devices import DEVICES, DeviceModel, LinkModel
from pipec.hardware.topology import Device, Level, Topology, equal_devices
from pipec.ir import HostCost, Placement, Plan
from pipec.pipeline import Pipeline
from pipec.plan.predictions import plan_memory
from pipec.schedules import ASYNCHRONOUS_SCHEDULES

ROWS, MICROBATCHES = 16, 8


class Wide(nn.Module):
    """What VGG is in large: convolutions with few weights, then many weights that take little time."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.body = nn.Sequential(*(layer for each in convolutions for layer in (each, nn.Tanh())))
        self.head = nn.Linear(8 * 16 * 16, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def device() -> DeviceModel:
    """One on which arithmetic alone takes time."""
    return DeviceModel("test", {"float32": 1e9}, 1e15, 0.0, 2**40, LinkModel(1e9, 0.0), "made up")


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 8, 16, 16), torch.randn(ROWS, 96)


def prepared(of: nn.Module, topology: Topology, **options: object) -> Pipeline:
    pipe = pipec.compile(
        of,
        len(topology.devices),
        loss_fn=nn.functional.mse_loss,
        topology=topology,
        costs=device(),
        **{"microbatches": MICROBATCHES, "replicas": "auto", **options},  # type: ignore[arg-type]
    )
    x, y = batch()
    return pipe.prepare(x, target=y)


def replica_counts(plan: Plan) -> list[int]:
    return [len(ranks) for ranks in plan.placement]


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"), [(1e12, [4]), (4e7, [3, 1])], ids=["fast links", "slow links"]
)
def test_weights_that_are_slow_to_sum_get_one_rank(bytes_per_second: float, expected: list[int]) -> None:
    pipe = prepared(Wide(), equal_devices(4, LinkModel(bytes_per_second, 0.0)))
    assert replica_counts(pipe.plan) == expected


@pytest.mark.slow
def test_what_the_planner_would_gain_is_told() -> None:
    links = equal_devices(4, LinkModel(4e7, 0.0))
    pipe = prepared(Wide(), links, microbatches=None, replicas=1)
    taken = pipe.simulate().makespan
    assert replica_counts(pipe.plan) == [1] * 4
    said = next(each for each in pipe.plan.alternatives if each.replicas == (3, 1))
    assert said.rejection_reason == f"{1 - said.seconds / taken:.1%} faster, tried by replicas='auto'"
    assert "  3-1  " in str(pipe.plan)
    auto = prepared(Wide(), links, microbatches=said.num_microbatches)
    assert auto.simulate().makespan == pytest.approx(said.seconds)
    assert [each.replicas for each in auto.plan.alternatives if len({*each.replicas}) > 1] == []


@pytest.mark.slow
def test_the_planner_is_asked_again_when_its_plan_does_not_fit() -> None:
    links = equal_devices(4, LinkModel(4e7, 0.0))
    first = prepared(Wide(), links, recompute="none")
    limit = int(max(need.peak_bytes for need in plan_memory(first.plan, first.programs))) - 1
    pipe = prepared(Wide(), links, recompute="none", memory_limit=limit)
    assert sum(replica_counts(pipe.plan)) == 4
    assert max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)) <= limit
    assert pipe.simulate().makespan >= first.simulate().makespan


def hosts() -> Topology:
    """Two hosts of two devices, with a slow network."""
    return Topology((Device(),) * 4, (Level(2, 1e9), Level(2, 2e7)))


def heavy_weights() -> nn.Module:
    sizes = (2048, 256, 1024, 96)
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*pair) for pair in pairwise(sizes)))


def heavy_activations() -> nn.Module:
    layers = (layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()))
    return nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(8, 96))


ARRANGED = {
    "heavy weights": (heavy_weights, ((0, 1), (2, 3))),
    "heavy activations": (heavy_activations, ((0, 2), (1, 3))),
}


@pytest.mark.parametrize(("make", "expected"), ARRANGED.values(), ids=ARRANGED)
def test_what_travels_most_stays_inside_a_host(
    make: Callable[[], nn.Module], expected: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = prepared(make(), hosts(), replicas=2)
    assert pipe.plan.placement == expected
    replica_arrangements = Candidate.replica_arrangements
    monkeypatch.setattr(Candidate, "replica_arrangements", lambda given: replica_arrangements(given)[:1])
    usual = prepared(make(), hosts(), replicas=2)
    monkeypatch.setattr(Candidate, "replica_arrangements", lambda given: replica_arrangements(given)[1:])
    other = prepared(make(), hosts(), replicas=2)
    assert (usual.plan.placement, other.plan.placement) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    times = usual.simulate().makespan, other.simulate().makespan
    assert times[0] != pytest.approx(times[1], rel=0.05)
    assert pipe.simulate().makespan == min(times)


def test_a_step_and_an_evaluation_are_those_of_the_model() -> None:
    """Pipelines that are V-shaped run side by side."""
    torch.manual_seed(1)
    trained, (x, y) = heavy_activations(), batch()
    alone = copy.deepcopy(trained)
    pipe = prepared(trained, hosts(), replicas=2, schedule="zb-v")
    assert pipe.plan.placement == ((0, 2), (1, 3), (1, 3), (0, 2))
    loss, expected = pipe.step(x, target=y), nn.functional.mse_loss(alone(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for fqn, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(fqn).grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(pipe.eval_step(x, target=y), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [((3e6, 3e6, 1e6, 1e6), ((2, 3), (0, 1))), ((3e6, 1e6, 3e6, 1e6), ((1, 3), (0, 2)))],
    ids=["neighbours", "side by side"],
)
def test_a_stage_goes_to_the_ranks_that_can_hold_it(memory: tuple[float, ...], expected: Placement) -> None:
    """The second of two stages has all the weights, and the first devices have all the memory."""
    topology = Topology(tuple(map(Device, memory)), (Level(4, 1e9),))
    pipe = prepared(Wide(), topology, replicas=2, recompute="none")
    assert pipe.plan.placement == expected
    needs = [need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)]
    assert all(need <= limit for need, limit in zip(needs, memory, strict=True))


# schedules without a flush: the time from one mini-batch to the next decides


def asynchronous(**options: Any) -> Pipeline:
    given = {"schedule": "auto-async", "optimizer": SGD, **options}
    return pipec.compile(model(), 3, loss_fn=LOSS, **given)


def tried(pipe: Pipeline) -> set[str]:
    return {pipe.plan.schedule, *(each.schedule for each in pipe.plan.alternatives)}


@pytest.mark.slow
def test_the_search_takes_a_schedule_without_a_flush_and_stays_with_it() -> None:
    x, y = next(batches(1))
    pipe = asynchronous().prepare(x, target=y)
    assert (pipe.plan.schedule, pipe.plan.num_microbatches) == ("pipedream", 1)
    assert tried(pipe) > {*ASYNCHRONOUS_SCHEDULES, "1f1b", "zb-h1"}
    reference = delayed(pipe, SGD)
    assert list(pipe.stream(batches(10))) == [reference.feed(batch) for batch in batches(10)]
    assert_same(pipe, reference)
    x, y = next(batches(1, rows=32))
    pipe.prepare(x, target=y)
    assert tried(pipe) == {"pipedream"}


@pytest.mark.slow
def test_a_schedule_that_flushes_is_taken_where_it_is_faster() -> None:
    """Six microbatches wait for messages under 2BW; orders that a search finds wait less."""
    how = {"microbatches": 6, "costs": replace(DEVICES["cpu"], host=HostCost())}
    pipe, plain = asynchronous(**how), asynchronous(**how, schedule="auto")
    losses = list(pipe.stream(batches(4)))
    assert pipe.plan.sync_spec.stream is None
    assert "pipedream-2bw" in tried(pipe)
    assert losses == list(plain.stream(batches(4)))
    assert tried(plain).isdisjoint(ASYNCHRONOUS_SCHEDULES)


@pytest.mark.slow
def test_double_buffering_has_as_many_microbatches_as_are_fastest() -> None:
    x, y = next(batches(1))
    plan = asynchronous(schedule="pipedream-2bw").prepare(x, target=y).plan
    assert plan.num_microbatches == 3
    assert {each.num_microbatches for each in plan.alternatives if len(each.replicas) == 3} == {4, 6, 8}


def planned(bytes_per_second: float, schedule: str) -> Plan:
    links = equal_devices(4, LinkModel(bytes_per_second, 0.0))
    return prepared(Wide(), links, microbatches=None, optimizer=SGD, schedule=schedule).plan


@pytest.mark.slow
def test_stages_get_replicas() -> None:
    """Convolutions with few weights are shared; a layer of many, whose gradients are slow to sum, is not."""
    plan = planned(4e7, "pipedream")
    assert (plan.schedule, replica_counts(plan)) == ("pipedream", [3, 1])


@pytest.mark.slow
def test_delays_are_not_taken_for_nothing() -> None:
    """With fast links data parallelism has no bubble either."""
    plan = planned(1e12, "auto-async")
    assert plan.sync_spec.stream is None
    told = [each.rejection_reason for each in plan.alternatives if each.schedule in ASYNCHRONOUS_SCHEDULES]
    assert any("about as fast" in each or "0.0% slower" in each for each in told), told
