"""``pipec plan-graph``: a published graph becomes an ordinary plan, which is simulated and drawn."""

import json
from pathlib import Path

import pytest
from graph_files import PLACEMENT, PROFILE
from typer.testing import CliRunner

from pipec.cli import app
from pipec.errors import InputError
from pipec.hardware.topology import Device, Level, Topology, uniform
from pipec.ir import Payload, Phase
from pipec.plan.from_graph import plan_from_graph
from pipec.planner.pipedream_graph import parse_pipedream_graph
from pipec.planner.placement import Partition, PlacedStage
from pipec.schedules import gpipe, make_schedule


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(PROFILE) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def training(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(PLACEMENT), encoding="utf-8")
    return path


def planned(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan-graph", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def facts_of(*arguments: object) -> dict[str, object]:
    facts = json.loads(planned(*arguments, "--json"))
    assert isinstance(facts, dict)
    return facts


# What the planner says


def test_a_profile_is_planned(profile: Path) -> None:
    facts = facts_of(profile, "--devices", 2, "--bandwidth", "1e9")
    # Between n2 and n3, the value of n2 and its gradient take 2 seconds.
    assert facts["seconds"] == pytest.approx(3.0)
    assert [stage["operators"] for stage in facts["stages"]] == [["n2"], ["n3", "n5"]]
    assert [stage["replicas"] for stage in facts["stages"]] == [1, 1]
    assert [stage["seconds"] for stage in facts["stages"]] == pytest.approx([3.0, 3.0])
    assert [stage["communication_seconds"] for stage in facts["stages"]] == pytest.approx([0.0, 2.0])
    assert facts["planning_seconds"] > 0
    assert facts["least_seconds"] == facts["seconds"]
    assert facts["cost_model"] == "pipedream"


def test_levels_are_given_from_the_inside_out(profile: Path) -> None:
    facts = facts_of(profile, "--devices", "2x2", "--bandwidth", "4e9,1e9")
    assert facts["seconds"] == pytest.approx(2.0)


def test_a_profile_is_planned_on_a_topology_file(profile: Path, tmp_path: Path) -> None:
    level = {"size": 2, "bytes_per_second": 1e9}
    (tmp_path / "two.json").write_text(json.dumps({"devices": [{"count": 2}], "levels": [level]}))
    assert facts_of(profile, "--topology", tmp_path / "two.json")["seconds"] == pytest.approx(3.0)


def test_what_bounds_the_step_is_said(profile: Path) -> None:
    operators = planned(profile, "--devices", 1, "--bandwidth", "1e9")
    assert "stage 0 bounds the step by its operators; links and all-reduce take 0 s" in operators
    alone = planned(profile, "--devices", 2, "--bandwidth", "1e9")
    assert "stage 0 bounds the step by its operators, all in one operator" in alone
    links = planned(profile, "--devices", 2, "--bandwidth", "0.6e9")
    assert "stage 1 bounds the step, most of all by 3.33 s of links and all-reduce" in links


def test_the_cost_model_of_pipec_counts_links_and_operators(profile: Path) -> None:
    facts = facts_of(profile, "--devices", 1, "--bandwidth", "1e9", "--cost-model", "pipec")
    assert (facts["seconds"], facts["cost_model"]) == (pytest.approx(6.0), "pipec")


def test_a_device_pays_for_what_it_sends_and_receives(training: Path) -> None:
    facts = facts_of(training)
    assert [stage["operators"] for stage in facts["stages"]] == [["1", "4"], ["2", "3"]]
    assert facts["seconds"] == pytest.approx(5.75e-3)


# The plan that comes of it


def test_a_stage_has_its_operators_bytes_and_seconds_by_phase(profile: Path) -> None:
    plan = facts_of(profile, "--devices", 2, "--bandwidth", "1e9")["plan"]
    first, second = plan["stages"]
    assert (first["modules"], second["modules"]) == (["n2"], ["n3", "n5"])
    assert (first["last_operator"], second["first_operator"], second["last_operator"]) == (0, 1, 2)
    assert [stage["cost"]["seconds"] for stage in (first, second)] == [
        {"forward": 1.0, "backward": 2.0},
        {"forward": 1.5, "backward": 1.5},
    ]
    assert [stage["cost"]["memory"]["weights"] for stage in (first, second)] == [8, 2_000_000_000]
    assert [stage["cost"]["memory"]["saved"] for stage in (first, second)] == [10**9, 10**9 + 1]


def test_values_cross_stages_once_and_their_gradients_come_back(profile: Path) -> None:
    plan = facts_of(profile, "--devices", 2, "--bandwidth", "1e9")["plan"]
    there, back = plan["links"]
    assert (there["source"], there["target"], there["payload"]) == (0, 1, "activation")
    assert (back["source"], back["target"], back["payload"]) == (1, 0, "gradient")
    assert there["values"] == [{"name": "n2", "dtype": "uint8", "shape": [10**9]}]
    assert plan["link_seconds"] == [1.0, 1.0]


def test_the_step_is_simulated(profile: Path) -> None:
    options = (profile, "--devices", 2, "--bandwidth", "1e9")
    one = facts_of(*options, "--microbatches", 1)
    assert one["makespan"] == 1 + 1 + 3 + 1 + 2  # forward, message, forward and backward, message, backward
    default = facts_of(*options)
    assert (default["plan"]["schedule"], default["plan"]["num_microbatches"]) == ("1f1b", 8)
    assert facts_of(*options, "--schedule", "gpipe", "--microbatches", 8)["makespan"] != default["makespan"]
    assert len(default["peak_bytes"]) == 2


def test_the_backward_of_a_training_graph_is_that_of_its_backward_nodes(training: Path) -> None:
    plan = facts_of(training)["plan"]
    seconds = [stage["cost"]["seconds"] for stage in plan["stages"]]
    assert [cost["forward"] for cost in seconds] == pytest.approx([0.001, 0.002])
    assert [cost["backward"] for cost in seconds] == pytest.approx([0.004, 0.003])
    assert [(link["source"], link["payload"]) for link in plan["links"]] == [
        (0, "activation"),
        (1, "gradient"),
    ]
    assert plan["link_seconds"] == pytest.approx([0.0005, 0.00025])
    assert facts_of(training)["peak_bytes"] == [50, 50]
    assert "sends and saves are shown as 0, all memory as weights" in planned(training)


HOSTS = Topology((Device(), Device(), Device(), Device(speed=0.5)), (Level(2, 4e9), Level(2, 1e9)))


def test_several_devices_are_one_rank_as_fast_as_their_slowest_times_their_number() -> None:
    workload = parse_pipedream_graph(PROFILE)
    stages = (
        PlacedStage((0,), (0, 1, 2), 1.0, 0.0, 0.0, 0.0, 1),
        PlacedStage((1, 2), (3,), 6.0, 0.0, 0.0, 0.0, 1),
    )
    plan = plan_from_graph(workload, HOSTS, Partition(stages, 0.0), gpipe(2, 4))
    first, second = (stage.cost.seconds for stage in plan.stages)
    assert first == {Phase.FORWARD: pytest.approx(1 / 3), Phase.BACKWARD: pytest.approx(2 / 3)}
    assert second == {Phase.FORWARD: 3.0, Phase.BACKWARD: 3.0}
    # Device 2 shares a host with device 3, devices 0 and 1 do not: the slow link counts.
    assert plan.link_seconds == (1.0, 1.0)
    assert [link.payload for link in plan.links] == [Payload.ACTIVATION, Payload.GRADIENT]


def test_pairs_of_devices_exchange_messages_at_the_same_time() -> None:
    stages = (
        PlacedStage((0,), (0, 1), 1.5, 0.0, 0.0, 0.0, 1),
        PlacedStage((1, 2), (2, 3), 3.0, 0.0, 0.0, 0.0, 1),
    )
    plan = plan_from_graph(parse_pipedream_graph(PROFILE), HOSTS, Partition(stages, 0.0), gpipe(2, 4))
    assert plan.link_seconds == (0.5, 0.5)


def test_the_table_says_which_stages_are_on_several_devices(profile: Path) -> None:
    printed = planned(profile, "--devices", 4, "--bandwidth", "50e9")
    replicas = [
        stage["replicas"] for stage in facts_of(profile, "--devices", 4, "--bandwidth", "50e9")["stages"]
    ]
    assert max(replicas) > 1
    assert f"on {max(replicas)} devices" in printed
    assert "simulated as one rank, r times as fast and without its all-reduce" in printed
    straight = planned(profile, "--devices", 2, "--bandwidth", "1e9")
    assert "devices" not in straight


def test_the_planner_and_the_simulator_are_named_with_their_figures(profile: Path) -> None:
    printed = planned(profile, "--devices", 2, "--bandwidth", "1e9", "--microbatches", 1)
    assert printed.startswith("2 stages on 2 ranks, 1f1b, 1 microbatches of 1\n")
    assert "step 8 s, bubble " in printed
    assert "planner, cost model pipedream: 3 s a microbatch in the slowest stage" in printed
    assert "simulator: 8 s a microbatch, the step divided by 1; messages travel beside operators" in printed


@pytest.mark.parametrize("suffix", [".html", ".svg", ".json"])
def test_the_step_is_drawn(profile: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"step{suffix}"
    printed = planned(profile, "--devices", 2, "--bandwidth", "1e9", "--output", path)
    assert printed.startswith("2 stages on 2 ranks")
    assert printed.endswith(f"wrote {path}\n")
    assert "1f1b, 8 microbatches" in path.read_text() or suffix == ".json"


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
        PlacedStage((0,), (0,), 3.0, 0.0, 0.0, 0.0, 2),
        PlacedStage((1, 2), (1,), 3.0, 0.0, 0.0, 0.0, 1),
    )
    with pytest.raises(InputError, match=message):
        plan_from_graph(
            parse_pipedream_graph(PROFILE),
            uniform([2], [1e9]),
            Partition(stages, 3.0),
            make_schedule(name, 2, 4),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "needs --devices and --bandwidth, or --topology alone"),
        (("--devices", 4), "needs --devices and --bandwidth, or --topology alone"),
        (("--devices", 4, "--bandwidth", 1, "--topology", "t.toml"), "or --topology alone"),
        (("--devices", "4y4", "--bandwidth", 1), "--devices is '4y4'"),
        (("--devices", 2, "--bandwidth", 1, "--cost-model", "guess"), "'guess' is not one of"),
        (("--devices", 2, "--bandwidth", 1, "--schedule", "zb-h1"), "take one such as 1f1b or gpipe"),
        (("--devices", 2, "--bandwidth", 1, "-o", "step.pdf"), "expected a name that ends in .html"),
        (("--format", "pipedreams"), "'pipedreams' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_bad_usage(
    profile: Path, options: tuple[object, ...], message: str
) -> None:
    assert message in planned(profile, *options, status=2)


def test_a_training_graph_says_all_itself(training: Path) -> None:
    assert "leave out --devices, --bandwidth, --topology" in planned(training, "--devices", 4, status=2)


def test_the_format_is_told_from_the_content_or_named(profile: Path, training: Path) -> None:
    renamed = training.rename(training.with_name("training.txt"))
    assert facts_of(renamed)["cost_model"] == "max-load"
    error = planned(renamed, "--format", "pipedream", "--devices", 2, "--bandwidth", 1, status=1)
    assert "neither a node nor an edge of a PipeDream graph" in error
    assert "is not a dnn-partitioning graph" in planned(profile, "--format", "dnn-partitioning", status=1)


def test_a_graph_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({**PLACEMENT, "maxSizePerFPGA": 40.0}), encoding="utf-8")
    assert "no plan fits in the memory of the devices" in planned(tmp_path / "small.json", status=1)


def test_a_file_that_is_not_there_is_bad_usage() -> None:
    assert "'none.txt' does not exist" in planned("none.txt", status=2)
