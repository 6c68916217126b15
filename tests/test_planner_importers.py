"""Published graph formats and topology files: what is read, what is refused, and ``pipec plan`` of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipec.cli import app
from pipec.errors import PlanError
from pipec.hardware.topology import Device, Level, Topology, read_topology, uniform
from pipec.planner.cost_model import PIPEC
from pipec.planner.dnn_partitioning import read_dnn_partitioning
from pipec.planner.pipedream_graph import parse_pipedream_graph, read_pipedream_graph
from pipec.planner.placement import place


def node(name: str, description: str, forward: float, backward: float, size: str, parameters: float) -> str:
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size={parameters} -- stage_id=0"
    )


PROFILE = [
    node("n1", "Input0", 0.0, 0.0, "64.0", 0.0),
    node("n2", "Linear(in_features=2, out_features=2)", 1000.0, 2000.0, "[500000000.0; 500000000.0]", 8.0),
    node("n3", "ReLU()", 500.0, 500.0, "1000000000.0", 0.0),
    node("n4", "__getitem__(1)", 0.0, 0.0, "4.0", 0.0),
    node("n5", "Add()", 1000.0, 1000.0, "1.0", 2000000000.0),
    "\tn1 -- n2",
    "\tn2 -- n3",
    "\tn2 -- n4",
    "\tn2 -- n5",
    "\tn3 -- n5",
]

PLACEMENT = {
    "maxFPGAs": 2,
    "maxSizePerFPGA": 100.0,
    "maxCPUs": 0,
    "nodes": [
        {
            "id": 1,
            "fpgaLatency": 1.0,
            "cpuLatency": 10.0,
            "size": 10,
            "isBackwardNode": False,
            "colorClass": 1,
        },
        {
            "id": 2,
            "fpgaLatency": 2.0,
            "cpuLatency": 20.0,
            "size": 20,
            "isBackwardNode": False,
            "colorClass": 2,
        },
        {
            "id": 3,
            "fpgaLatency": 3.0,
            "cpuLatency": 30.0,
            "size": 30,
            "isBackwardNode": True,
            "colorClass": 2,
        },
        {
            "id": 4,
            "fpgaLatency": 4.0,
            "cpuLatency": 40.0,
            "size": 40,
            "isBackwardNode": True,
            "colorClass": 1,
        },
    ],
    "edges": [
        {"sourceId": 1, "destId": 2, "cost": 0.5},
        {"sourceId": 2, "destId": 3, "cost": 9.0},
        {"sourceId": 3, "destId": 4, "cost": 0.25},
    ],
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(PROFILE) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def placement(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(PLACEMENT), encoding="utf-8")
    return path


def planned(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


# PipeDream


def test_a_profile_is_read_without_inputs_and_unread_results(profile: Path) -> None:
    graph = read_pipedream_graph(profile)
    assert graph.names == ["n2", "n3", "n5"]
    assert graph.seconds == [3.0, 1.0, 2.0]
    assert graph.parameter_bytes == [8.0, 0.0, 2e9]
    assert graph.saved_bytes == [1e9 + 8.0, 1e9, 2e9 + 1.0]
    values = [(v.producer, v.consumers, v.forward_bytes, v.backward_bytes) for v in graph.transfers]
    assert values == [(0, (1, 2), 1e9, 1e9), (1, (2,), 1e9, 1e9)]
    assert sorted(graph.before) == [(0, 1), (0, 2), (1, 2)]


def test_a_profile_is_planned_by_the_command_line(profile: Path) -> None:
    facts = json.loads(planned("--pipedream-graph", profile, "--devices", 2, "--bandwidth", "1e9", "--json"))
    # Between n2 and n3, the value of n2 and its gradient take 2 seconds.
    assert facts["seconds"] == pytest.approx(3.0)
    assert [stage["operators"] for stage in facts["stages"]] == [["n2"], ["n3", "n5"]]
    assert [stage["replicas"] for stage in facts["stages"]] == [1, 1]
    assert [stage["seconds"] for stage in facts["stages"]] == pytest.approx([3.0, 3.0])
    assert [stage["communication_seconds"] for stage in facts["stages"]] == pytest.approx([0.0, 2.0])
    assert facts["planning_seconds"] > 0
    assert facts["least_seconds"] == facts["seconds"]


def test_levels_are_given_from_the_inside_out(profile: Path) -> None:
    options = ("--pipedream-graph", profile, "--devices", "2x2", "--bandwidth", "4e9,1e9")
    assert planned(*options).startswith("2 stages, the slowest 2 s, ")


def test_a_plan_says_what_bounds_the_step(profile: Path) -> None:
    options = ("--pipedream-graph", profile, "--devices")
    operators = planned(*options, 1, "--bandwidth", "1e9")
    assert "stage 0 bounds the step by its operators; links and all-reduce take 0 s" in operators
    alone = planned(*options, 2, "--bandwidth", "1e9")
    assert "stage 0 bounds the step by its operators, all in one operator" in alone
    links = planned(*options, 2, "--bandwidth", "0.6e9")
    assert "stage 1 bounds the step, most of all by 3.33 s of links and all-reduce" in links


def test_the_cost_model_of_pipec_counts_links_and_operators(profile: Path) -> None:
    options = ("--pipedream-graph", profile, "--devices", 1, "--bandwidth", "1e9", "--cost-model", "pipec")
    assert json.loads(planned(*options, "--json"))["seconds"] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n9 -- Linear()", "line 11 is neither a node nor an edge of a PipeDream graph: 'n9 -- Linear..'"),
        ("\tn2 - n3", "line 11 is neither a node nor an edge"),
        (node("n9", "ReLU()", 1.0, 1.0, "many", 0.0), "line 11 is neither a node nor an edge"),
        ("\tn5 -- n9", "the edge n5 -- n9 joins a node that the graph does not have"),
    ],
)
def test_a_malformed_profile_is_refused(line: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_pipedream_graph([*PROFILE, line])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\tn5 -- n2", "the operators form a cycle, n[0-9] -> .*: no order of stages can run them"),
        (node("n9", "ReLU()", -3000.0, 1.0, "1.0", 0.0), "n9 has seconds -2.999: expected a finite number"),
        (node("n9", "ReLU()", float("nan"), 1.0, "1.0", 0.0), "n9 has seconds nan: expected a finite number"),
    ],
)
def test_a_profile_that_cannot_be_planned_is_refused(line: str, message: str) -> None:
    graph = parse_pipedream_graph([*PROFILE, line])
    with pytest.raises(PlanError, match=message):
        place(graph, uniform([2], [1.0]), PIPEC)


def test_a_missing_or_empty_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be read: .*Expected a graph\.txt of PipeDream"):
        read_pipedream_graph(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    error = planned("--pipedream-graph", tmp_path / "empty.txt", "--devices", 2, "--bandwidth", 1, status=1)
    assert "there are no operators to plan for" in error


# dnn-partitioning


def test_nodes_of_a_colour_are_one_operator(placement: Path) -> None:
    problem = read_dnn_partitioning(placement)
    assert problem.nodes == (("1", "4"), ("2", "3"))
    assert problem.graph.seconds == pytest.approx([0.005, 0.005])
    assert problem.graph.resident_bytes == [50.0, 50.0]
    assert problem.graph.before == [(0, 1)]
    assert problem.topology.devices == (Device(100.0),) * 2


def test_a_device_pays_for_what_it_sends_and_receives(placement: Path) -> None:
    facts = json.loads(planned("--dnn-partitioning", placement, "--json"))
    assert [stage["operators"] for stage in facts["stages"]] == [["1", "4"], ["2", "3"]]
    assert facts["seconds"] == pytest.approx(5.75e-3)


def test_a_backward_without_forward_follows_the_backward_order(tmp_path: Path) -> None:
    lone = {"id": 5, "fpgaLatency": 1.0, "cpuLatency": 10.0, "size": 0, "isBackwardNode": True}
    edges = [*PLACEMENT["edges"], {"sourceId": 3, "destId": 5, "cost": 0.0}]
    graph = {**PLACEMENT, "nodes": [*PLACEMENT["nodes"], lone], "edges": edges}
    (tmp_path / "lone.json").write_text(json.dumps(graph), encoding="utf-8")
    assert (2, 1) in read_dnn_partitioning(tmp_path / "lone.json").graph.before


def test_a_cpu_is_a_slow_device_without_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps({**PLACEMENT, "maxCPUs": 1}), encoding="utf-8")
    assert read_dnn_partitioning(tmp_path / "cpu.json").topology.devices[-1] == Device(speed=0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": [{"id": 1}]}, "is not a dnn-partitioning graph: KeyError"),
        ({"maxFPGAs": "two"}, "is not a dnn-partitioning graph: TypeError"),
        ({"edges": [{"sourceId": 1, "destId": 8, "cost": 1.0}]}, "is not a dnn-partitioning graph: KeyError"),
        ({"maxSizePerFPGA": 40.0}, "no plan fits in the memory of the devices"),
    ],
)
def test_a_bad_graph_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({**PLACEMENT, **changed}), encoding="utf-8")
    assert message in planned("--dnn-partitioning", tmp_path / "bad.json", status=1)


# Options that do not fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a TARGET and its number of --devices"),
        (("model.py:f", "--devices", "4x4"), "give a TARGET and its number of --devices"),
        (("model.py:f", "--devices", 4, "--bandwidth", 1), "are for graphs, not for a model"),
        (("model.py:f", "--pipedream-graph", "g"), "either the target model.py:f or a graph, not both"),
        (("--pipedream-graph", "g"), "needs --devices and --bandwidth, or --topology alone"),
        (("--pipedream-graph", "g", "--devices", "4y4", "--bandwidth", 1), "--devices is '4y4'"),
        (("--dnn-partitioning", "g", "--devices", 4), "--dnn-partitioning goes without"),
    ],
)
def test_options_that_do_not_fit_are_bad_usage(arguments: tuple[object, ...], message: str) -> None:
    assert message in planned(*arguments, status=2)


def test_an_unknown_cost_model_is_bad_usage(profile: Path) -> None:
    options = ("--pipedream-graph", profile, "--devices", 2, "--bandwidth", 1, "--cost-model", "guess")
    assert "--cost-model is 'guess'; expected pipec or pipedream or max-load" in planned(*options, status=2)


# Topologies

TOML = """
[[devices]]
count = 3
memory_bytes = 16e9

[[devices]]
speed = 0.5

[[levels]]
size = 2
bytes_per_second = 12e9

[[levels]]
size = 2
bytes_per_second = 1.25e9
latency_seconds = 1e-5
"""

BOTH = Topology(
    (Device(16e9),) * 3 + (Device(speed=0.5),), (Level(2, 12e9), Level(2, 1.25e9, latency_seconds=1e-5))
)


def test_a_topology_is_read_from_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(TOML, encoding="utf-8")
    facts = {
        "devices": [{"count": 3, "memory_bytes": 16e9}, {"speed": 0.5}],
        "levels": [
            {"size": 2, "bytes_per_second": 12e9},
            {"size": 2, "bytes_per_second": 1.25e9, "latency_seconds": 1e-5},
        ],
    }
    (tmp_path / "hosts.json").write_text(json.dumps(facts), encoding="utf-8")
    assert read_topology(tmp_path / "hosts.toml") == read_topology(tmp_path / "hosts.json") == BOTH


def test_a_profile_is_planned_on_a_topology_file(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(TOML, encoding="utf-8")
    printed = planned("--pipedream-graph", profile, "--topology", tmp_path / "hosts.toml")
    assert "stage 0: " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 4", "is not a topology: .*Expected devices .count, memory_bytes, speed. and levels"),
        ("[[levels]]\nsize = 2\nbytes_per_second = 1", "is not a topology: KeyError..devices"),
        (TOML.replace("count = 3", "count = 4"), "lists 5 devices, but 2 x 2 levels join 4: device 4 cannot"),
        (TOML.replace("speed = 0.5", "speed = -1"), "device 3 has inf bytes of memory and speed -1.0"),
        (TOML.replace("12e9", "0"), "level 0 carries 0 bytes per second .* devices cannot reach each other"),
    ],
)
def test_a_bad_topology_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        read_topology(tmp_path / "bad.toml")


def test_levels_need_a_bandwidth_each() -> None:
    with pytest.raises(PlanError, match="2 levels of devices and 1 bandwidths"):
        uniform([4, 4], [1e9])
