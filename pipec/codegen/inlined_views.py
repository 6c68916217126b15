"""Views that are inlined where they are read: ``torch.mm(x.reshape([12*b, 32]), w[0].t())``."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from pipec.codegen.expressions import expression
from pipec.graph import is_random, is_view
from pipec.graph.lifetimes import is_statement, num_items
from pipec.graph.size_text import SymbolNames

MAX_INLINED_LENGTH = 56
"""Characters of a view in the call that reads it."""


def inlined_views(
    body: Sequence[fx.Node], results: Iterable[fx.Node], name: Callable[[fx.Node], str], symbols: SymbolNames
) -> Mapping[fx.Node, str]:
    """The source of each view in ``body`` that is read only once, by one statement.

    ``results`` are not inlined.
    """
    nodes, results = {*body}, {*results}
    found: dict[fx.Node, str] = {}
    for node in filter(is_statement, body):
        readers = [user for user in node.users if user in nodes]
        if not is_view(node) or num_items(node) or node in results or len(readers) != 1:
            continue
        source = expression(node, lambda read: found.get(read) or name(read), symbols)
        if len(source) <= MAX_INLINED_LENGTH and not is_random(readers[0]) and _reads_once(readers[0], node):
            found[node] = source
    return found


def _reads_once(reader: fx.Node, node: fx.Node) -> bool:
    count = 0

    def counted(read: fx.Node) -> fx.Node:
        nonlocal count
        count += read is node
        return read

    fx.map_arg((reader.args, reader.kwargs), counted)
    return count == 1
