"""Decide which of the values that a stage keeps for its backward wait in host memory.

::

    h = relu(x)            stage 1 FORWARD            h = relu(x)            stage 1 FORWARD, offloaded
    dh = relu_back(d, h)   stage 1 BACKWARD    ->     dh = relu_back(d, h)   stage 1 BACKWARD
"""

from dataclasses import dataclass, field

from torch import fx

from pipec.graph import TrainingGraph, is_collective, is_forward, is_tensor, is_view, send
from pipec.graph.in_place import owns_new_storage


@dataclass(frozen=True)
class MarkOffload:
    """Nodes with a name in ``offloaded`` are copied to the host and back, where the stage saves them."""

    offloaded: frozenset[str] = field(default=frozenset(), repr=False)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in graph.nodes:
            node.meta["offload"] = node.name in self.offloaded and may_offload(node)
        return graph


def may_offload(node: fx.Node) -> bool:
    """Whether nobody but the stage holds the memory of a value that its forward makes.

    What is sent is held until it has left; offloading it would give no memory back.
    """
    own = is_tensor(node) and is_forward(node) and owns_new_storage(node) and not is_collective(node)
    return own and not _leaves(node)


def _leaves(node: fx.Node) -> bool:
    return any(
        user.op == "output" or user.target is send or is_collective(user) or (is_view(user) and _leaves(user))
        for user in node.users
    )
