"""Memory limits: what ``recompute="auto"`` does about them, and what is said when nothing helps."""

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.errors import InfeasibleError, InputError
from pipec.pipeline import Pipeline
from pipec.plan.memory import plan_memory
from pipec.timeline.attribution import rank_memory_over_time


def wide_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(4)]
    return nn.Sequential(*layers)


def prepared(memory_limit: int | str | None, recompute: str = "auto") -> Pipeline:
    pipe = pipec.compile(
        wide_mlp(),
        devices=2,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        recompute=recompute,
        memory_limit=memory_limit,
    )
    return pipe.prepare(*batch()[:1], target=batch()[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 8, generator=generator), torch.randn(256, 8, generator=generator)


def peaks(pipe: Pipeline) -> list[int]:
    return [need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)]


def test_no_limit_keeps_everything() -> None:
    assert not any(stage.recompute for stage in prepared(None).plan.stages)


@pytest.mark.slow
def test_auto_recomputes_only_on_ranks_that_would_not_fit() -> None:
    free = peaks(prepared(None))
    assert free[0] > free[1]  # the first rank has more microbatches in flight
    pipe = prepared((free[0] + free[1]) // 2)
    assert [stage.recompute for stage in pipe.plan.stages] == [True, False]
    assert max(peaks(pipe)) <= (free[0] + free[1]) // 2


@pytest.mark.slow
def test_recomputing_gives_the_same_gradients() -> None:
    x, y = batch()
    plain = pipec.compile(wide_mlp(), devices=2, loss_fn=nn.functional.mse_loss, microbatches=4)
    limit = max(peaks(prepared(None))) - 1
    tight = pipec.compile(
        wide_mlp(), devices=2, loss_fn=nn.functional.mse_loss, microbatches=4, memory_limit=limit
    )
    assert torch.equal(plain.step(x, target=y), tight.step(x, target=y))
    assert any(stage.recompute for stage in tight.plan.stages)
    for (name, one), (_, other) in zip(plain.named_parameters(), tight.named_parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad, other.grad), name


def test_an_impossible_limit_says_what_each_rank_needs() -> None:
    with pytest.raises(InfeasibleError, match="nothing that was tried fits") as caught:
        prepared("1kB")
    message = str(caught.value)
    assert "rank 0, stage 0:" in message
    assert "rank 1, stage 1:" in message
    assert "of 1 kB, " in message
    assert "too many" in message
    assert "Use more devices" in message


@pytest.mark.slow
def test_a_limit_that_recomputing_would_meet_is_not_met_by_none() -> None:
    limit = max(peaks(prepared(None, recompute="full")))
    assert max(peaks(prepared(limit))) <= limit
    with pytest.raises(InfeasibleError, match="in flight"):
        prepared(limit, recompute="none")


@pytest.mark.parametrize("text", ["lots", "16 apples", ""])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a number of bytes or text such as '16GiB'"):
        prepared(text)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("1f1b", "full"), ("zb-v", "none")])
def test_the_curves_of_the_page_rise_to_what_the_plan_says(schedule: str, recompute: str) -> None:
    x, y = batch()
    pipe = pipec.compile(
        wide_mlp(),
        devices=2,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        schedule=schedule,
        recompute=recompute,
    ).prepare(x, target=y)
    curves = rank_memory_over_time(pipe.plan, pipe.programs, pipe.simulate())
    highest = [max(amount for _, amount in curve) for curve in curves]
    assert highest == pytest.approx([need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)])
