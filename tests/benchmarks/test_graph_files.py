"""The formats of published graphs: what is read, and what is refused."""

import json
from pathlib import Path

import pytest
from dnn_partitioning import read_dnn_partitioning
from graph_files import PLACEMENT, PROFILE, node
from pipedream_graph import parse_pipedream_graph, read_pipedream_graph

from pipec.errors import PlanError
from pipec.hardware.topology import Device, uniform_topology
from pipec.planner.cost_model import PIPEC
from pipec.planner.partition import partition_graph

# PipeDream


def test_a_profile_is_read_without_inputs_and_unread_results(profile: Path) -> None:
    graph = read_pipedream_graph(profile)
    assert graph.names == ["n2", "n3", "n5"]
    assert graph.seconds == [3.0, 1.0, 2.0]
    assert graph.forward_seconds == [1.0, 0.5, 1.0]
    assert graph.parameter_bytes == [8.0, 0.0, 2e9]
    assert graph.saved_bytes == [1e9 + 8.0, 1e9, 2e9 + 1.0]
    assert graph.activation_bytes == [1e9, 1e9, 1.0]
    values = [(v.producer, v.consumers, v.forward_bytes, v.backward_bytes) for v in graph.transfers]
    assert values == [(0, (1, 2), 1e9, 1e9), (1, (2,), 1e9, 1e9)]
    assert sorted(graph.before) == [(0, 1), (0, 2), (1, 2)]


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
        partition_graph(graph, uniform_topology([2], [1.0]), PIPEC)


def test_a_missing_or_empty_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be read: .*Expected a graph\.txt of PipeDream"):
        read_pipedream_graph(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(PlanError, match="there are no operators to plan for"):
        partition_graph(read_pipedream_graph(tmp_path / "empty.txt"), uniform_topology([2], [1.0]), PIPEC)


# dnn-partitioning


def test_nodes_of_a_colour_are_one_operator(placement: Path) -> None:
    problem = read_dnn_partitioning(placement)
    assert problem.nodes == (("1", "4"), ("2", "3"))
    assert problem.graph.seconds == pytest.approx([0.005, 0.005])
    assert problem.graph.forward_seconds == pytest.approx([0.001, 0.002])
    assert problem.graph.resident_bytes == [50.0, 50.0]
    assert problem.graph.before == [(0, 1)]
    assert problem.topology.devices == (Device(100.0),) * 2


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
        ({"maxFPGAs": "two"}, "is not a dnn-partitioning graph: InputError.*expected a whole number"),
        ({"edges": [{"sourceId": 1, "destId": 8, "cost": 1.0}]}, "is not a dnn-partitioning graph: KeyError"),
    ],
)
def test_a_bad_graph_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({**PLACEMENT, **changed}), encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        read_dnn_partitioning(tmp_path / "bad.json")
