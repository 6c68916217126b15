"""Memory limits: what ``recompute="auto"`` does about them, and what is said when nothing helps."""

import functools
import re
from typing import Any

import pytest
import torch
from forward_modules import model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.errors import InfeasibleError
from pipec.pipeline import Pipeline
from pipec.plan.predictions import plan_memory
from pipec.timeline.curves import rank_memory_over_time


def wide_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(4)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 8, generator=generator), torch.randn(256, 8, generator=generator)


def prepared(memory_limit: int | str | None = None, **options: Any) -> Pipeline:
    given = {"model": wide_mlp(), "devices": 2, "microbatches": 4, "loss_fn": nn.functional.mse_loss}
    x, y = batch()
    return pipec.compile(**{**given, **options}, memory_limit=memory_limit).prepare(x, target=y)


def peaks(pipe: Pipeline) -> list[int]:
    return [need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)]


@pytest.mark.slow
def test_auto_recomputes_only_on_ranks_that_would_not_fit() -> None:
    unlimited = prepared()
    assert not any(stage.has_recompute for stage in unlimited.plan.stages)
    free = peaks(unlimited)
    assert free[0] > free[1]  # the first rank has more microbatches in flight
    pipe = prepared((free[0] + free[1]) // 2)
    assert [stage.has_recompute for stage in pipe.plan.stages] == [True, False]
    assert max(peaks(pipe)) <= (free[0] + free[1]) // 2
    assert "*" in str(pipe.plan)


@pytest.mark.slow
def test_a_limit_that_is_too_small_names_what_the_nearest_plan_needs() -> None:
    with pytest.raises(InfeasibleError, match="nothing that was tried fits") as caught:
        prepared("1kB")
    message = str(caught.value)
    assert "rank 0, stage 0:" in message
    assert "rank 1, stage 1:" in message
    assert "of 1 kB, " in message
    assert "too many" in message
    assert "Use more devices" in message
    limit = needed(message)
    pipe = prepared(limit)
    assert max(peaks(pipe)) <= limit
    assert any(stage.has_recompute for stage in pipe.plan.stages)


def needed(message: str) -> int:
    found = re.search(r"This plan.* needs memory_limit=(\d+) ", message)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_a_later_call_that_does_not_fit_names_what_it_needs() -> None:
    """Stages stay where the first call has put them, whether microbatches grow or an evaluation comes."""
    x, target = (torch.cat([each] * 4) for each in batch())
    pipe = prepared(max(peaks(prepared())))
    before = peaks(pipe)
    with pytest.raises(InfeasibleError, match="on the stages that the first call has fixed") as caught:
        pipe.prepare(x, target=target)
    assert peaks(pipe) == before
    limit = needed(str(caught.value))
    again = prepared(limit).prepare(x, target=target)
    assert max(peaks(again)) <= limit
    with pytest.raises(InfeasibleError, match="on the stages that the first call has fixed") as caught:
        pipe.eval_step(torch.cat([x] * 64), target=torch.cat([target] * 64))
    assert needed(str(caught.value)) > limit


@pytest.mark.slow
def test_other_cuts_are_tried_for_a_smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that the fastest cut does not meet, and for whose error a plan is found."""
    limit = int(0.99 * max(peaks(prepared(devices=3, recompute="none"))))
    assert max(peaks(prepared(limit, devices=3, recompute="none"))) <= limit
    monkeypatch.setattr("pipec.compiler.search._MEMORY_ATTEMPTS", 0)
    with pytest.raises(InfeasibleError) as caught:
        prepared(limit, devices=3, recompute="none")
    assert needed(str(caught.value)) > limit


@pytest.mark.slow
def test_what_replaying_everything_needs_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the integer program makes of the limit, and if it finds nothing that fits; not without."""
    limit = max(peaks(prepared(recompute="full")))
    assert max(peaks(prepared(limit))) <= limit
    with pytest.raises(InfeasibleError, match=r"in flight[^$]*recompute='auto'"):
        prepared(limit, recompute="none")
    monkeypatch.setattr("pipec.compiler.memory_budget._fitted", lambda trial, *_: trial)
    assert max(peaks(prepared(limit))) <= limit


@pytest.mark.slow
def test_an_asynchronous_schedule_recomputes_where_its_weights_fit() -> None:
    """Its program ends with microbatches in flight, and their values can be recomputed."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    streamed = {"devices": 4, "schedule": "pipedream", "optimizer": sgd, "microbatches": 1}
    limit = max(peaks(prepared(recompute="full", **streamed)))
    assert max(peaks(prepared(recompute="none", **streamed))) > limit
    assert max(peaks(prepared(limit, **streamed))) <= limit


@model(saves=lambda saves: saves, layers=lambda _: wide_mlp())
def Checkpointed(self: Any, x: Tensor) -> Tensor:
    """What a user writes who saves memory by hand."""
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False) if self.saves else layer(x)
    return x


@pytest.mark.slow
def test_a_checkpoint_in_the_model_is_followed_and_the_plan_shows_what_it_saves() -> None:
    """Between regions their ends are saved, and inside nothing; the bits stay."""
    plain, pipe = Checkpointed(False), Checkpointed(True)
    saving, following = prepared(model=plain), prepared(model=pipe)
    every = [[stage.cost.memory for stage in each.plan.stages] for each in (saving, following)]
    width = 64 * 8 * 4
    for whole, part in zip(*every, strict=True):
        assert part.saved + part.unsaved == whole.saved
        assert part.saved <= 4 * width < whole.saved / 8
    assert max(peaks(following)) < max(peaks(saving)) / 2
    x, y = batch()
    assert torch.equal(following.step(x, target=y), saving.step(x, target=y))
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert "* computes the rest again; saved without that: " in str(following.plan)


@pytest.mark.parametrize(("recompute", "again"), [("none", False), ("full", True)])
def test_an_explicit_choice_overrules_checkpoints(recompute: str, again: bool) -> None:
    pipe = prepared(model=Checkpointed(True), recompute=recompute)
    assert {stage.has_recompute for stage in pipe.plan.stages} == {again}


@pytest.mark.slow
def test_less_memory_than_checkpoints_take_is_found_all_the_same() -> None:
    limit = max(peaks(prepared(model=Checkpointed(True), recompute="full")))
    assert max(peaks(prepared(limit, model=Checkpointed(True)))) <= limit


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "full"), ("zb-v", "none")])
def test_the_curves_of_the_page_rise_to_what_the_plan_says(schedule: str, recompute: str) -> None:
    pipe = prepared(schedule=schedule, recompute=recompute)
    curves = rank_memory_over_time(pipe.plan, pipe.programs, pipe.simulate())
    highest = [curve.total.amounts.max() for curve in curves]
    assert highest == pytest.approx([need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)])
