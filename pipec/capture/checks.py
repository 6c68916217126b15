"""What is checked of each microbatch: what the model checks, and that rows do not depend on others."""

import torch
from torch import fx

from pipec.capture.call import Call, plain_name
from pipec.capture.calls import changes_argument, operator_name, place_of
from pipec.capture.markers import EXPECT, OF_BATCH
from pipec.capture.rewriting import Chain


def leading_to_checks(graph: fx.Graph) -> set[fx.Node]:
    """The checks of a graph, and the nodes that are read for checks alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read_for_checks = bool(node.users) and found.issuperset(node.users)
        if node.target is EXPECT or (node.op.startswith("call") and is_read_for_checks):
            found.add(node)
    return found


def expect_all_scattered(graph: fx.Graph, call: Call) -> None:
    """Let each microbatch check that ``masked_scatter`` takes all of its source, if it depends on rows.

    It takes as many elements as the mask chooses, from the first on. Only if that is all that the rows before
    brought along, a microbatch begins with its own.
    """
    named = zip(call.paths, call.batched, strict=True)
    split = {plain_name(path) for path, is_split in named if is_split}
    of_rows: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" and plain_name(str(node.target)) in split:
            of_rows.add(node)
        elif of_rows.intersection(node.all_input_nodes):
            of_rows.add(node)
            if changes_argument(node):
                of_rows.update(node.all_input_nodes[:1])
            if operator_name(node) == "masked_scatter":
                _expect_scattered(node)


def _expect_scattered(node: fx.Node) -> None:
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


def expect_as_many_each(chosen: fx.Node, mask: fx.Node) -> None:
    """Let each microbatch check that ``chosen``, which is ``x[mask]``, has as many elements of every row.

    ``mask`` follows from the arguments of ``step``, so that rows of other microbatches are compared, too.
    """
    chain = Chain(chosen)
    flat = chain("flat", torch.flatten, chain("flat", torch.unsqueeze, mask, -1), 1)
    counts = chain("counts", torch.sum, flat, 1)
    least, most = chain("least", torch.amin, counts), chain("most", torch.amax, counts)
    same = chain("same", torch.eq, least, chain("most", OF_BATCH, most, False))
    chain(
        "expected",
        EXPECT,
        same,
        f"{place_of(chosen)}: the mask chooses more elements of one row than of another, so that what is "
        "chosen cannot be divided among the rows; choose as many of each",
    )
