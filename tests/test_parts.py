"""Phases that consist of several functions: the same bits as whole ones, however programs run them."""

import functools
from dataclasses import replace

import pytest
import torch
from combinations import OPTIONS, SIZES, Captured, TrainingRun, captured
from models import Factory, each, gpt2_with_dropout, resnet, t5
from parts import apart, artifact_in_parts
from torch import Tensor
from unsplit import Outcome

from pipec.artifact.check import check_artifact
from pipec.artifact.directory import Artifact
from pipec.compiler.staged import StagedGraph
from pipec.hardware.topology import alike
from pipec.ir import Schedule
from pipec.passes.cut_stages import CutStages
from pipec.schedules import make_schedule
from pipec.schedules.replicas import replicated, round_robin

SCHEDULES = {
    "1f1b": make_schedule("1f1b", 2, 3),
    "zb-h1": make_schedule("zb-h1", 2, 3),
    "replicas": replicated(functools.partial(make_schedule, "zb-h1", 2), 3, 2),
    "2-1": round_robin(3, [2, 1]),
}


def staged_with(model: Captured, schedule: Schedule, recompute: bool) -> tuple[object, ...]:
    stages = range(schedule.num_stages)
    how = CutStages(alike(len(stages), OPTIONS.device_model.link), model.graph.batch_size)
    options = replace(OPTIONS, topology=alike(schedule.num_ranks, OPTIONS.device_model.link))
    return model.graph, how, options, frozenset(stages if recompute else ())


def outcome(artifact: Artifact, model: Captured) -> Outcome:
    run = TrainingRun(artifact, model.model)
    run.step(model.inputs, SIZES)
    return Outcome.of(run.step(model.inputs, SIZES), run.model)


def same_bits(found: Outcome, wanted: Outcome) -> bool:
    def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
        return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)

    same_loss = torch.equal(found.loss, wanted.loss)
    return same_loss and same(found.gradients, wanted.gradients) and same(found.buffers, wanted.buffers)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("factory", each(gpt2_with_dropout, t5, resnet))
def test_parts_have_the_bits_of_whole_functions(factory: Factory, name: str) -> None:
    """As a whole, part by part, and with a replay of the forward."""
    model, schedule = captured(factory), SCHEDULES[name]
    args = staged_with(model, schedule, recompute=name in ("1f1b", "replicas"))
    whole = StagedGraph(*args).trial(schedule, 3).artifact()  # type: ignore[arg-type]
    wanted = outcome(whole, model)
    divided = artifact_in_parts(3, schedule, 3, *args)
    assert {len(shares) for stage in divided.plan.stages for shares in stage.parts.values()} == {3}
    for artifact in (divided, apart(divided)):
        check_artifact(artifact)
        assert same_bits(outcome(artifact, model), wanted)
