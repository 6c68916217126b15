"""What a compilation does, and how often: nothing that was tried is worked out again."""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import nn

import pipec
from pipec.compiler import compile as compile_module
from pipec.compiler import staged_graph
from pipec.ir import Schedule
from pipec.passes.assignments.cut_stages import CutStages
from pipec.pipeline import Pipeline

ROWS = 32


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 128), nn.Linear(128, 32))))


def prepared(**options: Any) -> Pipeline:
    pipe = pipec.compile(wide(), 2, loss_fn=nn.functional.mse_loss, **options)
    x = torch.empty(ROWS, 32)
    return pipe.prepare(x, target=x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """How often graphs were cut, lowered and verified, and how often each schedule was lowered."""
    calls = Counter[object]()

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if isinstance(schedule := args[0], Schedule):
                what = schedule.name, schedule.placement, schedule.num_microbatches
                calls[*what, args[1].recomputing_stages] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(CutStages, "__call__", counting(CutStages.__call__, "cut"))
    for name in ("lower", "verify"):
        monkeypatch.setattr(staged_graph, name, counting(getattr(staged_graph, name), name))
    return calls


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({"microbatches": 4}, 1),
        ({}, 3),  # two stages, one for two pipelines side by side, and any with any replicas
        slow({"schedule": "auto", "microbatches": 4}, 2),  # straight, and the same for V and looped
    ],
    ids=["fixed", "microbatches", "schedule"],
)
def test_every_candidate_is_lowered_and_verified_once(
    options: dict[str, Any], cuts: int, calls: Counter[object]
) -> None:
    prepared(**options)
    candidates = [calls[each] for each in calls if isinstance(each, tuple)]
    assert {*candidates} == {1}
    assert len(candidates) == calls["lower"] == calls["verify"]
    assert calls["cut"] == cuts


def test_an_evaluation_follows_the_training_step_without_another_cut(calls: Counter[object]) -> None:
    pipe = pipec.compile(wide(), 2, loss_fn=nn.functional.mse_loss, microbatches=4)
    x = torch.randn(ROWS, 32)
    pipe.step(x, target=x)
    calls.clear()
    pipe.eval_step(x, target=x)
    pipe.eval_step(x, target=x)
    assert (calls["cut"], calls["lower"]) == (0, 1)


def test_another_batch_is_cut_in_the_same_place_between_parameters() -> None:
    """Also where code is for one size, so that each size has a graph of its own."""
    layers = nn.Sequential(nn.Linear(32, 32), *(nn.Tanh() for _ in range(8)), nn.Linear(32, 32))
    pipe = pipec.compile(layers, 2, loss_fn=nn.functional.mse_loss, microbatches=2)
    ends = []
    for rows in (ROWS, 2 * ROWS):
        x = torch.zeros(rows, 32)
        ends.append([stage.last_operator for stage in pipe.prepare(x, target=x).plan.stages])
        pipe.step(x, target=x)
    assert ends[0] == ends[1]
    assert 1 < ends[0][0] < 8


def test_batch_norms_that_see_a_microbatch_alone_are_warned_of_once(said: list[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 4), nn.BatchNorm1d(4), nn.Linear(4, 32))
    pipe, x = pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=2), torch.randn(ROWS, 32)
    for _ in range(2):
        pipe.step(x, target=x)
    (warning,) = said
    assert "batch norms (1 of them) take their statistics of each microbatch" in warning
    assert "GroupNorm" in warning


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("refused", [True, False])
def test_garbage_is_collected_after_a_compilation_as_before(
    collects: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, seen, compiled = gc.isenabled(), list[bool](), compile_module.compile_call
    loss_fn = nn.functional.mse_loss if not refused else lambda output, target: output
    monkeypatch.setattr(
        compile_module, "compile_call", lambda *args: (seen.append(gc.isenabled()), compiled(*args))[1]
    )
    (gc.enable if collects else gc.disable)()
    try:
        pipe, x = pipec.compile(wide(), 2, loss_fn=loss_fn), torch.randn(ROWS, 32)
        with pytest.raises(pipec.PipecError) if refused else nullcontext():
            pipe.step(x, target=x)
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if enabled else gc.disable)()
