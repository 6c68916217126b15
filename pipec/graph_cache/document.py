"""A captured graph as a JSON document, and back.

Nodes keep their names, order, arguments and pipec's own metadata; what torch noted besides is left out. A
graph is kept if its symbols are sizes of arguments and its operators torch's, and if no value decided it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from pipec.graph import TrainingGraph, is_check
from pipec.graph_cache.encoding import Decoder, Encoder, read_tensor, tensor_text
from pipec.graph_cache.marks import UnfaithfulError
from pipec.ir import Mode
from pipec.torch_compat import pytree

META = ("val", "role", "phase", "operator", "constant", "draw", "changed", "custom", "seq_nr")
"""What passes read of a node of a captured graph."""

PLAIN = (
    "operators",
    "results",
    "batch_size",
    "guards",
    "variables",
    "planned",
    "unclear",
    "unclear_output",
    "joined",
    "kept_row",
    "logs",
    "paths",
    "training",
)
"""Fields of a graph that are data."""


def write_graph(graph: TrainingGraph, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """``held`` are the constants that the loss function holds, which are not written.

    Raises:
        UnfaithfulError: the graph has what this form has not.
    """
    if graph.value_sizes or graph.decided.branches or any(map(is_check, graph.nodes)):
        raise UnfaithfulError("values of tensors decide the graph")
    encoder = Encoder()
    written = {
        "mode": graph.mode.value,
        **{name: encoder.value(getattr(graph, name)) for name in PLAIN},
        "batch": encoder.value(graph.batch),
        "variable_symbols": encoder.value(dict(graph.variable_symbols)),
        "constants": {name: tensor_text(x) for name, x in graph.constants.items() if name not in held},
        "held": [name for name in graph.constants if name in held],
        "output_spec": _written_spec(graph.output_spec),
        "of_batch": _write_nodes(graph.of_batch, encoder) if graph.of_batch else None,
        "nodes": _write_nodes(graph.module.graph, encoder),
    }
    if unknown := encoder.symbols - encoder.hints.keys():
        raise UnfaithfulError(f"no argument has the size {min(map(str, unknown))}")
    return {"sizes": {size.name: hint for size, hint in encoder.hints.items()}, **written}


def read_graph(written: Mapping[str, Any], held: Mapping[str, Tensor]) -> TrainingGraph:
    """The graph that was written, without what it assumes of the model.

    Raises:
        LookupError, TypeError, ValueError: nothing wrote this so.
    """
    decoder = Decoder(written["sizes"])
    fields: dict[str, Any] = {name: decoder.value(written[name]) for name in PLAIN}
    constants = {name: read_tensor(x) for name, x in written["constants"].items()}
    of_batch = _read_nodes(written["of_batch"], decoder) if written["of_batch"] else None
    return TrainingGraph(
        module=fx.GraphModule(nn.Module(), _read_nodes(written["nodes"], decoder)),
        mode=Mode(written["mode"]),
        batch=decoder.value(written["batch"]),
        variable_symbols=decoder.value(written["variable_symbols"]),
        constants={**{name: held[name] for name in written["held"]}, **constants},
        of_batch=of_batch,
        output_spec=pytree.treespec_loads(written["output_spec"]) if written["output_spec"] else None,
        **{name: _frozen(value) for name, value in fields.items()},
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _written_spec(spec: pytree.TreeSpec | None) -> str | None:
    try:
        return pytree.treespec_dumps(spec) if spec is not None else None
    except (NotImplementedError, TypeError) as error:
        raise UnfaithfulError(f"an output whose structure torch cannot write: {error}") from error


def _write_nodes(graph: fx.Graph, encoder: Encoder) -> list[Any]:
    return [
        [
            node.op,
            node.name,
            node.target if isinstance(node.target, str) else encoder.value(node.target),
            encoder.value(node.args),
            encoder.value(dict(node.kwargs)),
            {key: encoder.value(node.meta[key]) for key in META if key in node.meta},
        ]
        for node in graph.nodes
    ]


def _read_nodes(written: list[Any], decoder: Decoder) -> fx.Graph:
    graph = fx.Graph()
    decoder.nodes.clear()
    for op, name, target, args, kwargs, meta in written:
        node = graph.create_node(
            op, decoder.value(target), decoder.value(args), decoder.value(kwargs), name=name
        )
        node.meta.update({key: decoder.value(value) for key, value in meta.items()})
        decoder.nodes[name] = node
    return graph
