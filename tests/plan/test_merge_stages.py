"""Merged stages take the time that compile predicts for fewer devices, where both cut at the same places."""

import pytest
import torch
from torch import nn

import pipec
from pipec.errors import PlanError
from pipec.ir import Payload, Plan
from pipec.pipeline import Pipeline
from pipec.plan.merge_stages import merge_stages
from pipec.plan.predictions import simulate_plan
from pipec.plan.what_if import what_if_of_plan
from pipec.programs.lower import lower
from pipec.programs.verify import verify_step
from pipec.schedules.registry import SCHEDULES


class Skipping(nn.Module):
    """The first layer's weight is the last one's, and its output goes to the last layer and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        skipped = first(x)
        return last(third(second(skipped)) + skipped) + skipped


def compiled(model: nn.Module, devices: int, **options: object) -> Pipeline:
    x = torch.randn(16, 16)
    options = {"schedule": "1f1b", "microbatches": 8, **options}
    pipe = pipec.compile(model, devices=devices, loss_fn=nn.functional.mse_loss, **options)
    return pipe.prepare(x, target=x)


@pytest.mark.slow
def test_fewer_ranks_take_what_compile_predicts_for_the_same_cut() -> None:
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    pipe = compiled(layers, 4, optimizer=torch.optim.SGD)
    grid = what_if_of_plan(pipe.plan, pipe.programs, pipe.simulate())
    axis = [each.name for each in grid.axes].index("ranks")
    assert grid.axes[axis].choices == ["4", "2", "1"]
    found = {at[axis]: makespan for at, makespan, *_ in grid.cells if sum(at) == at[axis]}
    for position, devices in ((1, 2), (2, 1)):
        smaller = compiled(layers, devices, optimizer=torch.optim.SGD)
        firsts = [stage.modules[0] for stage in pipe.plan.stages][:: 4 // devices]
        assert [stage.modules[0] for stage in smaller.plan.stages] == firsts
        assert found[position] == pytest.approx(smaller.simulate().makespan, rel=1e-9)


def test_links_that_become_one_send_each_value_once() -> None:
    plan = compiled(Skipping(), 4).plan
    merged = merge_stages(plan, 2)
    between = [(each.source, each.target, each.payload) for each in merged.links]
    assert len({*between}) == len(between)
    assert {(0, 1, Payload.WEIGHT), (1, 0, Payload.WEIGHT_GRADIENT), (1, -1, Payload.RESULT)} <= {*between}
    forwards = [
        (seconds, link)
        for link, seconds in zip(plan.links, plan.link_seconds, strict=True)
        if link.payload is Payload.ACTIVATION and link.source < 2 <= link.target
    ]
    assert len(forwards) > 1
    number = between.index((0, 1, Payload.ACTIVATION))
    values = {value for _, link in forwards for value in link.values}
    assert sorted(map(repr, merged.links[number].values)) == sorted(map(repr, values))
    assert merged.link_seconds[number] <= sum(seconds for seconds, _ in forwards)
    schedule = SCHEDULES["1f1b"](2, plan.num_microbatches)
    programs = lower(schedule, merged)
    verify_step(merged, programs)
    assert simulate_plan(merged, programs).num_ranks == 2


def test_what_cannot_be_merged_is_refused() -> None:
    def refusal(plan: Plan, factor: int) -> str:
        with pytest.raises(PlanError) as caught:
            merge_stages(plan, factor)
        return str(caught.value)

    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    assert refusal(compiled(layers, 4).plan, 3) == "4 stages on 4 ranks are not a multiple of 3"
    assert "replicas" in refusal(compiled(layers, 4, replicas=2).plan, 2)
    interleaved = compiled(layers, 2, schedule="interleaved-1f1b").plan
    assert [rank for (rank,) in interleaved.placement] == [0, 1, 0, 1]
    assert [rank for (rank,) in merge_stages(interleaved, 2).placement] == [0, 0]


@pytest.mark.slow
@pytest.mark.slow
def test_what_if_has_no_axis_of_which_nothing_was_played() -> None:
    """Stages of which each rank has two cannot run in the orders of one, nor as one."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    pipe = compiled(layers, 2, schedule="interleaved-1f1b", microbatches=4)
    grid = what_if_of_plan(pipe.plan, pipe.programs, pipe.simulate())
    names = [axis.name for axis in grid.axes]
    assert "seconds of messages" in names
    assert "schedule" not in names
    for axis in range(len(names)):
        assert any(positions[axis] for positions, *_ in grid.cells)
    assert all(len(positions) == len(names) for positions, *_ in grid.cells)
