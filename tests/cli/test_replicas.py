"""The command line: replicas of stages, and steps that end with an update."""

from pathlib import Path

import pytest
import torch
from cli_models import mlp, momentum

import pipec
from tests.cli.test_cli import MLP, MODELS, pipec_cli, pipec_json

MOMENTUM = f"{MODELS}:momentum"
ONE_F_ONE_B = ("schedule", "1f1b", "--microbatches")


def test_a_schedule_runs_on_several_pipelines() -> None:
    facts = pipec_json(*ONE_F_ONE_B, 12, "--stages", 4, "--replicas", 2, "--reduce", 1)
    assert facts["replicas"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sums = [event for event in facts["events"] if event["op"] == "reduce_grad"]
    assert len(sums) == 8
    assert all(event["end"] - event["start"] == 1 for event in sums)
    alone = pipec_json(*ONE_F_ONE_B, 6, "--stages", 4)
    assert (facts["span"], facts["bubble_rate"]) == (alone["span"], alone["bubble_rate"])


def test_several_stages_of_a_rank_are_shared_like_one() -> None:
    interleaved = ("schedule", "interleaved-1f1b", "--stages", 2, "--microbatches")
    twice = pipec_json(*interleaved, 8, "--replicas", 2)
    assert twice["makespan"] == pipec_json(*interleaved, 4)["makespan"]


def test_unequal_replicas_run_round_robin() -> None:
    facts = pipec_json(*ONE_F_ONE_B, 6, "--replicas", "3-2-1")
    assert facts["replicas"] == [[0, 1, 2], [3, 4], [5]]
    forwards = {e["stage"]: e["end"] - e["start"] for e in facts["events"] if e["op"] == "forward"}
    assert forwards == {0: 3, 1: 2, 2: 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", "--replicas", "x"), "--replicas is 'x'; expected a number such as 2"),
        (("1f1b", "--replicas", "0"), "--replicas is '0'; expected a number"),
        (("1f1b", "--replicas", "auto"), "--replicas auto needs the costs of a model"),
        (("1f1b", "--replicas", "2-1", "--stages", 3), "--replicas 2-1 is for 2 stages, but --stages is 3"),
        (("1f1b", "--replicas", 9), "9 replicas need a microbatch each, but there are 8"),
        (("zb-h1", "--replicas", "2-1"), "'zb-h1' needs the same number of replicas for every stage"),
    ],
)
def test_replicas_that_cannot_be_are_refused(arguments: tuple[object, ...], message: str) -> None:
    assert message in pipec_cli("schedule", *arguments, status=2).stderr


def test_a_plan_has_the_replicas_and_the_update_that_were_asked_for() -> None:
    options = ("--replicas", "2-1", "--microbatches", 4, "--optimizer", "adamw", "--clip-grad-norm", 1)
    flags = ("--shard", "optimizer", "--gradient-dtype", "bf16", "--on-nan", "skip")
    plan = pipec_json("plan", MLP, "--devices", 3, *options, *flags)["plan"]
    assert plan["placement"] == [[0, 1], [2]]
    sync_spec = plan["sync_spec"]
    assert (sync_spec["updates"], sync_spec["clips"], sync_spec["shard"]) == (True, True, "optimizer")
    assert (sync_spec["gradient_dtype"], sync_spec["on_nan"]) == ("bfloat16", "skip")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", 0), "stages is 0; expected a whole number from 1"),
        (("--clip-grad-norm", -1), "clip_grad_norm is -1.0; expected a number above 0"),
        (("--on-nan", "no"), "'no' is not one of"),
    ],
)
def test_a_flag_is_checked_as_the_option_is(arguments: tuple[object, ...], message: str) -> None:
    assert message in pipec_cli("plan", "no_such_module:f", "--devices", 2, *arguments, status=2).stderr


def test_the_timeline_of_a_model_has_its_replicas(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    options = ("--devices", 2, "--stages", 1, "--microbatches", 2, "--optimizer", "SGD")
    pipec_cli("plan", MLP, *options, "-o", path)
    drawn = path.read_text(encoding="utf-8")
    assert "rank 1, stage 0, 2 of 2" in drawn
    assert "Σ gradient reduction" in drawn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose programs update: two replicas, with its tensors."""
    example, directory = mlp(), tmp_path_factory.mktemp("saved") / "artifact"
    updates = {"optimizer": momentum, "clip_grad_norm": 0.5}
    pipe = pipec.compile(example.model, 2, stages=1, microbatches=4, loss_fn=example.loss_fn, **updates)
    pipe.prepare(*example.args, target=example.target).save(directory, tensors=True)
    return directory


def test_an_artifact_runs_with_the_optimizer_it_is_given(saved: Path) -> None:
    options = ("--clip-grad-norm", 0.5, "--steps", 3)
    losses = pipec_json("run", saved, "--optimizer", MOMENTUM, *options)["losses"]
    assert losses != pipec_json("run", saved, "--optimizer", "SGD", *options)["losses"]
    torch.manual_seed(0)
    loaded = pipec.load(saved, optimizer=momentum, clip_grad_norm=0.5)
    batches = [[torch.randn(8, 16), torch.randn(8, 4)] for _ in range(3)]
    assert losses == [loaded.step(x, target=y).item() for x, y in batches]


def test_an_artifact_that_updates_is_traced(saved: Path, tmp_path: Path) -> None:
    options = ("--optimizer", "SGD", "--clip-grad-norm", 1, "--steps", 1)
    facts = pipec_json("run", saved, "--trace", *options, "-o", tmp_path / "step.html")
    for step in facts.values():
        assert {"reduce_grad", "grad_norm", "update"} <= {event["op"] for event in step["events"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "update the weights, but optimizer is None; pass"),
        (("--optimizer", "SGD"), "clip gradients, but clip_grad_norm is None"),
        (("--optimizer", "sgdd", "--clip-grad-norm", 1), "optimizer is 'sgdd'; expected one of"),
        (("--optimizer", f"{MOMENTUM}x", "--clip-grad-norm", 1), "momentumx does not exist in"),
    ],
)
def test_what_an_update_lacks_is_told(saved: Path, options: tuple[object, ...], message: str) -> None:
    assert message in pipec_cli("run", saved, *options, status=2).stderr
