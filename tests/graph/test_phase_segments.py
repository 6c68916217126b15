"""Phases that consist of several functions: the same bits as whole ones, however programs run them."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compile_variants import OPTIONS, SIZES, Captured, TrainingRun, captured
from huggingface_models import Factory, gpt2_with_dropout, perceptron, resnet, t5
from phase_segments import apart, artifact_with_segments, staged_with_segments
from slow_params import slow, slow_but
from torch import Tensor, fx
from unsplit_reference import StepResult

import pipec
from pipec.artifact.artifact import Artifact
from pipec.compiler.staged_graph import NO_RECOMPUTE, StagedGraph
from pipec.errors import VerifyError
from pipec.graph import send
from pipec.graph.invariants import verify_graph
from pipec.graph.phase_functions import stage_functions
from pipec.graph.phase_segments import split_into_segments
from pipec.hardware.topology import equal_devices
from pipec.ir import GRADIENT_PHASES, Phase, Schedule, ShardingLevel
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.verify import verify
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin

SCHEDULES = {
    "1x2": replicate_schedule(functools.partial(make_schedule, "1f1b", 1), 3, 2),
    "1f1b": make_schedule("1f1b", 2, 3),
    "zb-h1": make_schedule("zb-h1", 2, 3),
    "replicas": replicate_schedule(functools.partial(make_schedule, "zb-h1", 2), 3, 2),
    "2-1": round_robin(3, [2, 1]),
}
REPLAYS = {"1f1b": MarkRecompute(None), "2-1": MarkRecompute(None, in_backward=frozenset({0, 1}))}


def staged_with(
    model: Captured, schedule: Schedule, recompute: MarkRecompute = NO_RECOMPUTE
) -> tuple[object, ...]:
    stages = range(schedule.num_stages)
    how = AssignStages(
        CutStages(equal_devices(len(stages), OPTIONS.device_model.link), model.graph.batch_size)
    )
    joined = equal_devices(schedule.num_ranks, OPTIONS.device_model.link)
    return model.graph, how, replace(OPTIONS, topology=joined), recompute


def outcome(artifact: Artifact, model: Captured) -> StepResult:
    run = TrainingRun(artifact, model.model)
    run.step(model.inputs, SIZES)
    return StepResult.of(run.step(model.inputs, SIZES), run.model)


def same_bits(found: StepResult, wanted: StepResult) -> bool:
    def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
        return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)

    same_loss = torch.equal(found.loss, wanted.loss)
    return same_loss and same(found.gradients, wanted.gradients) and same(found.buffers, wanted.buffers)


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
        assert same_bits(outcome(artifact, model), wanted)


DIVIDED, WHOLE = 1, 1 << 40
"""The least bytes of a bucket: so few that every backward is divided, and so many that none is."""


@functools.cache
def in_buckets(model: Captured, name: str, least_bytes: int) -> Artifact:
    graph, how, options, recompute = staged_with(model, SCHEDULES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipec.plan.buckets.LEAST_BYTES", least_bytes)
        return StagedGraph(graph, how, options, recompute).evaluate(SCHEDULES[name], 3).artifact()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        *(slow(gpt2_with_dropout, name) for name in ("1x2", "replicas", "2-1")),
        (resnet, "1x2"),
        (resnet, "2-1"),
    ],
)
def test_sums_that_overlap_the_backward_change_no_bit(factory: Factory, name: str) -> None:
    model = captured(factory)
    whole, divided = (in_buckets(model, name, least) for least in (WHOLE, DIVIDED))
    assert not whole.plan.segments
    assert divided.plan.segments
    run = [each.segment for each in divided.programs[0].instructions if each.op.phase in GRADIENT_PHASES]
    assert len([part for part in run if part < 0]) == len(divided.plan.microbatches_on(0, 0)) - 1
    assert same_bits(outcome(divided, model), outcome(whole, model))


@pytest.mark.parametrize("shard", slow_but([None, *ShardingLevel], ShardingLevel.PARAMETERS))
def test_updates_of_shares_are_the_same_in_parts(
    shard: ShardingLevel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of each round, too."""
    monkeypatch.setattr(StagedGraph, "_with_fewest_sums", StagedGraph._evaluate)
    found = []
    for least_bytes in (WHOLE, DIVIDED):
        monkeypatch.setattr("pipec.plan.buckets.LEAST_BYTES", least_bytes)
        model, inputs = perceptron()
        pipe = pipec.compile(
            model,
            devices=2,
            stages=1,
            microbatches=4,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            shard=shard,
        )
        losses = [pipe.step(**inputs) for _ in range(3)]
        assert bool(pipe.plan.segments) == (least_bytes == DIVIDED)
        found.append([*losses, *pipe.full_state_dict().values()])
    assert all(map(torch.equal, *found))


def test_a_backward_is_divided_where_groups_of_gradients_are_complete() -> None:
    """What the functions of a stage look like."""
    model, schedule = captured(perceptron), make_schedule("gpipe", 1, 3)
    staged = StagedGraph(*staged_with(model, schedule))  # type: ignore[arg-type]
    groups = [[f"layers.{layer}.{name}" for name in ("weight", "bias")] for layer in (4, 2)]
    stage = stage_functions(staged.graph, 0, False, [*groups, ["layers.0.weight", "layers.0.bias"]])
    assert [[fqn for fqn, _ in each.gradients] for each in stage.phase_functions(Phase.BACKWARD)] == [
        *groups,
        ["layers.0.weight", "layers.0.bias"],
    ]


def test_a_backward_may_send_what_the_forward_made() -> None:
    """A mask that the stage makes for its loss, and that a gradient before it is multiplied by as well."""
    graph = fx.Graph()
    sent = graph.call_function(send, (graph.placeholder("mask"), 0))
    assert split_into_segments(SimpleNamespace(outputs=[]), [sent], [["w"]]) == [{sent}]  # type: ignore[arg-type]


def test_a_graph_whose_parts_do_not_follow_each_other_is_refused() -> None:
    model, schedule = captured(perceptron), SCHEDULES["1f1b"]
    staged = staged_with_segments(2, *staged_with(model, schedule))
    (user,) = [node for node in staged.graph.nodes if node.target is torch.ops.aten.tanh.default][:1]
    source = user.all_input_nodes[0]
    source.meta["segment"] = 7
    with pytest.raises(VerifyError, match=f"runs in segment .* but reads {source.name} of segment 7"):
        verify_graph(staged.graph, "an edit")
