"""Profiles: what is measured, kept, read back, refused, and what a plan makes of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pipec
from pipec.cli import app
from pipec.cost.profile import Profile, load_profile
from pipec.errors import InputError
from pipec.ir import Phase

X, Y = torch.randn(8, 64), torch.randn(8, 64)


def layers_of(num_layers: int = 6) -> nn.Module:
    """The formulas find every layer alike; a profile may say otherwise."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)))


def example(model: nn.Module) -> pipec.Example:
    return pipec.Example(model, (X,), target=Y, loss_fn=nn.functional.mse_loss)


def measure(model: nn.Module, repeats: int = 1) -> Profile:
    return pipec.profile(example(model), microbatch_size=4, repeats=repeats)


def compiled(model: nn.Module, profile: Profile | Path, microbatches: int = 2) -> pipec.Pipeline:
    pipe = pipec.compile(
        model, devices=2, microbatches=microbatches, loss_fn=nn.functional.mse_loss, costs=profile
    )
    return pipe.prepare(X, target=Y)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure(layers_of())


def test_every_operator_has_its_backward(profile: Profile) -> None:
    layers = [op for op in profile.operators if op.module.endswith(".0")]
    assert [op.module for op in layers] == [f"{k}.0" for k in range(6)]
    assert all(op.seconds("forward") > 0 and op.seconds("backward") > 0 for op in layers)


def slowed(profile: Profile, module: str, seconds: float) -> Profile:
    """The same profile with one module's nodes taking ``seconds`` each."""

    def changed(op: Any) -> Any:
        nodes = tuple(replace(node, seconds=seconds) for node in op.nodes)
        return replace(op, nodes=nodes) if op.module == module else op

    return replace(profile, operators=tuple(map(changed, profile.operators)))


@pytest.mark.parametrize("slow", [0, 5])
def test_stages_are_cut_by_the_profile(profile: Profile, slow: int, tmp_path: Path) -> None:
    """A layer that takes longer than all others together has a stage to itself."""
    path = tmp_path / "profile.json"
    slowed(profile, f"{slow}.0", 1.0).save(path)
    stages = compiled(layers_of(), path).plan.stages
    alone = stages[0] if slow == 0 else stages[1]
    weights = [fqn for fqn in alone.parameters if fqn.endswith("weight")]
    assert weights == [f"{slow}.0.weight"]
    assert sum(alone.cost.seconds.values()) >= 4.0


def test_a_plan_adds_up_to_its_profile(profile: Profile) -> None:
    stages = compiled(layers_of(), profile).plan.stages
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        measured = sum(op.seconds(phase) for op in profile.operators)
        assert sum(s.cost.seconds[phase] for s in stages) == pytest.approx(measured)


def test_a_profile_of_another_model_is_refused(profile: Profile) -> None:
    with pytest.raises(InputError, match=r"the profile is of another model.* Make one of this model with"):
        compiled(layers_of(5), profile)


def operators_with(seconds: float) -> list[dict[str, object]]:
    node = {"name": "mm", "calls": "mm", "phase": "forward", "seconds": seconds}
    return [{"name": "a", "module": "", "nodes": [node]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "is a profile of version 99, and this pipec reads version 1"),
        ({"format": "recipe"}, "is no profile of pipec"),
        ({"operators": 3}, "is a damaged profile"),
        ({"microbatch_size": None}, "is a damaged profile"),
        ({"operators": operators_with(-1)}, "node mm took -1 seconds; expected 0 or more"),
        ({"operators": operators_with(float("nan"))}, "node mm took nan seconds"),
    ],
)
def test_a_damaged_file_is_refused(
    profile: Profile, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        pipec.compile(layers_of(), devices=2, costs=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch_size": 9}, "microbatch_size is 9; expected 1 to the 8 rows"),
        ({"repeats": 0}, "repeats is 0"),
        ({"ranks": 0}, "ranks is 0"),
        ({"device": "meta"}, "the meta device computes nothing"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipec.profile(example(layers_of()), **options)


def test_the_command_line_measures_and_plans(tmp_path: Path) -> None:
    target, path = f"{Path(__file__).parents[1] / 'helpers' / 'cli_models.py'}:mlp", tmp_path / "profile.json"
    options = ["-o", str(path), "--repeats", "1", "--ranks", "2"]
    made = CliRunner().invoke(app, ["profile", target, *options])
    assert made.exit_code == 0, made.output
    assert re.search(r"microbatches of 1: forward [1-9].* backward [1-9]", made.stdout), made.stdout
    assert load_profile(path).microbatch_size == 1
    planned = CliRunner().invoke(app, ["plan", target, "--devices", "2", "--costs", str(path), "--json"])
    assert planned.exit_code == 0, planned.output
    stages = json.loads(planned.stdout)["plan"]["stages"]
    assert sum(s["cost"]["seconds"]["forward"] for s in stages) > 0


def test_profiling_leaves_the_model_as_it_was() -> None:
    """Two layers share a weight, and a batch norm changes its statistics."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
