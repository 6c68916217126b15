"""``benchmarks/plan_graph.py``: a published graph becomes an ordinary plan, which is simulated and drawn."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from from_graph import plan_from_operator_graph
from graph_files import PLACEMENT, PROFILE
from pipedream_graph import parse_pipedream_graph
from plan_graph import main

from pipec.errors import InputError
from pipec.hardware.topology import Device, Level, Topology, uniform_topology
from pipec.ir import Payload, Phase
from pipec.planner.partition import Partition, PartitionStage
from pipec.schedules import gpipe, make_schedule

TWO = ("--devices", "2", "--bandwidth", "1e9")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the script prints."""

    def run(*arguments: object) -> str:
        main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def facts_of(planned: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: json.loads(planned(*arguments, "--json"))


# What the planner says


def test_a_profile_is_planned(profile: Path, facts_of: Callable[..., dict[str, Any]]) -> None:
    facts = facts_of(profile, *TWO)
    # Between n2 and n3, the value of n2 and its gradient take 2 seconds.
    assert facts["seconds"] == pytest.approx(3.0)
    assert [stage["operators"] for stage in facts["stages"]] == [["n2"], ["n3", "n5"]]
    assert [stage["replicas"] for stage in facts["stages"]] == [1, 1]
    assert [stage["seconds"] for stage in facts["stages"]] == pytest.approx([3.0, 3.0])
    assert [stage["communication_seconds"] for stage in facts["stages"]] == pytest.approx([0.0, 2.0])
    assert facts["lower_bound_seconds"] == facts["seconds"]
    assert facts["cost_model"] == "pipedream"


def test_devices_come_by_level_or_from_a_file(
    profile: Path, tmp_path: Path, facts_of: Callable[..., dict[str, Any]]
) -> None:
    inside_out = facts_of(profile, "--devices", "2x2", "--bandwidth", "4e9,1e9")
    assert inside_out["seconds"] == pytest.approx(2.0)
    level = {"size": 2, "bytes_per_second": 1e9}
    (tmp_path / "two.json").write_text(json.dumps({"devices": [{"count": 2}], "levels": [level]}))
    assert facts_of(profile, "--topology", tmp_path / "two.json")["seconds"] == pytest.approx(3.0)


def test_what_bounds_the_step_is_said(profile: Path, planned: Callable[..., str]) -> None:
    operators = planned(profile, "--devices", 1, "--bandwidth", "1e9")
    assert "stage 0 bounds the step by its operators; links and all-reduce take 0 s" in operators
    alone = planned(profile, *TWO)
    assert "stage 0 bounds the step by its operators, all in one operator" in alone
    links = planned(profile, "--devices", 2, "--bandwidth", "0.6e9")
    assert "stage 1 bounds the step, most of all by 3.33 s of links and all-reduce" in links


def test_another_cost_model_is_taken(profile: Path, facts_of: Callable[..., dict[str, Any]]) -> None:
    facts = facts_of(profile, "--devices", 2, "--bandwidth", "0.6e9", "--cost-model", "pipec")
    assert (facts["seconds"], facts["cost_model"]) == (pytest.approx(3.0), "pipec")


# The plan that comes of it


def test_a_stage_has_its_operators_bytes_and_seconds_by_phase(
    profile: Path, facts_of: Callable[..., dict[str, Any]]
) -> None:
    plan = facts_of(profile, *TWO)["plan"]
    first, second = plan["stages"]
    assert (first["modules"], second["modules"]) == (["n2"], ["n3", "n5"])
    assert (first["last_operator"], second["first_operator"], second["last_operator"]) == (0, 1, 2)
    assert [stage["cost"]["seconds"] for stage in (first, second)] == [
        {"forward": 1.0, "backward": 2.0},
        {"forward": 1.5, "backward": 1.5},
    ]
    assert [stage["cost"]["memory"]["weights"] for stage in (first, second)] == [8, 2_000_000_000]
    assert [stage["cost"]["memory"]["saved"] for stage in (first, second)] == [10**9, 10**9 + 1]


def test_values_cross_stages_once_and_their_gradients_come_back(
    profile: Path, facts_of: Callable[..., dict[str, Any]]
) -> None:
    plan = facts_of(profile, *TWO)["plan"]
    there, back = plan["links"]
    assert (there["source"], there["target"], there["payload"]) == (0, 1, "activation")
    assert (back["source"], back["target"], back["payload"]) == (1, 0, "gradient")
    assert there["values"] == [{"name": "n2", "dtype": "uint8", "shape": [10**9]}]
    assert plan["link_seconds"] == [1.0, 1.0]


def test_the_step_is_simulated(profile: Path, facts_of: Callable[..., dict[str, Any]]) -> None:
    one = facts_of(profile, *TWO, "--microbatches", 1)
    assert one["makespan"] == 1 + 1 + 3 + 1 + 2  # forward, message, forward and backward, message, backward
    default = facts_of(profile, *TWO)
    assert (default["plan"]["schedule"], default["plan"]["num_microbatches"]) == ("1f1b", 8)
    assert facts_of(profile, *TWO, "--schedule", "gpipe")["makespan"] != default["makespan"]


def test_a_training_graph_has_devices_and_backward_nodes_of_its_own(
    placement: Path, planned: Callable[..., str], facts_of: Callable[..., dict[str, Any]]
) -> None:
    facts = facts_of(placement)
    # A device pays for what it sends and for what it receives.
    assert [stage["operators"] for stage in facts["stages"]] == [["1", "4"], ["2", "3"]]
    assert (facts["seconds"], facts["cost_model"]) == (pytest.approx(5.75e-3), "max-load")
    seconds = [stage["cost"]["seconds"] for stage in facts["plan"]["stages"]]
    assert [cost["forward"] for cost in seconds] == pytest.approx([0.001, 0.002])
    assert [cost["backward"] for cost in seconds] == pytest.approx([0.004, 0.003])
    assert facts["plan"]["link_seconds"] == pytest.approx([0.0005, 0.00025])
    assert facts["peak_bytes"] == [50, 50]
    assert "sends and saves are shown as 0, all memory as weights" in planned(placement)


HOSTS = Topology((Device(), Device(), Device(), Device(speed=0.5)), (Level(2, 4e9), Level(2, 1e9)))


def test_several_devices_are_one_rank_as_fast_as_their_slowest_times_their_number() -> None:
    graph = parse_pipedream_graph(PROFILE)
    stages = (
        PartitionStage((0,), (0, 1, 2), 1.0, 0.0, 0.0, 0.0, 1),
        PartitionStage((1, 2), (3,), 6.0, 0.0, 0.0, 0.0, 1),
    )
    plan = plan_from_operator_graph(graph, HOSTS, Partition(stages, 0.0), gpipe(2, 4))
    first, second = (stage.cost.seconds for stage in plan.stages)
    assert first == {Phase.FORWARD: pytest.approx(1 / 3), Phase.BACKWARD: pytest.approx(2 / 3)}
    assert second == {Phase.FORWARD: 3.0, Phase.BACKWARD: 3.0}
    # Device 2 shares a host with device 3, devices 0 and 1 do not: the slow link counts.
    assert plan.link_seconds == (1.0, 1.0)
    assert [link.payload for link in plan.links] == [Payload.ACTIVATION, Payload.GRADIENT]


def test_pairs_of_devices_exchange_messages_at_the_same_time() -> None:
    stages = (
        PartitionStage((0,), (0, 1), 1.5, 0.0, 0.0, 0.0, 1),
        PartitionStage((1, 2), (2, 3), 3.0, 0.0, 0.0, 0.0, 1),
    )
    plan = plan_from_operator_graph(
        parse_pipedream_graph(PROFILE), HOSTS, Partition(stages, 0.0), gpipe(2, 4)
    )
    assert plan.link_seconds == (0.5, 0.5)


def test_the_planner_the_simulator_and_the_devices_are_named(
    profile: Path, planned: Callable[..., str]
) -> None:
    straight = planned(profile, *TWO, "--microbatches", 1)
    assert straight.startswith("2 stages on 2 ranks, 1f1b, 1 microbatches of 1\n")
    assert "planner, cost model pipedream: 3 s a microbatch in the slowest stage" in straight
    assert "simulator: 8 s a microbatch, the step divided by 1; messages travel beside operators" in straight
    assert "devices of each stage" not in straight
    assert "devices of each stage: 4; a stage on r" in planned(profile, "--devices", 4, "--bandwidth", "50e9")


def test_the_step_is_drawn(profile: Path, tmp_path: Path, planned: Callable[..., str]) -> None:
    planned(profile, *TWO, "--output", tmp_path / "step.html")
    assert "1f1b, 8 microbatches" in (tmp_path / "step.html").read_text()


# What does not fit


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zb-h1", "runs input and weight gradients apart, but the graph's file has the time of whole"),
        ("interleaved-1f1b", "has 4 stages on 2 ranks, but the graph is planned with one stage on each of 2"),
    ],
)
def test_a_schedule_that_needs_more_than_the_file_says_is_refused(name: str, message: str) -> None:
    stages = (
        PartitionStage((0,), (0,), 3.0, 0.0, 0.0, 0.0, 2),
        PartitionStage((1, 2), (1,), 3.0, 0.0, 0.0, 0.0, 1),
    )
    with pytest.raises(InputError, match=message):
        plan_from_operator_graph(
            parse_pipedream_graph(PROFILE),
            uniform_topology([2], [1e9]),
            Partition(stages, 3.0),
            make_schedule(name, 2, 4),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "4"), "needs --devices and --bandwidth, or --topology alone"),
        ((*TWO, "--topology", "t.toml"), "needs --devices and --bandwidth, or --topology alone"),
        (("--devices", "4y4", "--bandwidth", "1"), "--devices is '4y4'"),
        ((*TWO, "-o", "step.pdf"), "expected a name that ends in .html"),
    ],
)
def test_options_that_do_not_fit_end_the_script(
    profile: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main([str(profile), *options])


def test_a_training_graph_takes_no_other_devices(placement: Path) -> None:
    with pytest.raises(SystemExit, match="leave out --devices, --bandwidth, --topology"):
        main([str(placement), *TWO])


def test_a_graph_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({**PLACEMENT, "maxSizePerFPGA": 40.0}), encoding="utf-8")
    with pytest.raises(SystemExit, match="no plan fits in the memory of the devices"):
        main([str(tmp_path / "small.json")])
