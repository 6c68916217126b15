"""Checks that every microbatch runs: the model's own, and that its rows do not depend on other rows."""

import torch
from torch import fx

from pipec.capture.graph_calls import NodeInserter, describe_call, mutates_argument, operator_name
from pipec.capture.markers import BATCH_COUNT, REQUIRE
from pipec.capture.model_call import ModelCall, plain_name


def nodes_for_checks(graph: fx.Graph) -> set[fx.Node]:
    """The checks of a graph, and the nodes that only checks read."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read_for_checks = bool(node.users) and found.issuperset(node.users)
        if node.target is REQUIRE or (node.op.startswith("call") and is_read_for_checks):
            found.add(node)
    return found


def require_full_scatter(graph: fx.Graph, call: ModelCall) -> None:
    """Let each microbatch check that ``masked_scatter`` takes all of its source, if it depends on rows.

    It takes as many elements as the mask selects, from the first on. A microbatch begins with its own
    elements only if the rows before it took all of theirs.
    """
    named = zip(call.paths, call.batched, strict=True)
    split = {plain_name(path) for path, is_split in named if is_split}
    of_rows: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" and plain_name(str(node.target)) in split:
            of_rows.add(node)
        elif of_rows.intersection(node.all_input_nodes):
            of_rows.add(node)
            if mutates_argument(node):
                of_rows.update(node.all_input_nodes[:1])
            if operator_name(node) == "masked_scatter":
                _expect_scattered(node)


def _expect_scattered(node: fx.Node) -> None:
    arguments = [*node.args, *node.kwargs.values()]
    kept, mask, source = arguments[:3]
    chain = NodeInserter(node)
    chosen = chain("chosen", torch.sum, chain("chosen", torch.Tensor.expand_as, mask, kept))
    taken = chain("taken", torch.eq, chosen, chain("number", torch.numel, source))
    chain(
        "expected",
        REQUIRE,
        taken,
        f"{describe_call(node)}: the mask chooses more or fewer elements in a microbatch than its source "
        "has; the rows of each microbatch must bring along what their masks choose",
    )


def require_equal_counts(chosen: fx.Node, mask: fx.Node) -> None:
    """Let each microbatch check that ``chosen``, ``x[mask]``, has equally many elements of each row.

    ``mask`` follows from the arguments of ``step``, so that rows of other microbatches are compared, too.
    """
    chain = NodeInserter(chosen)
    flat = chain("flat", torch.flatten, chain("flat", torch.unsqueeze, mask, -1), 1)
    counts = chain("counts", torch.sum, flat, 1)
    least, most = chain("least", torch.amin, counts), chain("most", torch.amax, counts)
    same = chain("same", torch.eq, least, chain("most", BATCH_COUNT, most, False))
    chain(
        "expected",
        REQUIRE,
        same,
        f"{describe_call(chosen)}: the mask chooses more elements of one row than of another, so that what "
        "is chosen cannot be divided among the rows; choose as many of each",
    )
