"""Read the profiles of PipeDream (msr-fiddle/pipedream): ``graph.txt``, one node or edge a line.

::

    node4 -- Conv2d(...) -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=[8.0; 4.0],
        node4 -- node5

Times are milliseconds of a mini-batch, sizes bytes; an edge line begins with a tab. As in PipeDream's
optimizer, inputs are not planned, nor is a ``__getitem__`` that nothing reads; a value goes forward and comes
back as its gradient, both of ``activation_size`` bytes; and a device holds the activations and a version of
the parameters for every mini-batch in flight (weight stashing).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from from_graph import PublishedGraph

from pipec.errors import PlanError
from pipec.planner.operator_graph import Transfer

_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")

Edges = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Node:
    description: str
    seconds: float
    forward_seconds: float
    activation_bytes: float
    parameter_bytes: float


def read_pipedream_graph(path: Path) -> PublishedGraph:
    """The operators in a ``graph.txt``. PlanError, with the line, if one cannot be understood."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}. Expected a graph.txt of PipeDream") from error
    return parse_pipedream_graph(lines)


def parse_pipedream_graph(lines: Iterable[str]) -> PublishedGraph:
    """The operators that the lines of a ``graph.txt`` describe."""
    nodes: dict[str, _Node] = {}
    edges: Edges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = line.strip().split(" -- ")
            if line.startswith("\t"):
                source, target = fields
                edges.append((source, target))
            else:
                nodes[fields[0]] = _node(fields[1], fields[2])
        except (ValueError, IndexError, KeyError) as error:
            raise PlanError(
                f"line {number} is neither a node nor an edge of a PipeDream graph: {line.strip()!r}. "
                f"Expected `id -- description -- {'=, '.join(_FIGURES)}=`, or a tab and `id -- id`"
            ) from error
    for source, target in edges:
        if source not in nodes or target not in nodes:
            raise PlanError(f"the edge {source} -- {target} joins a node that the graph does not have")
    return _operator_graph(*_planned(nodes, edges))


def _node(description: str, figures: str) -> _Node:
    values = dict(figure.split("=") for figure in figures.split(", "))
    forward, backward, activation, parameters = (_sum(values[name]) for name in _FIGURES)
    return _Node(description, (forward + backward) / 1000, forward / 1000, activation, parameters)


def _sum(figure: str) -> float:
    """Of ``8.0`` or ``[8.0; 4.0]``."""
    return sum(float(part) for part in figure.strip().strip("[]").split(";"))


def _planned(nodes: Mapping[str, _Node], edges: Edges) -> tuple[dict[str, _Node], Edges]:
    """Without inputs, then without results that nothing reads."""
    read = {target for _, target in edges}
    inputs = {name for name in nodes if name not in read and nodes[name].description.startswith("Input")}
    edges = [edge for edge in edges if inputs.isdisjoint(edge)]
    sources = {source for source, _ in edges}
    unread = {
        name for name in nodes if name not in sources and nodes[name].description.startswith("__getitem__")
    }
    edges = [edge for edge in edges if unread.isdisjoint(edge)]
    return {name: node for name, node in nodes.items() if name not in inputs | unread}, edges


def _operator_graph(nodes: Mapping[str, _Node], edges: Edges) -> PublishedGraph:
    index = {name: k for k, name in enumerate(nodes)}
    readers: dict[int, set[int]] = {}
    for source, target in edges:
        readers.setdefault(index[source], set()).add(index[target])
    kept = list(nodes.values())
    transfers = [
        Transfer(op, tuple(sorted(consumers)), kept[op].activation_bytes, kept[op].activation_bytes)
        for op, consumers in sorted(readers.items())
    ]
    return PublishedGraph(
        names=list(nodes),
        seconds=[node.seconds for node in kept],
        parameter_bytes=[node.parameter_bytes for node in kept],
        resident_bytes=[0.0] * len(kept),
        saved_bytes=[node.activation_bytes + node.parameter_bytes for node in kept],
        transfers=transfers,
        before=[(index[source], index[target]) for source, target in edges],
        forward_seconds=[node.forward_seconds for node in kept],
        activation_bytes=[node.activation_bytes for node in kept],
    )
