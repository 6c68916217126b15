"""Decides branches on values of tensors while a model is traced: they go as in the traced call.

Dynamo asks while it traces. What it has traced so far is then computed with the values of the call, so that
the truth value of the condition is known. The graph gets a ``check_branch`` in its place, which fails in a
step in which the condition has another value.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipec.capture.diagnosis import error_summary
from pipec.capture.graph_calls import (
    at_line,
    is_always_false,
    is_random_except_dropout,
    mutates_argument,
    source_line,
)
from pipec.capture.markers import REQUIRE
from pipec.capture.model_call import ModelCall
from pipec.capture.operators import module_of
from pipec.errors import CaptureError
from pipec.graph import CHECK_BRANCH
from pipec.torch_compat.dynamo_branches import (
    Decision,
    WriteProtection,
    decide_branches,
    evaluate_symbolic,
    has_values,
    placeholder_example,
    shape_symbols,
)

MICROBATCH_CHECK = ": this check fails for a microbatch; each is checked as if it were the whole mini-batch"


@dataclass
class BranchDecider:
    """Decides the branches of one call: those on its arguments alone by the ``batch``, others by the rows
    of the ``call`` that is traced.

    ``originals`` are the tensors of the model, by the ``id`` of the fake ones that stand for them.
    ``refused`` says why a branch was not decided.
    """

    call: ModelCall
    batch: ModelCall
    originals: Mapping[int, Tensor]
    refused: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def deciding(self, sample: ModelCall, symbolic: bool) -> Iterator[None]:
        """Decide the branches that are met while ``sample`` is traced, whose tensors have no values.

        If the batch is not ``symbolic``, code is traced that is right for the rows of the call alone.
        """
        leaves, batch = [id(leaf) for leaf in sample.leaves], self.batch if symbolic else self.call
        with ThreadPoolExecutor(1, initializer=_like_here()) as thread:  # modes of tracing are a thread's own
            batch_values = _Values(
                dict(zip(leaves, batch.leaves, strict=True)), self.originals, arguments_only=True
            )
            call_values = _Values(
                dict(zip(leaves, self.call.leaves, strict=True)), self.originals, arguments_only=False
            )

            def decide(node: fx.Node, get_attribute: Callable[[str], Any]) -> Decision | None:
                try:
                    return thread.submit(_decide, node, get_attribute, batch_values, call_values).result()
                except CaptureError as error:
                    self.refused.append(str(error))
                except Exception as error:
                    self.refused.append(f"its condition cannot be computed now: {error_summary(error)}")
                return None

            with decide_branches(decide, CHECK_BRANCH, REQUIRE):
                yield


def describe_branches(captured: fx.GraphModule) -> None:
    """Give each ``check_branch`` and ``require`` the line of the model that asked."""
    for target, text in ((CHECK_BRANCH, ""), (REQUIRE, MICROBATCH_CHECK)):
        for node in captured.graph.find_nodes(op="call_function", target=target):
            module, _ = module_of(node)
            line = source_line(node)
            node.args = (*node.args[:-1], f"{line or 'a branch'} ({module or 'model'}){text}")


def refuse_branches(captured: fx.GraphModule, why: str) -> None:
    """Raise CaptureError if the model branches on values of tensors."""
    for node in captured.graph.find_nodes(op="call_function", target=CHECK_BRANCH):
        raise CaptureError(
            f"the model cannot be captured as one graph{at_line(node)}\n"
            f"  A branch asks for the value of a tensor, which cannot be followed {why}.\n"
            "Choose with torch.where or a mask."
        )


def _decide(
    node: fx.Node, get_attribute: Callable[[str], Any], batch_values: "_Values", call_values: "_Values"
) -> Decision:
    if is_always_false(node):
        return Decision(False, is_certain=True)
    for values in (batch_values, call_values):
        values.follow(node.graph, get_attribute)
    if node in call_values.random_nodes:
        raise CaptureError("it goes one way or the other by a number that is drawn at random")
    found = (batch_values if node in batch_values.known else call_values).known[node]
    return Decision(bool(found))


@dataclass
class _Values:
    """The values of nodes while their graph is made; with ``arguments_only``, where no model is needed.

    ``random_nodes`` are the nodes that depend on random numbers, dropout apart.
    """

    leaves: Mapping[int, Any]
    originals: Mapping[int, Tensor]
    arguments_only: bool
    known: dict[fx.Node, Any] = field(default_factory=dict)
    random_nodes: set[fx.Node] = field(default_factory=set)
    _graph: fx.Graph | None = None
    _sizes: dict[Any, int] = field(default_factory=dict)
    _seen: set[fx.Node] = field(default_factory=set)
    _parameters: set[int] = field(default_factory=set)

    def follow(self, graph: fx.Graph, get_attribute: Callable[[str], Any]) -> None:
        """Compute the nodes added to the graph since the last call."""
        if graph is not self._graph:
            self._graph, self.known, self._seen, self.random_nodes = graph, {}, set(), set()
        with _preserved_random_state(), torch.no_grad(), WriteProtection(self._parameters):
            for node in graph.nodes:
                if node not in self._seen:
                    self._seen.add(node)
                    self._visit(node, get_attribute)

    def _visit(self, node: fx.Node, get_attribute: Callable[[str], Any]) -> None:
        inputs = node.all_input_nodes
        if is_random_except_dropout(node) or any(source in self.random_nodes for source in inputs):
            self.random_nodes.add(node)
            if mutates_argument(node):
                self.random_nodes.update(inputs[:1])
        if node.op == "placeholder":
            self._take(node)
        elif node.target not in (CHECK_BRANCH, REQUIRE) and all(source in self.known for source in inputs):
            size = evaluate_symbolic(node.meta.get("example_value"), self._sizes)
            self.known[node] = self._call(node, get_attribute) if size is None else size
        elif mutates_argument(node) and node.args[0] in self.known:
            del self.known[inputs[0]]

    def _take(self, node: fx.Node) -> None:
        example = placeholder_example(node)
        if not isinstance(example, Tensor):
            size = evaluate_symbolic(node.meta.get("example_value"), self._sizes)
            if size is not None:
                self.known[node] = size
        elif id(example) in self.leaves:
            value = torch.as_tensor(self.leaves[id(example)])
            self._sizes |= shape_symbols(node.meta["example_value"], value)
            self.known[node] = value.clone()
        elif not self.arguments_only:
            value = self.originals.get(id(example), example)
            if not has_values(value):
                raise CaptureError("its condition needs tensors of the model that are not in this process")
            is_parameter = isinstance(value, torch.nn.Parameter)
            if is_parameter:
                self._parameters.add(value.untyped_storage().data_ptr())
            self.known[node] = value if is_parameter else value.clone()

    def _call(self, node: fx.Node, get_attribute: Callable[[str], Any]) -> Any:
        if node.op == "get_attr":
            return get_attribute(str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.known.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _like_here() -> Callable[[], None]:
    """A function that gives another thread the autocast of this one."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]

    def set_autocast() -> None:
        for kind, dtype in zip(kinds, dtypes, strict=True):
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)

    return set_autocast


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the generators of torch and of Python afterwards."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
