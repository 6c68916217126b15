"""Models on devices and links that differ, and in limited memory: where they are cut, and that they train."""

import copy
import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec
from pipec.cli import app
from pipec.errors import InputError, PlanError
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Device, Level, Topology, equal_devices, read_topology
from pipec.ir import one_rank_per_stage, rank_of
from pipec.pipeline import Pipeline

MODELS = Path(__file__).parents[1] / "helpers" / "cli_models.py"
FAST = 1e15
"""Bytes per second of a link whose time does not count."""

HOSTS = """
[[devices]]
count = 2
speed = 1.0

[[devices]]
speed = 3.0

[[levels]]
size = 3
bytes_per_second = 1e10
"""


def even() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))


def compiled(model: nn.Module, topology: Topology, **options: Any) -> Pipeline:
    options = {"microbatches": 4, **options}
    return pipec.compile(model, len(topology.devices), loss_fn=F.mse_loss, topology=topology, **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 32, 64, generator=generator), torch.randn(16, 32, 64, generator=generator)


def different(*speeds: float) -> Topology:
    return Topology(tuple(Device(speed=speed) for speed in speeds), (Level(len(speeds), FAST),))


@pytest.mark.slow
def test_a_faster_device_gets_more_work_wherever_it_is() -> None:
    x, y = batch()
    for speeds in ((4.0, 1.0, 1.0), (1.0, 4.0, 1.0), (1.0, 1.0, 4.0)):
        pipe = compiled(even(), different(*speeds)).prepare(x, target=y)
        stages = sorted(pipe.plan.stages, key=lambda stage: rank_of(pipe.plan.placement, stage.index))
        found = [stage.cost.flops for stage in stages]
        assert max(found) == found[speeds.index(4.0)]
        assert max(found) > 2.5 * min(found)
        assert sorted(pipe.plan.placement) == [(0,), (1,), (2,)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranks_in_another_order_train_and_evaluate_as_the_unsplit_model(schedule: str) -> None:
    x, y = batch()
    model = even()
    unsplit = copy.deepcopy(model)
    pipe = compiled(model, different(1.0, 1.0, 4.0), schedule=schedule)
    found = StepResult.of(pipe.step(x, target=y), model)
    assert pipe.plan.placement != one_rank_per_stage((0, 1, 2))
    given = {"x": x, "y": y}
    loss = unsplit_step(lambda x, y: F.mse_loss(unsplit(x), y), given, [4] * 4)
    assert_equal(found, StepResult.of(loss, unsplit))
    assert torch.equal(pipe(x), torch.cat([unsplit(rows) for rows in x.split(4)]).detach())
    assert pipe.eval_step(x, target=y) == loss


@pytest.mark.slow
def test_what_crosses_hosts_takes_the_time_of_the_slow_link() -> None:
    x, y = batch()
    topology = Topology((Device(),) * 4, (Level(2, FAST), Level(2, 1e6, 1e-3)))
    plan = compiled(even(), topology).prepare(x, target=y).plan
    seconds = {
        (link.source, link.target): time
        for link, time in zip(plan.links, plan.link_seconds, strict=True)
        if link.payload == "activation"
    }
    num_bytes = plan.microbatch_size * 32 * 64 * 4
    assert seconds[1, 2] == pytest.approx(1e-3 + num_bytes / 1e6)
    assert seconds[0, 1] == seconds[2, 3] == pytest.approx(num_bytes / FAST)


def test_a_topology_that_does_not_fit_is_refused() -> None:
    three = equal_devices(3, LinkModel(1e9, 0.0))
    with pytest.raises(InputError, match="the topology has 3 devices, but there are 2 ranks"):
        pipec.compile(even(), 2, loss_fn=F.mse_loss, topology=three)
    with pytest.raises(PlanError, match=r"absent.toml is not a topology"):
        pipec.compile(even(), 2, loss_fn=F.mse_loss, topology="absent.toml")


EQUAL = (Device(), Device())
PAIR = (Level(2, FAST),)


@pytest.mark.parametrize(
    ("devices", "levels", "message"),
    [
        ((Device(), Device(speed=0.0)), PAIR, "device 1 has inf bytes of memory and speed 0.0"),
        ((Device(speed=math.inf), Device()), PAIR, "device 0 has .* speed inf"),
        ((Device(memory_bytes=0.0), Device()), PAIR, "device 0 has 0.0 bytes of memory"),
        ((Device(memory_bytes=math.nan), Device()), PAIR, "device 0 has nan bytes of memory"),
        (EQUAL, (Level(2, FAST), Level(0, FAST)), "level 1 joins 0 members: expected a whole number"),
        (EQUAL, (Level(2, FAST), Level(2.0, FAST)), r"level 1 joins 2\.0 members: expected a whole number"),
        (EQUAL, (Level(2, 0.0),), "level 0 carries 0.0 bytes per second after 0.0 seconds"),
        (EQUAL, (Level(2, FAST, -1.0),), "level 0 carries .* after -1.0 seconds"),
        (EQUAL, (Level(2, FAST, math.inf),), "level 0 carries .* after inf seconds"),
        ((Device(),) * 3, PAIR, "lists 3 devices, but 2 levels join 2: device 2 cannot be reached"),
        (EQUAL, (Level(2, FAST), Level(2, FAST)), r"lists 2 devices, but 2 x 2 levels join 4\. Make"),
        (EQUAL, (), "lists 2 devices, but no levels join 1: device 1 cannot be reached"),
    ],
)
def test_figures_that_make_no_topology_are_refused(
    devices: tuple[Device, ...], levels: tuple[Level, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Topology(devices, levels)


def test_the_slowest_link_has_the_lowest_rate_and_the_longest_latency() -> None:
    topology = Topology((Device(),) * 4, (Level(2, 1e9, 1e-6), Level(2, 1e10, 1e-4)))
    assert topology.slowest_link == LinkModel(1e9, 1e-4)
    assert topology.single_level().levels == (Level(4, 1e9, 1e-4),)


def test_the_first_devices_are_joined_by_their_slowest_link() -> None:
    whole = Topology((Device(),) * 8, (Level(2, 3e9), Level(2, 2e9, 1e-6), Level(2, 1e9)))
    assert whole.first_devices(8) == whole
    assert whole.first_devices(2) == Topology((Device(),) * 2, (Level(2, 3e9),))
    assert whole.first_devices(3) == Topology((Device(),) * 3, (Level(3, 2e9, 1e-6),))
    assert whole.first_devices(5).levels == (Level(5, 1e9),)
    assert whole.first_devices(6).levels == (Level(2, 3e9), Level(3, 1e9))


def test_a_file_of_a_topology(tmp_path: Path) -> None:
    """In TOML and in JSON, and for a command."""
    toml, as_json = tmp_path / "hosts.toml", tmp_path / "hosts.json"
    toml.write_text(HOSTS, encoding="utf-8")
    as_json.write_text(json.dumps(tomllib.loads(HOSTS)), encoding="utf-8")
    expected = Topology((Device(), Device(), Device(speed=3.0)), (Level(3, 1e10),))
    assert read_topology(toml) == read_topology(as_json) == expected
    words = ["plan", f"{MODELS}:mlp", "--topology", str(toml), "--microbatches", "4"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "3 stages on 3 ranks, 1f1b, 4 microbatches of 2" in result.output


@pytest.mark.parametrize("text", ["devices = 3", HOSTS.replace("speed", "flavour"), "levels = []"])
def test_a_file_that_is_no_topology_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=r"hosts\.toml is not a topology: .* Expected devices"):
        read_topology(tmp_path / "hosts.toml")


@given(st.lists(st.integers(0, 23), min_size=2, unique=True))
def test_the_links_among_devices_are_those_between_any_two(devices: list[int]) -> None:
    topology = Topology((Device(),) * 24, (Level(2, 4e9), Level(3, 2e9), Level(4, 1e9)))
    pairs = itertools.combinations(devices, 2)
    assert {level.link for level in topology.levels_among(devices)} == {
        topology.link_between(*pair) for pair in pairs
    }
