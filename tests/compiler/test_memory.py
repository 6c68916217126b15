"""Memory limits: what ``recompute="auto"`` does about them, and what is said when nothing helps."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.errors import InfeasibleError, InputError
from pipec.pipeline import Pipeline
from pipec.plan.memory_needs import plan_memory
from pipec.timeline.curves import rank_memory_over_time


def wide_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(4)]
    return nn.Sequential(*layers)


def prepared(memory_limit: int | str | None, recompute: str = "auto", devices: int = 2) -> Pipeline:
    pipe = pipec.compile(
        wide_mlp(),
        devices,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        recompute=recompute,
        memory_limit=memory_limit,
        dynamic=False,
    )
    return pipe.prepare(*batch()[:1], target=batch()[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 8, generator=generator), torch.randn(256, 8, generator=generator)


def peaks(pipe: Pipeline) -> list[int]:
    return [need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)]


@pytest.mark.slow
def test_auto_recomputes_only_on_ranks_that_would_not_fit() -> None:
    unlimited = prepared(None)
    assert not any(stage.has_recompute for stage in unlimited.plan.stages)
    free = peaks(unlimited)
    assert free[0] > free[1]  # the first rank has more microbatches in flight
    pipe = prepared((free[0] + free[1]) // 2)
    assert [stage.has_recompute for stage in pipe.plan.stages] == [True, False]
    assert max(peaks(pipe)) <= (free[0] + free[1]) // 2
    assert "*" in str(pipe.plan)


@pytest.mark.slow
def test_a_limit_that_is_too_small_names_the_smallest_and_that_one_is_enough() -> None:
    with pytest.raises(InfeasibleError, match="nothing that was tried fits") as caught:
        prepared("1kB")
    message = str(caught.value)
    assert "rank 0, stage 0:" in message
    assert "rank 1, stage 1:" in message
    assert "of 1 kB, " in message
    assert "too many" in message
    assert "Use more devices" in message
    smallest = smallest_of(message)
    pipe = prepared(smallest)
    assert max(peaks(pipe)) <= smallest
    assert any(stage.has_recompute for stage in pipe.plan.stages)


def smallest_of(message: str) -> int:
    found = re.search(r"The smallest limit found to be enough.* is memory_limit=(\d+) ", message)
    assert found is not None
    return int(found[1])


def test_a_later_call_that_does_not_fit_names_the_limit_that_is_enough_for_it() -> None:
    """Stages stay where the first call has put them, whether microbatches grow or an evaluation comes."""
    x, target = (torch.cat([each] * 4) for each in batch())
    pipe = prepared(max(peaks(prepared(None))))
    before = peaks(pipe)
    with pytest.raises(InfeasibleError, match="on the stages that the first call has fixed") as caught:
        pipe.prepare(x, target=target)
    assert peaks(pipe) == before
    smallest = smallest_of(str(caught.value))
    again = prepared(smallest).prepare(x, target=target)
    assert max(peaks(again)) <= smallest
    with pytest.raises(InfeasibleError, match="on the stages that the first call has fixed") as caught:
        pipe.eval_step(torch.cat([x] * 64), target=torch.cat([target] * 64))
    assert smallest_of(str(caught.value)) > smallest


def test_other_cuts_are_tried_for_a_smaller_limit() -> None:
    """The cut that comes nearest to a limit far too small needs more than others."""
    with pytest.raises(InfeasibleError) as caught:
        prepared("1kB", "none", devices=3)
    smallest = smallest_of(str(caught.value))
    assert prepared(smallest, "none", devices=3).memory().peak_bytes <= smallest
    with pytest.raises(InfeasibleError):
        prepared(int(0.97 * smallest), "none", devices=3)


def test_what_replaying_everything_needs_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the integer program makes of the limit: here, nothing that fits."""
    limit = max(peaks(prepared(None, recompute="full")))
    monkeypatch.setattr("pipec.compiler.memory_budget._fitted", lambda trial, offloads: trial)
    assert max(peaks(prepared(limit))) <= limit


@pytest.mark.slow
def test_a_limit_that_recomputing_would_meet_is_not_met_by_none() -> None:
    limit = max(peaks(prepared(None, recompute="full")))
    assert max(peaks(prepared(limit))) <= limit
    with pytest.raises(InfeasibleError, match=r"in flight[^$]*recompute='auto'"):
        prepared(limit, recompute="none")


class Checkpointed(nn.Module):
    """What a user writes who saves memory by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = wide_mlp()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_checkpoint_in_the_model_is_overruled_and_the_user_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = batch()
    pipe = pipec.compile(Checkpointed(), 1, loss_fn=nn.functional.mse_loss, microbatches=4, dynamic=False)
    pipe.prepare(x, target=y)
    assert not any(stage.has_recompute for stage in pipe.plan.stages)
    assert "torch.utils.checkpoint at test_memory.py:" in caplog.text
    assert "is not followed" in caplog.text


@pytest.mark.parametrize("text", ["lots", "16 apples", ""])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a number of bytes or text such as '16GiB'"):
        prepared(text)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "full"), ("zb-v", "none")])
def test_the_curves_of_the_page_rise_to_what_the_plan_says(schedule: str, recompute: str) -> None:
    x, y = batch()
    pipe = pipec.compile(
        wide_mlp(),
        devices=2,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        schedule=schedule,
        recompute=recompute,
        dynamic=False,
    ).prepare(x, target=y)
    curves = rank_memory_over_time(pipe.plan, pipe.programs, pipe.simulate())
    highest = [curve.total.highest for curve in curves]
    assert highest == pytest.approx([need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)])
