"""Saved values in host memory: programs, copies beside computes, bytes on both sides, and bits that stay."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_programs import lower, uniform_costs, verify_programs
from compile_variants import Captured, TrainingRun, captured, cut_evenly, save_with_tensors
from huggingface_models import Factory, perceptron
from memory_meter import measure_memory
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step
from worker_processes import read_outcome, train

import pipec
from pipec.artifact.artifact import Artifact
from pipec.errors import InfeasibleError, InputError
from pipec.hardware.devices import DEVICES
from pipec.ir import HostCost, Op, Program, Schedule
from pipec.ir.batch_split import split_sizes
from pipec.ir.columns import OP_CODE, InstructionColumns
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.lower import chain_links
from pipec.programs.offload_intervals import num_offloaded
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule
from pipec.timeline.attribution import attribute_waits
from pipec.timeline.curves import rank_memory_over_time
from pipec.timeline.rank_times import rank_times
from pipec.timeline.simulate import simulate
from pipec.viz import timeline_text

ROWS = 16

SCHEDULES = {
    "gpipe": make_schedule("gpipe", 2, 6),
    "1f1b": make_schedule("1f1b", 4, 6),
    "zb-h1": make_schedule("zb-h1", 4, 6),
    "two stages on a rank": make_schedule("zb-v", 2, 6),
    "replicas": replicate_schedule(functools.partial(make_schedule, "gpipe", 2), 8, 2),
}

# programs


def lowered(schedule: Schedule, offload: Sequence[int]) -> tuple[Program, ...]:
    links = chain_links(schedule.num_stages)
    programs = lower(schedule, links, offload=offload)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, offload=offload)
    return programs


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_away_is_told_beforehand(name: str) -> None:
    """The choice of what to offload counts on it, while computes run."""
    schedule = SCHEDULES[name]
    stages = range(schedule.num_stages)
    for bare, program in zip(lowered(schedule, ()), lowered(schedule, stages), strict=True):
        columns = InstructionColumns.of(program.instructions, chain_links(schedule.num_stages))
        for stage in stages:
            own, computes = columns.stages == stage, columns.is_compute
            out = (columns.ops == OP_CODE[Op.OFFLOAD]) & own
            gone = np.zeros(len(columns), int)
            for number in np.flatnonzero(out):
                gone[np.flatnonzero(computes & (np.arange(len(columns)) > number))[0] + 1] += 1
            gone -= (columns.ops == OP_CODE[Op.PREFETCH]) & own
            without = InstructionColumns.of(bare.instructions, columns.links)
            assert (
                np.cumsum(gone)[computes].tolist()
                == num_offloaded(without, stage)[without.is_compute].tolist()
            )


# time


def played(seconds: float) -> Any:
    schedule = make_schedule("gpipe", 1, 6)
    costs = replace(uniform_costs(1), copy_times={0: seconds})
    return simulate(lowered(schedule, [0]), costs)


def test_copies_that_are_no_longer_than_computes_take_no_time() -> None:
    assert played(1.0).makespan == played(0.0).makespan == 6 * 3
    timeline = played(1.5)
    assert timeline.makespan > 6 * 3
    (time,) = rank_times(timeline, attribute_waits(timeline))
    assert {wait.what for wait in time.waits} >= {Op.OFFLOAD}
    assert time.busy + time.waiting + time.unattributed_idle + time.trailing_idle == pytest.approx(
        timeline.makespan
    )
    assert "H offload  D prefetch" in timeline_text(timeline)


# bits


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8)
        self.layers = nn.Sequential(*(copy.deepcopy(layer) for layer in block * 4), nn.BatchNorm1d(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def blocks() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Blocks(), {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 8)}


def offloading(schedule: Schedule, replays: bool = False, factory: Factory = blocks) -> Artifact:
    """All that is saved and may wait on the host does so; activations are recomputed if it ``replays``."""
    cut = cut_evenly(captured(factory), schedule.num_stages, recompute=False)
    names = [name for values in cut.forward_values(3) for name in values]
    recomputed = frozenset(name for name in names if replays and name.startswith("gelu"))
    marks = MarkRecompute(recomputed), MarkOffload(frozenset(names) - recomputed)
    return cut.with_recompute(*marks).evaluate(schedule, 3).artifact()


def outcome(artifact: Artifact, model: Captured) -> StepResult:
    run = TrainingRun(artifact, model.model)
    sizes = split_sizes(ROWS, artifact.plan.num_microbatches)
    return StepResult.of(run.step(model.inputs, sizes), run.model)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_bit_stays(name: str) -> None:
    """Dropout is on, and BatchNorm changes buffers. Microbatches have two sizes."""
    schedule, model = SCHEDULES[name], captured(blocks)
    kept = cut_evenly(model, schedule.num_stages, recompute=False)
    expected = outcome(kept.evaluate(schedule, 3).artifact(), model)
    for replays in (False, True):
        artifact = offloading(schedule, replays)
        assert artifact.plan.offloading_stages
        assert any(stage.has_recompute for stage in artifact.plan.stages) == replays
        assert any(each.op is Op.PREFETCH for program in artifact.programs for each in program.instructions)
        assert_equal(outcome(artifact, model), expected)


@pytest.mark.slow
def test_every_bit_stays_over_gloo_and_in_an_artifact_that_was_saved(tmp_path: Path) -> None:
    model, artifact = captured(perceptron), offloading(SCHEDULES["gpipe"], factory=perceptron)
    assert all(stage.offloaded for stage in artifact.plan.stages)
    saved = save_with_tensors(artifact, model.model, tmp_path / "saved")
    assert pipec.load(saved).programs == artifact.programs
    assert train([saved] * 2, model.inputs, tmp_path) == ["", ""]
    unsplit = copy.deepcopy(model.model)
    sizes = split_sizes(len(model.inputs["x"]), artifact.plan.num_microbatches)
    expected = StepResult.of(unsplit_step(unsplit, model.inputs, sizes), unsplit)
    assert_equal(read_outcome(tmp_path, 2), expected)


# budgets


def compiled(**options: Any) -> pipec.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 8)) for _ in "1234"]
    model = nn.Sequential(*layers)
    return pipec.compile(
        model, 2, loss_fn=nn.functional.mse_loss, schedule="gpipe", microbatches=8, **options
    )


@pytest.mark.slow
def test_a_budget_is_kept_by_copies_and_what_was_predicted_is_measured() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(256, 8), torch.randn(256, 8)

    def step(pipe: pipec.Pipeline) -> list[Tensor]:
        torch.manual_seed(2)
        return [pipe.step(x, target=y), *(parameter.grad for parameter in pipe.parameters())]

    free = compiled()
    expected = step(free)
    limit = int(0.7 * free.memory().peak_bytes)
    for recompute in ("none", "auto"):
        device = replace(DEVICES["cpu"], host=HostCost())
        pipe = compiled(memory_limit=limit, offload="activations", recompute=recompute, costs=device)
        assert all(map(torch.equal, step(pipe), expected))
        pipe.zero_grad()
        predicted, measured = pipe.memory(), measure_memory(pipe, x, target=y)
        curves = rank_memory_over_time(pipe.plan, pipe.programs, pipe.simulate())
        assert [max(curve.host) for curve in curves] == [each.host_bytes for each in measured]
        assert predicted.peak_bytes <= limit
        assert pipe.simulate().makespan < 1.02 * free.simulate().makespan
        for mine, theirs in zip(predicted, measured, strict=True):
            assert mine.host_bytes == theirs.host_bytes > 0
            assert mine.host_after.tolist() == theirs.host_after.tolist()
            assert mine.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.03)
    with pytest.raises(InfeasibleError):
        compiled(memory_limit=limit, recompute="none").prepare(x, target=y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "moves no more than memory asks for; pass the bytes"),
        ({"recompute": "full"}, "saves nothing that could be offloaded"),
        ({"schedule": "pipedream", "optimizer": torch.optim.SGD}, "under an asynchronous schedule"),
        ({"offload": "state"}, "offload is 'state'; expected"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(options: dict[str, Any], message: str) -> None:
    limit = {"memory_limit": "1GB"} if options else {}
    with pytest.raises(InputError, match=message):
        pipec.compile(nn.Linear(2, 2), 2, **{"offload": "activations", **limit, **options})


# the optimizer's state


@pytest.mark.parametrize("replicas", [1, 2])
def test_state_on_the_host_is_as_it_would_be_and_predicted(replicas: int) -> None:
    def trained(**options: Any) -> pipec.Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        given = {"optimizer": functools.partial(torch.optim.AdamW, lr=1e-2), "replicas": replicas, **options}
        pipe = pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=4, **given)
        pipe.step(x, target=x)
        return pipe

    x = torch.ones(16, 8)
    plain, pipe = trained(), trained(offload="optimizer")
    mine, theirs = pipe.optimizer.state_dict(), plain.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, entries in theirs["state"].items():
        assert all(torch.equal(mine["state"][number][key], value) for key, value in entries.items())
    predicted, measured = pipe.memory(), measure_memory(pipe, x, target=x)
    for one, other, before in zip(predicted, measured, plain.memory(), strict=True):
        assert one.bytes_by_category["optimizer"] == other.bytes_by_category.get("optimizer", 0) == 0
        assert one.host_bytes == other.host_bytes == before.bytes_by_category["optimizer"] > 0
        if replicas == 1:  # those of one process leave the update to the first
            assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.03)
