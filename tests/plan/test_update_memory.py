"""What plans say that updates keep: optimizer state, and what sharding divides, as ranks measure it."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_memory_script import model
from slow_params import slow
from torch import nn, optim
from worker_processes import run_ranks

import pipec
from pipec.errors import InfeasibleError
from pipec.hardware.devices import DEVICES
from pipec.pipeline import Pipeline
from pipec.plan.predictions import plan_memory

P = 3 * (128 * 128 + 128) * 4
"""The bytes of the model's parameters."""


@pytest.fixture(scope="module", params=[slow(2), slow(4)])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by the level of sharding."""
    script = Path(__file__).parents[1] / "helpers" / "sharded_memory_script.py"
    return [json.loads(text) for text in run_ranks(script, request.param, tmp_path_factory.mktemp("ranks"))]


@pytest.mark.parametrize("shard", ["None", "optimizer", "gradients", "parameters"])
def test_ranks_hold_what_the_plan_says(measured: list[dict[str, dict[str, Any]]], shard: str) -> None:
    """AdamW keeps two numbers a parameter, of which a replica has its share; level 3 shares parameters too.

    A share is padded to 64 elements.
    """
    weights = P / len(measured) if shard == "parameters" else P
    state = 2 * P / (1 if shard == "None" else len(measured))
    sums = P if shard == "None" else 0  # in the memory that travels, which stays
    for rank in measured:
        found, first = rank[shard], rank[shard]["first"]
        assert first["parameters"] == pytest.approx(weights, rel=0.01)
        assert first["optimizer"] == pytest.approx(state, rel=0.01)
        assert first["gradients"] == sums
        assert found["said"] == pytest.approx(found["most"], rel=0.01)
        assert found["all"] == [each[shard]["most"] for each in measured]


def test_shares_of_state_wait_on_the_host(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        found, kept = rank["away"], rank["optimizer"]
        assert found["first"].get("optimizer", 0) == 0
        assert found["host"] == [pytest.approx(kept["first"]["optimizer"], rel=0.02)] * 2
        assert found["said"] == pytest.approx(found["most"], rel=0.01)


def test_shares_of_weights_wait_on_the_host(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        found = rank["weights"]
        assert not any(found["first"].get(kind) for kind in ("parameters", "gradients", "optimizer"))
        assert found["host"] == [pytest.approx(4 * P / len(measured), rel=0.02)] * 2
        assert found["said"] == pytest.approx(found["most"], rel=0.01)
        assert found["all"] == [each["weights"]["most"] for each in measured]


def prepared(**options: Any) -> Pipeline:
    x = torch.ones(8, 128)
    pipe = pipec.compile(model(), 1, loss_fn=nn.functional.mse_loss, microbatches=4, **options)
    return pipe.prepare(x, target=x)


def test_an_update_takes_the_time_of_the_memory_it_moves() -> None:
    """It reads and writes parameters and state, and reads gradients."""
    device = DEVICES["a100"]
    without = prepared(costs=device)
    pipe = prepared(costs=device, optimizer=functools.partial(optim.SGD, lr=0.1, momentum=0.9))
    update = (3 * P + 2 * P) / device.memory_bytes_per_second
    assert pipe.simulate().makespan - without.simulate().makespan == pytest.approx(update)


def test_state_counts_against_the_limit_of_memory() -> None:
    adam = functools.partial(optim.AdamW, lr=1e-3)
    pipe = prepared(optimizer=adam)
    need = plan_memory(pipe.plan, pipe.programs)[0].peak_bytes
    assert "with optimizer state" in str(pipe.plan)
    assert prepared(optimizer=adam, memory_limit=int(need) + 1)
    assert prepared(memory_limit=int(need) - P, recompute="none")
    with pytest.raises(InfeasibleError, match="weights, gradients and state"):
        prepared(optimizer=adam, memory_limit=int(need) - P, recompute="none")


@pytest.mark.slow
def test_an_evaluation_leaves_room_for_the_state_that_training_keeps() -> None:
    adam, x = functools.partial(optim.AdamW, lr=1e-3), torch.ones(800, 128)
    need = int(prepared(optimizer=adam).memory().peak_bytes)
    pipe = prepared(optimizer=adam, memory_limit=need)
    with pytest.raises(InfeasibleError, match="weights, gradients and state"):
        pipe.eval_step(x, target=x)
    assert prepared(optimizer=adam, memory_limit=need + 2 * P).eval_step(x, target=x) >= 0
    assert prepared(optimizer=adam, memory_limit=need, offload="optimizer").eval_step(x, target=x) >= 0
