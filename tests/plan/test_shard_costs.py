"""What each level of sharding would take: the plan's table of it, and ``shard="auto"``."""

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import nn, optim

import pipec
from pipec.errors import InfeasibleError, InputError
from pipec.hardware.devices import DeviceModel
from pipec.hardware.topology import LinkModel, equal_devices
from pipec.ir import Op, ShardingLevel
from pipec.pipeline import Pipeline
from pipec.plan.predictions import plan_memory

ADAM = functools.partial(optim.AdamW, lr=1e-2)


def wide() -> nn.Module:
    """Many weights for what is computed with them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def compiled(model: nn.Module | None = None, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"microbatches": 4, "replicas": 2, "optimizer": ADAM, "recompute": "none"}
    loss = nn.functional.mse_loss
    return pipec.compile(model or wide(), loss_fn=loss, **{"devices": 4, **given, **options})


def prepared(**options: Any) -> Pipeline:
    return compiled(**options).prepare(torch.ones(8, 64), target=torch.ones(8, 64))


def peak(pipe: Pipeline) -> float:
    return max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs))


@pytest.mark.parametrize("shard", [None, *ShardingLevel])
def test_the_table_says_what_each_level_takes(shard: ShardingLevel | None) -> None:
    pipe = prepared(shard=shard)
    costs = pipe.plan.sharding_costs
    assert [each.shard for each in costs] == [None, *ShardingLevel]
    own = next(each for each in costs if each.shard is shard)
    assert (own.peak_bytes, own.seconds) == (peak(pipe), pipe.simulate().makespan)
    assert costs == prepared().plan.sharding_costs
    assert f"{shard or 'nothing'} (taken)" in str(pipe.plan)


def test_levels_spend_what_they_are_known_to_spend() -> None:
    """An all-reduce is two gatherings; each level sums and gathers once, as whole sums take no more here."""
    none, *others = (each.collective_seconds for each in prepared().plan.sharding_costs)
    assert [each / (none / 2) for each in others] == pytest.approx([1 + 1, 1 + 1, 1 + 1])
    assert prepared(replicas=1).plan.sharding_costs == ()
    assert prepared(optimizer=None).plan.sharding_costs == ()


def test_auto_takes_the_fastest_level_that_fits() -> None:
    costs = prepared().plan.sharding_costs
    fastest = min(costs, key=lambda each: each.seconds)
    assert prepared(shard="auto").plan.sync_spec.shard is fastest.shard
    smallest = min(costs, key=lambda each: each.peak_bytes)
    assert smallest.peak_bytes < costs[0].peak_bytes
    pipe = prepared(shard="auto", memory_limit=int(smallest.peak_bytes))
    assert pipe.plan.sync_spec.shard is smallest.shard
    assert peak(pipe) <= smallest.peak_bytes


def test_auto_may_evaluate_first_and_trains_as_the_model() -> None:
    model = wide()
    alone = copy.deepcopy(model)
    limit = int(min(each.peak_bytes for each in prepared().plan.sharding_costs))
    pipe, plain = compiled(model, shard="auto", memory_limit=limit), ADAM(alone.parameters())
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    for _ in range(3):
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        torch.testing.assert_close(pipe.eval_step(x, target=y), loss.detach())
        torch.testing.assert_close(pipe.step(x, target=y), loss.detach())
        plain.step()
        plain.zero_grad()
    assert pipe.plan.sync_spec.shard is not None
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=1e-3, atol=1e-4)


def num_sums(pipe: Pipeline) -> set[int]:
    """How often the ranks sum each bucket in a step."""
    sums = (
        (program.rank, each.bucket)
        for program in pipe.programs
        for each in program.instructions
        if each.op is Op.REDUCE_GRAD
    )
    return {*Counter(sums).values()}


@pytest.mark.parametrize("shard", [slow("gradients"), "parameters"])
def test_gradients_are_summed_once_a_step_where_whole_sums_fit(shard: str) -> None:
    """Without a limit, what takes less memory is done: to reduce after each of four rounds."""

    def planned(**options: Any) -> Pipeline:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        given = {"stages": 8, "replicas": 4, "microbatches": 16, "schedule": "interleaved-1f1b-v4"}
        pipe = compiled(model, devices=8, **given, shard=shard, **options)
        return pipe.prepare(torch.ones(16, 64), target=torch.ones(16, 64))

    free, fast = planned(), planned(memory_limit=10**9)
    assert (num_sums(free), num_sums(fast)) == ({4}, {1})
    assert peak(free) < peak(fast)
    tight = planned(memory_limit=int(peak(fast)) - 1)
    assert (num_sums(tight), peak(tight)) == ({4}, peak(free))
    assert "sums of gradients are reduced after each round" in str(tight.plan)
    assert "sums of gradients are reduced once a step: whole sums fit into memory" in str(fast.plan)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_sums_of_a_whole_step_have_the_bits_of_sharding_the_optimizer_alone(shard: str) -> None:
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    limited, plain = compiled(shard=shard, memory_limit=10**9), compiled(shard="optimizer")
    for _ in range(3):
        assert torch.equal(limited.step(x, target=y), plain.step(x, target=y))
    assert num_sums(limited) == {1}
    expected = plain.full_state_dict()
    for name, found in limited.full_state_dict().items():
        assert torch.equal(found, expected[name])


def in_layers(latency: float = 0.0, **options: Any) -> Pipeline:
    """Eight slow layers on two replicas, with a fast link of this latency."""
    torch.manual_seed(0)
    link = LinkModel(1e15, latency)
    given = {"devices": 2, "microbatches": 2, "shard": "parameters", **options}
    given["topology"] = equal_devices(given["devices"], link)
    given["costs"] = DeviceModel("test", {"float32": 1e6}, 1e15, 1e-6, 2**40, link, "made up")
    return compiled(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), **given)


@pytest.mark.parametrize("schedule", ["1f1b", slow("auto")])
def test_a_rank_gathers_a_layer_at_a_time_where_that_takes_no_longer(schedule: str) -> None:
    """Its only stage is divided, unless the script says how many there are, or to gather takes long."""
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    layered, whole = in_layers(schedule=schedule), in_layers(stages=1, replicas=1)
    for _ in range(3):
        assert torch.equal(layered.step(x, target=y), whole.step(x, target=y))
    assert torch.equal(layered.eval_step(x, target=y), whole.eval_step(x, target=y))
    expected = whole.full_state_dict()
    for name, found in layered.full_state_dict().items():
        assert torch.equal(found, expected[name])
    assert (len(layered.plan.stages), len(whole.plan.stages)) == (8, 1)
    assert "8 stages on 2 ranks, looped-bfs-v8" in str(layered.plan)
    assert peak(layered) < 0.6 * peak(whole)
    slow = in_layers(latency=1.0, schedule=schedule).prepare(x, target=y)
    assert len(slow.plan.stages) == 1
    limit = int(0.9 * peak(slow))
    tight = in_layers(latency=1.0, schedule=schedule, memory_limit=limit).prepare(x, target=y)
    assert len(tight.plan.stages) == 8


@pytest.mark.slow
def test_pipelines_of_several_ranks_gather_layers_where_nothing_else_fits() -> None:
    """``auto`` takes such a schedule; the error of another one suggests it."""
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    limit = int(0.85 * peak(in_layers(devices=4, schedule="looped-bfs").prepare(x, target=y)))
    found = in_layers(devices=4, schedule="auto", memory_limit=limit)
    loss = found.step(x, target=y)
    assert "8 stages on 4 ranks, looped-bfs-v4" in str(found.plan)
    assert peak(found) <= limit
    with pytest.raises(InfeasibleError, match="schedule='looped-bfs-v4', which gathers a quarter"):
        in_layers(devices=4, memory_limit=limit).prepare(x, target=y)
    asked = in_layers(devices=4, memory_limit=limit, schedule="looped-bfs-v4")
    assert torch.equal(asked.step(x, target=y), loss)
    assert torch.equal(in_layers(devices=4).step(x, target=y), loss)


@pytest.mark.slow
def test_evaluating_first_gathers_layers_too() -> None:
    pipe, x = in_layers(), torch.randn(8, 64)
    pipe.eval_step(x, target=x)
    loss = pipe.step(x, target=x)
    assert torch.equal(loss, in_layers(stages=1, replicas=1).step(x, target=x))


def test_auto_without_an_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="shard='auto' concerns the updates that a program makes"):
        compiled(optimizer=None, shard="auto")
    with pytest.raises(InputError, match="'parameters', 'auto'"):
        compiled(shard="everything")
