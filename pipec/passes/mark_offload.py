"""Mark the values saved for the backward that wait in host memory.

::

    h = relu(x)            stage 1 FORWARD            h = relu(x)            stage 1 FORWARD, offloaded
    dh = relu_back(d, h)   stage 1 BACKWARD    ->     dh = relu_back(d, h)   stage 1 BACKWARD
"""

from dataclasses import dataclass, field

from torch import fx

from pipec.graph import TrainingGraph, is_collective, is_forward, is_tensor, is_view, send
from pipec.graph.in_place import owns_new_storage

LEAST_OFFLOADED_BYTES = 512
"""Smaller values stay: CUDA's allocator gives out blocks of this size, so that little would become free.

Among them is the state from which attention drew, which torch leaves on the host.
"""


@dataclass(frozen=True)
class MarkOffload:
    """Values named in ``offloaded`` are copied to the host and back, if the stage saves them."""

    offloaded: frozenset[str] = field(default=frozenset(), repr=False)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in graph.nodes:
            node.meta["offload"] = node.name in self.offloaded and may_offload(node)
        return graph


def may_offload(node: fx.Node) -> bool:
    """Whether the value is made by the forward of its stage, and only that stage holds its memory.

    A sent value holds its memory until the send completes, so that offloading it would free nothing.
    """
    own = is_tensor(node) and is_forward(node) and owns_new_storage(node) and not is_collective(node)
    return own and not _escapes(node)


def _escapes(node: fx.Node) -> bool:
    """Whether the value, or a view of it, is a result, is sent, or is read by a collective."""
    return any(
        user.op == "output"
        or user.target is send
        or is_collective(user)
        or (is_view(user) and _escapes(user))
        for user in node.users
    )
