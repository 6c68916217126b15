"""The graph that a profile belongs to: a digest of the graph, and the nodes whose times a profile has."""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from pipec.cost.profile import Profile
from pipec.errors import InputError
from pipec.graph import TrainingGraph, is_constant


def graph_fingerprint(graph: TrainingGraph) -> str:
    """A digest of every node, in order: what it calls, which operator caused it, and what it reads."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        read = fx.node.map_aggregate((node.args, node.kwargs), _identity)
        digest.update(f"{node.name} {target_name(node)} {node.meta['operator']} {read}\n".encode())
    return digest.hexdigest()[:16]


def target_name(node: fx.Node) -> str:
    """What a node calls: ``aten.mm.default``."""
    return (
        str(node.target) if "built-in" not in str(node.target) else str(getattr(node.target, "__name__", ""))
    )


def _identity(read: Any) -> Any:
    """A node by its name; an argument of the graph by what it is, since its name is a number."""
    return read.meta["role"] if isinstance(read, fx.Node) and read.op == "placeholder" else read


def profiled_nodes(graph: TrainingGraph) -> Iterator[fx.Node]:
    """The nodes that run once per microbatch."""
    return (node for node in graph.nodes if not is_constant(node))


def check_profile(profile: Profile, graph: TrainingGraph) -> None:
    """Raise InputError unless the profile is one of this graph."""
    if profile.fingerprint != (found := graph_fingerprint(graph)):
        ours = {node.name for node in profiled_nodes(graph)}
        theirs = profile.seconds().keys()
        other = sorted(ours ^ theirs)[:1]
        detail = f", for example {other[0]} is in only one of them" if other else ""
        raise InputError(
            f"the profile is of another model, loss, precision or version of torch: it is of graph "
            f"{profile.fingerprint} with {len(theirs)} nodes, and this one is {found} with "
            f"{len(ours)}{detail}. Make one of this model with `pipec profile`"
        )
