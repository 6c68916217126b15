"""What is checked of each microbatch: what the model checks, and that rows do not depend on others."""

import torch
from torch import fx

from pipec.capture.markers import EXPECT
from pipec.capture.parts import place_of
from pipec.capture.rewriting import Chain


def leading_to_checks(graph: fx.Graph) -> set[fx.Node]:
    """The checks of a graph, and the nodes that are read for checks alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read_for_checks = bool(node.users) and found.issuperset(node.users)
        if node.target is EXPECT or (node.op.startswith("call") and is_read_for_checks):
            found.add(node)
    return found


def expect_all_scattered(node: fx.Node) -> None:
    """Let each microbatch check that ``masked_scatter`` takes all of its source.

    It takes as many elements as the mask chooses, from the first on. Only if that is all that the rows before
    brought along, a microbatch begins with its own.
    """
    arguments = [*node.args, *node.kwargs.values()]
    kept, mask, source = arguments[:3]
    chain = Chain(node)
    chosen = chain("chosen", torch.sum, chain("chosen", torch.Tensor.expand_as, mask, kept))
    taken = chain("taken", torch.eq, chosen, chain("number", torch.numel, source))
    chain(
        "expected",
        EXPECT,
        taken,
        f"{place_of(node)}: the mask chooses more or fewer elements in a microbatch than its source has; the "
        "rows of each microbatch must bring along what their masks choose",
    )
