"""Phases that consist of several functions: the same bits as whole ones, however programs run them."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compile_variants import OPTIONS, SIZES, Captured, TrainingRun, captured, save_with_tensors
from huggingface_models import Factory, gpt2_with_dropout, perceptron, resnet, t5
from phase_segments import apart, artifact_with_segments, staged_with_segments
from slow_params import slow, slow_but
from torch import Tensor, fx
from unsplit_reference import StepResult, relative_error
from worker_processes import read_outcome, run_ranks, train

import pipec
from pipec.artifact.artifact import Artifact
from pipec.artifact.verification import verify_artifact
from pipec.codegen.stage_source import StageSource
from pipec.compiler.staged_graph import NO_RECOMPUTE, StagedGraph
from pipec.errors import VerifyError
from pipec.graph import send
from pipec.graph.invariants import verify_graph
from pipec.graph.phase_functions import stage_functions
from pipec.graph.phase_segments import split_into_segments
from pipec.hardware.devices import DeviceModel, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import GRADIENT_PHASES, Phase, Schedule, ShardingLevel
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute
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
        verify_artifact(artifact)
        assert same_bits(outcome(artifact, model), wanted)


SLOW, FAST = LinkModel(1e5, 1e-7), LinkModel(1e15, 0.0)
"""Links on which sums of gradients take so long that they begin before the backward is over, or no time.

A part more takes next to nothing of a device that is quick to launch.
"""


@functools.cache
def over_links(model: Captured, name: str, link: LinkModel) -> Artifact:
    graph, how, options, recompute = staged_with(model, SCHEDULES[name])
    links = equal_devices(SCHEDULES[name].num_ranks, link)
    quick = replace(options.device_model, launch_seconds=1e-6)  # type: ignore[attr-defined]
    options = replace(options, topology=links, device_model=quick)  # type: ignore[type-var]
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
    whole, divided = (over_links(model, name, link) for link in (FAST, SLOW))
    assert not whole.plan.segments
    assert divided.plan.segments
    run = [each.segment for each in divided.programs[0].instructions if each.op.phase in GRADIENT_PHASES]
    assert len([part for part in run if part < 0]) == len(divided.plan.microbatches_on(0, 0)) - 1
    assert same_bits(outcome(divided, model), outcome(whole, model))


@pytest.mark.slow
def test_processes_sum_while_their_backward_runs(tmp_path: Path) -> None:
    """One process per rank, over gloo."""
    model = captured(resnet)
    artifact = over_links(model, "1x2", SLOW)
    assert artifact.plan.segments
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    assert train([directory] * 2, model.inputs, tmp_path) == [""] * 2
    found = read_outcome(tmp_path, 2, replicated=True)
    run = TrainingRun(artifact, model.model)
    wanted = StepResult.of(run.step(model.inputs, SIZES), run.model)
    assert found.gradients.keys() == wanted.gradients.keys()
    for fqn, gradient in found.gradients.items():
        assert relative_error(gradient, wanted.gradients[fqn]) < 1e-6


@pytest.mark.slow
def test_parameters_in_shares_are_there_for_parts_that_do_not_read_them(tmp_path: Path) -> None:
    """The gradients that a part makes lie in memory as the parameters do."""
    script = Path(__file__).parents[1] / "helpers" / "phase_segments_script.py"
    texts = run_ranks(script, 2, tmp_path)
    assert "6 are equal" in texts[0]
    assert "are equal" in texts[1]


@pytest.mark.parametrize("shard", slow_but([None, *ShardingLevel], ShardingLevel.PARAMETERS))
def test_updates_of_shares_are_the_same_in_parts(
    shard: ShardingLevel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of each round, too."""
    monkeypatch.setattr(StagedGraph, "_with_fewest_sums", StagedGraph._evaluate)
    found = []
    for link in (FAST, SLOW):
        model, inputs = perceptron()
        pipe = pipec.compile(
            model,
            devices=2,
            stages=1,
            microbatches=4,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            shard=shard,
            topology=equal_devices(2, link),
            costs=DeviceModel("test", {"float32": 2e5}, 1e15, 1e-6, 2**40, link, "made up"),
        )
        losses = [pipe.step(**inputs) for _ in range(3)]
        assert bool(pipe.plan.segments) == (link is SLOW)
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
    source = StageSource.of(staged.graph, stage, staged.names, "A stage in parts.").write()
    bodies = source[source.index("def backward_0") :]
    assert re.sub(r" {2,}# .*|\n    # .*", "", bodies) == BACKWARDS


BACKWARDS = """\
def backward_0(frame):
    y, grad_loss = frame["y"], frame["grad_loss"]
    input_2, input_4, input_5 = frame.pop("saved")
    grad_input_5 = torch.ops.aten.mse_loss_backward.default(grad_loss, input_5, y, 1)
    del input_5
    grad_layers_4_weight = torch.mm(grad_input_5.t(), input_4)
    grad_layers_4_bias = torch.sum(grad_input_5, [0])
    return (
        {},
        [input_2, input_4, grad_input_5],
        (None, None, None, None, grad_layers_4_weight, grad_layers_4_bias),
    )


def backward_1(frame):
    layers_0_weight, layers_0_bias, layers_2_weight, layers_2_bias, layers_4_weight, *_ = frame["w"]
    input_2, input_4, grad_input_5 = frame.pop("saved")
    grad_input_4 = torch.mm(grad_input_5, layers_4_weight)
    del grad_input_5
    grad_input_3 = torch.ops.aten.tanh_backward.grad_input(
        grad_input_4, input_4, grad_input=grad_input_4
    )
    del input_4
    grad_layers_2_weight = torch.mm(grad_input_3.t(), input_2)
    grad_layers_2_bias = torch.sum(grad_input_3, [0])
    return (
        {},
        [input_2, grad_input_3],
        (None, None, grad_layers_2_weight, grad_layers_2_bias, None, None),
    )


def backward_2(frame):
    x = frame["x"]
    layers_0_weight, layers_0_bias, layers_2_weight, *_ = frame["w"]
    input_2, grad_input_3 = frame.pop("saved")
    grad_input_2 = torch.mm(grad_input_3, layers_2_weight)
    del grad_input_3
    grad_input_1 = torch.ops.aten.tanh_backward.grad_input(
        grad_input_2, input_2, grad_input=grad_input_2
    )
    del input_2
    grad_layers_0_weight = torch.mm(grad_input_1.t(), x)
    grad_layers_0_bias = torch.sum(grad_input_1, [0])
    del grad_input_2, grad_input_1
    return {}, (grad_layers_0_weight, grad_layers_0_bias, None, None, None, None)
"""


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


def test_code_that_makes_gradients_behind_their_sum_is_refused() -> None:
    """Somebody has moved a gradient from one part of the backward to the next."""
    model, schedule = captured(perceptron), SCHEDULES["replicas"]
    artifact = artifact_with_segments(2, schedule, 3, *staged_with(model, schedule))
    verify_artifact(artifact)
    buckets = tuple(replace(bucket, segment=0) for bucket in artifact.plan.sync_spec.buckets)
    hasty = replace(artifact.plan, sync_spec=replace(artifact.plan.sync_spec, buckets=buckets))
    with pytest.raises(
        VerifyError, match=r"computes a gradient of .* in backward_weight_1, after it was reduced"
    ):
        verify_artifact(replace(artifact, plan=hasty))
