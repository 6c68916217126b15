"""The command line: what it prints, its JSON, its exit status, and what it must not load.

tests/test_doc_blocks.py compares every command of the documentation with what it prints.
"""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from cli_models import mlp, momentum
from page_views import embedded
from slow_params import slow
from torch import nn
from typer.testing import CliRunner, Result

import pipec
from pipec.cli import app
from pipec.cli.target import load_example
from pipec.ir import Plan

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parents[1] / "helpers" / "cli_models.py"
MLP, MOMENTUM = f"{MODELS}:mlp", f"{MODELS}:momentum"
ONE_F_ONE_B = ("schedule", "1f1b", "--microbatches")
COMPILER = ("torch._dynamo", "pipec.capture", "pipec.passes", "pipec.planner", "pipec.codegen")


def pipec_cli(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == status, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def pipec_json(*arguments: object) -> dict[str, object]:
    facts = json.loads(pipec_cli(*arguments, "--json").stdout)
    assert isinstance(facts, dict)
    return facts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of ``mlp`` on two stages, written by the command line, without tensors."""
    directory = tmp_path_factory.mktemp("cli") / "artifact"
    output = pipec_cli("plan", MLP, "--devices", 2, "--microbatches", 4, "--output", directory).stdout
    assert output == f"wrote plan, code and programs to {directory}\n"
    return directory


# plan


def test_plan_as_json_has_the_documented_keys_and_the_code_that_it_would_write(directory: Path) -> None:
    facts = pipec_json("plan", MLP, "--devices", 2, "--microbatches", 4, "--code")
    assert set(facts) == {"plan", "makespan", "bubble_rate", "peak_bytes", "sources"}
    assert set(facts["plan"]) == {field.name for field in fields(Plan)}
    assert len(facts["peak_bytes"]) == 2
    assert facts["sources"] == {str(k): (directory / f"stage_{k}.py").read_text() for k in range(2)}


def test_a_target_is_a_module_of_the_current_folder_or_a_file_that_replaces_no_loaded_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "json.py").write_text(MODELS.read_text())
    for target in ("tests.helpers.cli_models:mlp", f"{tmp_path / 'json.py'}:mlp"):
        assert load_example(target).args[0].shape == (8, 16)
    assert sys.modules["json"] is json


def test_plan_draws_the_step_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    options = ("--devices", 2, "--schedule", "gpipe", "--microbatches", 4)
    assert pipec_cli("plan", MLP, *options, "-o", path).stdout == f"wrote {path}\n"
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    counted = {next(iter(event["args"])) for event in events if event["ph"] == "C"}
    assert counted == {"microbatches", "parameters"}


# schedule


def test_schedule_as_json_follows_the_costs() -> None:
    costs = ("--forward", 2, "--backward-input", 3, "--backward-weight", 1, "--communication", 0.5)
    facts = pipec_json("schedule", "1f1b", "--stages", 2, "--microbatches", 1, *costs)
    events, path = facts.pop("events"), facts.pop("critical_path")
    assert facts.pop("lower_and_verify_seconds") > 0
    (first, second), rest = facts.pop("waits"), {"busy": 6.0, "unattributed_idle": 0.0}
    gradient = {"rank": 1, "stage": 1, "what": "gradient", "time": 7.0}
    activation = {"rank": 0, "stage": 0, "what": "activation", "time": 2.5}
    assert first == {"rank": 0, "waiting": 7.0, "trailing_idle": 0.0, "for": [gradient], **rest}
    assert second == {"rank": 1, "waiting": 2.5, "trailing_idle": 4.5, "for": [activation], **rest}
    assert facts == {
        "schedule": "1f1b",
        "num_microbatches": 1,
        "unit": "units",
        "makespan": 13.0,  # forward, message, forward and backward, message, backward
        "span": 13.0,
        "bubble_rate": 1 - 12 / 26,
        "peak_in_flight": [1, 1],
        "num_events": 6,
        "replicas": [[0], [1]],
    }
    assert events[0] == {"rank": 0, "op": "forward", "stage": 0, "microbatch": 0, "start": 0.0, "end": 2.0}
    assert [event["op"] for event in path] == ["forward", "send", "forward", "backward", "send", "backward"]
    assert all(event in events for event in path)


def test_a_step_of_very_many_events_is_told_by_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.timeline.report.MOST_EVENTS", 5)
    facts = pipec_json("schedule", "1f1b", "--stages", 2, "--microbatches", 1)
    assert (facts["num_events"], len(facts["critical_path"])) == (6, 6)
    assert "events" not in facts


def test_schedule_searches_within_a_memory_limit() -> None:
    limit = ("--memory-backward", 2, "--memory-weight", 1, "--memory-limit", 6)
    facts = pipec_json("schedule", "zb-2p", "--stages", 4, "--microbatches", 8, *limit)
    assert facts["span"] <= 31  # the optimum for three whole microbatches


def test_schedule_of_a_file_of_compute_orders(tmp_path: Path) -> None:
    path = tmp_path / "model:mine.csv"
    path.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    facts = pipec_json("schedule", path, "--stages", 2, "--microbatches", 2)
    assert (facts["makespan"], facts["bubble_rate"]) == (7.0, 1 - 6 / 7)


@pytest.mark.slow
def test_schedule_shows_another_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    facts = pipec_json("schedule", "gpipe", "--stages", 3, "--compare", "zb-h1", "--output", page)
    assert (facts["makespan"], facts["compare"]["schedule"]) == (30.0, "zb-h1")
    assert facts["compare"]["makespan"] < facts["makespan"]
    assert "gpipe and zb-h1, 8 microbatches" in page.read_text(encoding="utf-8")


# check


def test_check_accepts_what_plan_wrote(directory: Path) -> None:
    facts = pipec_json("check", directory)
    assert set(facts) == {"kind", "stages", "ranks", "instructions"}
    assert (facts["kind"], facts["stages"], facts["ranks"]) == ("artifact", 2, 2)
    assert "2 stages, 2 ranks" in pipec_cli("check", directory).stdout


# run


def test_run_prints_a_loss_per_step(directory: Path) -> None:
    heading, *steps = pipec_cli("run", directory, "--steps", 2).stdout.splitlines()
    assert heading == (
        "1f1b, 4 microbatches of 2 on 2 ranks; 8 tensors were not saved and are random; random inputs; seed 0"
    )
    assert [line.split()[:2] for line in steps] == [["step", "0"], ["step", "1"]]


def test_run_depends_on_the_seed_alone(directory: Path) -> None:
    first, again, other = (pipec_json("run", directory, "--steps", 2, "--seed", k) for k in (1, 1, 2))
    assert set(first) == {"losses", "seconds", "random_tensors"}
    assert first["losses"] == again["losses"] != other["losses"]
    assert len(first["losses"]) == len(first["seconds"]) == 2
    assert first["losses"][0] != first["losses"][1], "each step draws its own batch"


def test_run_repeats_a_tensor_that_was_passed_twice(tmp_path: Path) -> None:
    autoencoder = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    pipe = pipec.compile(autoencoder, devices=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 4)
    pipe.prepare(x, target=x).save(tmp_path / "artifact")
    assert pipec_json("run", tmp_path / "artifact")["losses"]


@pytest.mark.slow
def test_run_draws_integers_below_int_high(tmp_path: Path) -> None:
    pipec_cli("plan", f"{MODELS}:tagger", "--devices", 2, "-o", tmp_path / "artifact")
    assert pipec_json("run", tmp_path / "artifact", "--int-high", 3)["losses"]
    message = pipec_cli("run", tmp_path / "artifact", "--int-high", 1000, status=1).stderr
    assert "index out of range" in message or "out of bounds" in message


# processes


def spawn(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [(("schedule", "1f1b"), ("torch",)), slow(("run", "DIR"), COMPILER)],
    ids=" ".join,
)
def test_a_command_loads_only_what_it_needs(
    directory: Path, arguments: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    code = (
        "import atexit, sys; from pipec.cli import main\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\nmain()"
    )
    done = spawn("-c", code, *(str(directory) if word == "DIR" else word for word in arguments))
    assert done.returncode == 0, done.stderr
    assert "pipec.cli" in done.stderr.split()
    assert set(unwanted).isdisjoint(done.stderr.split())


def test_a_failure_is_one_message_on_stderr(tmp_path: Path) -> None:
    done = spawn("-m", "pipec", "check", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    what = "is no artifact and no checkpoint: it holds neither plan.json nor checkpoint.pt"
    assert done.stderr == f"error: {tmp_path} {what}\n"


@pytest.mark.slow
def test_run_gives_the_same_losses_under_torchrun(directory: Path) -> None:
    alone = pipec_json("run", directory, "--steps", 2)
    done = spawn(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pipec"),
        *("run", str(directory), "--steps", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == alone["losses"]


# replicas, and steps that end with an update


def test_a_schedule_runs_on_several_pipelines() -> None:
    facts = pipec_json(*ONE_F_ONE_B, 12, "--stages", 4, "--replicas", 2, "--reduce", 1)
    assert facts["replicas"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sums = [event for event in facts["events"] if event["op"] == "reduce_grad"]
    assert len(sums) == 8
    assert all(event["end"] - event["start"] == 1 for event in sums)
    alone = pipec_json(*ONE_F_ONE_B, 6, "--stages", 4)
    assert (facts["span"], facts["bubble_rate"]) == (alone["span"], alone["bubble_rate"])


def test_unequal_replicas_run_round_robin() -> None:
    facts = pipec_json(*ONE_F_ONE_B, 6, "--replicas", "3-2-1")
    assert facts["replicas"] == [[0, 1, 2], [3, 4], [5]]
    forwards = {e["stage"]: e["end"] - e["start"] for e in facts["events"] if e["op"] == "forward"}
    assert forwards == {0: 3, 1: 2, 2: 1}


def test_a_plan_has_the_replicas_and_the_update_that_were_asked_for() -> None:
    options = ("--replicas", "2-1", "--microbatches", 4, "--optimizer", "adamw", "--clip-grad-norm", 1)
    flags = ("--shard", "optimizer", "--gradient-dtype", "bf16", "--on-nan", "skip")
    plan = pipec_json("plan", MLP, "--devices", 3, *options, *flags)["plan"]
    assert plan["placement"] == [[0, 1], [2]]
    sync_spec = plan["sync_spec"]
    assert (sync_spec["updates"], sync_spec["clips"], sync_spec["shard"]) == (True, True, "optimizer")
    assert (sync_spec["gradient_dtype"], sync_spec["on_nan"]) == ("bfloat16", "skip")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of programs that update: two replicas, with its tensors."""
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
    page = tmp_path / "step.html"
    options = ("--optimizer", "SGD", "--clip-grad-norm", 1, "--steps", 2)
    facts = pipec_json("run", saved, "--trace", *options, "-o", page)
    assert facts["planned"].keys() == facts["measured"].keys()
    assert facts["measured"]["makespan"] > 0
    for step in facts.values():
        assert {"reduce_grad", "grad_norm", "update"} <= {event["op"] for event in step["events"]}
    names = [step["name"] for step in embedded(page.read_text())["timelines"]]
    assert names == ["planned", "measured", "step 2", "step 3"]


# refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "model.py", "--devices", 2), "expected path/to/file.py:factory or package.module:factory"),
        (("plan", "nowhere/model.py:factory", "--devices", 2), "there is no file nowhere/model.py"),
        (("plan", "no_such_package.model:factory", "--devices", 2), "there is no module no_such_package"),
        (("plan", f"{MODELS}:absent", "--devices", 2), "absent does not exist"),
        (("plan", f"{MODELS}:NOT_A_FACTORY", "--devices", 2), "NOT_A_FACTORY is not callable"),
        (("plan", f"{MODELS}:broken", "--devices", 2), f"ZeroDivisionError: division by zero ({MODELS}:"),
        (("plan", f"{MODELS}:number", "--devices", 2), "returned int; expected pipec.Example(model, args"),
        (("plan", MLP, "--devices", 2, "--recompute", "some"), "'some' is not one of"),
        (("plan", "absent:f", "--devices", 2, "--stages", 0), "stages is 0; expected a whole number from 1"),
        (("plan", MLP), "give it with --devices, or a file with --topology"),
        (("plan", ROOT, "--devices", 2), f"{ROOT} is a folder: pipec check {ROOT} says what it holds"),
        (("schedule", "gpip"), "unknown schedule 'gpip'; did you mean 'gpipe'?"),
        (("schedule", "gpipe", "--stages", 0), "Invalid value for '--stages'"),
        (("schedule", "gpipe", "--output", "timeline.pdf"), "expected a name that ends in .html, .json,"),
        (("schedule", "gpipe", "--devices", 4), "No such option: --devices"),
        (("schedule", MLP), f"pipec plan {MLP} --devices 4 -o step.html draws its step"),
        (("schedule", ROOT), f"pipec run {ROOT} --trace -o page.html draws the steps of a saved artifact"),
        (("schedule", "gpipe", "--compare", "gpipe"), "--compare names 'gpipe' again; expected another"),
        (("schedule", "gpipe", "--compare", "1f1b", "-o", "a.svg"), "a .svg file shows one step"),
        (("schedule", "1f1b", "--replicas", "x"), "--replicas is 'x'; expected a number such as 2"),
        (("schedule", "1f1b", "--replicas", "0"), "--replicas is '0'; expected a number"),
        (("schedule", "1f1b", "--replicas", "auto"), "--replicas auto needs the costs of a model"),
        (("schedule", "1f1b", "--replicas", "2-1", "--stages", 3), "--replicas 2-1 is for 2 stages, but"),
        (("schedule", "1f1b", "--replicas", 9), "9 replicas need a microbatch each, but there are 8"),
        (("schedule", "zb-h1", "--replicas", "2-1"), "'zb-h1' needs the same number of replicas for every"),
        (("plan", MLP, "--devices", 2, "--optimizer", "sgdd"), "optimizer is 'sgdd'; expected one of"),
        (("plan", MLP, "--devices", 2, "--optimizer", f"{MOMENTUM}x"), "momentumx does not exist in"),
        (("run", ROOT, "-o", "x.html"), "give --trace, too"),
        (("dump", MLP), "there is no command dump any more; pipec plan TARGET --code prints the code"),
        (("trace", "DIR", "-o", "x.html"), "pipec run FOLDER --trace -o page.html"),
        (("checkpoint", "show", "DIR"), "pipec check DIR does the same"),
    ],
)
def test_bad_usage_tells_the_expected_usage(arguments: tuple[object, ...], message: str) -> None:
    result = pipec_cli(*arguments, status=2)
    assert message in result.stderr
    assert result.stdout == ""


def test_what_cannot_be_planned_says_why() -> None:
    told = pipec_cli("plan", MLP, "--devices", 99, status=1).stderr
    assert "8 operators are too few for a stage on each of 99 devices" in told
