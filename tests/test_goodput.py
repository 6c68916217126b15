"""Goodput by the interval between checkpoints: the formula, the simulation, and the best interval."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipec.cli import app
from pipec.timeline.goodput import DEVICE_HOURS, Failing

RUNS = (
    Failing(mean=3600, save=60, pause=60, restart=300),
    Failing(mean=1000, save=200, pause=5, restart=30),
    Failing(mean=200, save=50, pause=50, restart=100),
)
FAILURES = 20_000


def lived(run: Failing, interval: float, seed: int) -> float:
    """The useful part of the time, with every restart, interval and save drawn one by one."""
    draw, useful, total, failures = random.Random(seed), 0.0, 0.0, 0
    while failures < FAILURES:
        left, made, complete, now = draw.expovariate(1 / run.mean), 0.0, 0.0, run.restart
        begun: list[tuple[float, float]] = []
        while now < left:
            made, now = made + interval, now + interval
            now = max(now, begun[-1][0] if begun else 0.0)  # the save before is over
            begun.append((now + run.save, made))
            now += run.pause
        complete = max((work for over, work in begun if over <= left), default=0.0)
        useful, total, failures = useful + complete, total + left, failures + 1
    return useful / total


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("interval", [20.0, 150.0, 900.0])
def test_what_is_expected_simulated_and_lived_is_the_same(run: Failing, interval: float) -> None:
    expected = run.goodput(interval)
    assert 0 <= expected < 1
    assert run.simulated(interval, FAILURES, seed=1) == pytest.approx(expected, abs=0.01)
    assert lived(run, interval, seed=2) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("run", RUNS)
def test_no_other_interval_is_better_than_the_best(run: Failing) -> None:
    best = run.best()
    others = [best * part for part in (0.2, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 5.0)]
    assert run.goodput(best) >= max(map(run.goodput, others))
    assert run.goodput(run.daly()) <= run.goodput(best)


def test_the_intervals_of_young_and_daly_are_the_best_where_failures_are_rare() -> None:
    run = Failing(mean=1e6, save=10, pause=10, restart=100)
    assert run.young() == pytest.approx((2 * 10 * 1e6) ** 0.5)
    assert run.young() == pytest.approx(run.best(), rel=0.01)
    assert run.daly() == pytest.approx(run.best(), rel=1e-4)


def test_the_command_has_the_rate_of_a_published_run() -> None:
    """16,384 devices of Llama 3 failed 419 times in 54 days."""
    asked = [
        "goodput",
        "--devices",
        "16384",
        "--step",
        "10",
        "--bytes",
        "6e12",
        "--checkpoint-bandwidth",
        "1e11",
    ]
    facts = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert facts["mean_seconds"] == pytest.approx(54 * 86400 / 419)
    assert facts["save"] == facts["pause"] == 60
    best = facts["best"]
    assert best["goodput"] >= max(each["goodput"] for each in facts["intervals"])
    assert best["interval_seconds"] == best["steps"] * 10
    run = Failing(DEVICE_HOURS * 3600 / 16384, 60, 60, 300)
    assert best["goodput"] == pytest.approx(run.goodput(best["interval_seconds"]))
    printed = CliRunner().invoke(app, asked).stdout
    assert "16,384 devices: a failure every 3.09 h" in printed
    assert f"{best['goodput']:.1%}" in next(line for line in printed.splitlines() if "best" in line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass --save, or --bytes and --checkpoint-bandwidth"),
        (["--save", "5", "--bytes", "1e9"], "what a checkpoint costs is not clear"),
        (["--save", "5", "--pause", "6"], "--pause 6 is longer than the save of 5 s"),
    ],
)
def test_a_save_without_a_duration_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["goodput", "--devices", "8", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


WIDE = """
import torch
from torch import nn
import pipec

def example():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        x = torch.empty(200, 16)
    return pipec.Example(model, (x,), target=torch.empty_like(x), loss_fn=nn.functional.mse_loss)
"""
BYTES = 4 * 4 * (16 * 16 + 16)


def test_a_plan_tells_how_often_to_save(tmp_path: Path) -> None:
    """With its own step, state and devices: weights, and two moments and a step of AdamW."""
    (tmp_path / "wide.py").write_text(WIDE)
    of_plan = [f"{tmp_path / 'wide.py'}:example", "--devices", "80", "--stages", "2", "--microbatches", "100"]
    saving = ["--checkpoint-bandwidth", "100", "--pause", "2", "--restart", "60", "--device-hours", "50"]
    asked = [*of_plan, "--optimizer", "AdamW", *saving, "--json"]
    facts = json.loads(CliRunner().invoke(app, ["plan", *asked]).stdout)
    told = facts["goodput"]
    assert told["save"] == (3 * BYTES + 4 * 8) / 100
    assert (told["pause"], told["restart"], told["mean_seconds"]) == (2, 60, 50 * 3600 / 80)
    steps, seconds = told["best"]["steps"], told["best"]["interval_seconds"]
    assert seconds == pytest.approx(steps * facts["makespan"])
    printed = CliRunner().invoke(app, ["schedule", *of_plan, *saving[:2]]).stdout
    assert "1f1b, 100 microbatches" in printed
    assert "rank 1, stage 0, one of 40, 18 others do the same" in printed
    assert "1f1b: 80 devices: a failure every 26.4 d" in printed
    assert "a checkpoint holds 4.35 kB: weights alone, as there is no --optimizer" in printed


@pytest.mark.parametrize("command", ["plan", "schedule"])
def test_how_to_save_is_refused_where_nobody_asked_how_often(command: str) -> None:
    result = CliRunner().invoke(app, [command, "cli_models:mlp", "--devices", "2", "--restart", "60"])
    assert result.exit_code == 2
    assert "pass --checkpoint-bandwidth with them" in " ".join(result.output.split())
