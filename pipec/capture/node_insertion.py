"""Inserts nodes into a captured graph, each belonging to the operator of an existing node."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipec.capture.graph_calls import named_arguments
from pipec.capture.markers import BATCH_FRACTION

INHERITED_META = ("custom", "nn_module_stack", "partitioner_tag", "stack_trace")
"""What a node that is put in has of the meta of the node it belongs to."""


def fake_value(node: Any) -> Any:
    """The fake value of a node."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in the order of its arguments, and as often as they occur there."""
    found = list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def insert_after(
    after: fx.Node, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """A call of ``function`` right after a node."""
    with after.graph.inserting_after(after):
        node = after.graph.create_node("call_function", function, args, kwargs, name)
    node.meta = {key: after.meta[key] for key in INHERITED_META if key in after.meta}
    return node


@dataclass
class NodeInserter:
    """Inserts nodes one after the other."""

    last: fx.Node

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        self.last = insert_after(self.last, name, function, *args, **kwargs)
        return self.last

    def scale_by_batch_fraction(self, whole: fx.Node, like: fx.Node) -> fx.Node:
        """The microbatch's fraction of a value of the whole batch, in the dtype of ``like``."""
        share = self("share", torch.mul, whole, self("share", BATCH_FRACTION, fake_value(like).device))
        return self("share", torch.ops.aten._to_copy.default, share, dtype=fake_value(like).dtype)

    def repeat_call(self, node: fx.Node, **changed: Any) -> fx.Node:
        """The same call with other arguments."""
        arguments = {**named_arguments(node), **changed}
        return self(f"{node.name}_sum", node.target, *arguments.values())  # type: ignore[arg-type]
