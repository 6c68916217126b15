"""Phases that consist of several functions: the same bits as whole ones, however programs run them."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compile_variants import OPTIONS, SIZES, Captured, TrainingRun, captured
from huggingface_models import Factory, gpt2_with_dropout, perceptron, resnet, t5
from phase_segments import apart, artifact_with_segments
from slow_params import slow
from torch import fx
from unsplit_reference import StepResult, assert_equal

import pipec
from pipec.artifact.artifact import Artifact
from pipec.compiler.staged_graph import NO_RECOMPUTE, StagedGraph
from pipec.graph import send
from pipec.graph.phase_segments import split_into_segments
from pipec.hardware.topology import equal_devices
from pipec.ir import Schedule, ShardingLevel
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.verify import verify
from pipec.schedules import make_schedule
from pipec.schedules.replicated import round_robin

SCHEDULES = {
    "1f1b": make_schedule("1f1b", 2, 3),
    "zb-h1": make_schedule("zb-h1", 2, 3),
    "2-1": round_robin(3, [2, 1]),
}
REPLAYS = {"1f1b": MarkRecompute(None), "2-1": MarkRecompute(None, in_backward=frozenset({0, 1}))}


def staged_with(model: Captured, schedule: Schedule, recompute: MarkRecompute) -> tuple[object, ...]:
    link = OPTIONS.device_model.link
    cut = CutStages(equal_devices(schedule.num_stages, link), model.graph.batch_size)
    options = replace(OPTIONS, topology=equal_devices(schedule.num_ranks, link))
    return model.graph, AssignStages(cut), options, recompute


def outcome(artifact: Artifact, model: Captured) -> StepResult:
    run = TrainingRun(artifact, model.model)
    run.step(model.inputs, SIZES)
    return StepResult.of(run.step(model.inputs, SIZES), run.model)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        *((resnet, name) for name in ("zb-h1", "2-1")),
        *(slow(gpt2_with_dropout, name) for name in ("zb-h1", "2-1")),
        slow(t5, "1f1b"),
    ],
)
def test_parts_have_the_bits_of_whole_functions(factory: Factory, name: str) -> None:
    """As a whole, part by part, and with a replay of the forward, before the backward or in its parts."""
    model, schedule = captured(factory), SCHEDULES[name]
    args = staged_with(model, schedule, REPLAYS.get(name, NO_RECOMPUTE))
    whole = StagedGraph(*args).evaluate(schedule, 3).artifact()  # type: ignore[arg-type]
    wanted = outcome(whole, model)
    divided = artifact_with_segments(3, schedule, 3, *args)
    assert {len(shares) for stage in divided.plan.stages for shares in stage.segments.values()} == {3}
    for artifact in (divided, apart(divided)):
        verify(artifact.plan, artifact.programs)
        assert_equal(outcome(artifact, model), wanted)


DIVIDED, WHOLE = 1, 1 << 40
"""The least bytes of a bucket: so few that every backward is divided, and so many that none is."""

REPLICAS: dict[str, dict[str, Any]] = {
    "1x2": {"devices": 2, "stages": 1},
    "2x2": {"devices": 4, "replicas": 2, "schedule": "zb-h1"},
    "2-1": {"devices": 3, "replicas": (2, 1)},
    "updates": {"devices": 2, "stages": 1, "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2)},
}
SHARDS = [{**REPLICAS["updates"], "shard": shard} for shard in ShardingLevel]


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        *(slow(gpt2_with_dropout, REPLICAS[name]) for name in ("1x2", "2x2", "2-1")),
        slow(resnet, REPLICAS["1x2"]),
        (resnet, REPLICAS["2-1"]),
        slow(perceptron, REPLICAS["updates"]),
        *(slow(perceptron, each) for each in SHARDS[:-1]),
        (perceptron, SHARDS[-1]),
    ],
)
def test_sums_that_overlap_the_backward_change_no_bit(
    factory: Factory, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of each round, too."""
    monkeypatch.setattr(StagedGraph, "_with_fewest_sums", StagedGraph._evaluate)
    found = []
    for least_bytes in (WHOLE, DIVIDED):
        monkeypatch.setattr("pipec.plan.buckets.LEAST_BYTES", least_bytes)
        model, inputs = factory()
        pipe = pipec.compile(model, microbatches=4, **options)
        torch.manual_seed(0)
        losses = [pipe.step(**inputs) for _ in range(3)]
        assert bool(pipe.plan.segments) == (least_bytes == DIVIDED)
        gradients = [each.grad for each in pipe.parameters() if each.grad is not None]
        found.append([*losses, *gradients, *pipe.full_state_dict().values()])
    assert all(map(torch.equal, *found))


def test_a_backward_may_send_what_the_forward_made() -> None:
    """A mask that the stage makes for its loss, and that a gradient before it is multiplied by as well."""
    graph = fx.Graph()
    sent = graph.call_function(send, (graph.placeholder("mask"), 0))
    assert split_into_segments(SimpleNamespace(outputs=[]), [sent], [["w"]]) == [{sent}]  # type: ignore[arg-type]
