"""Which way a branch goes that asks for the values of tensors: the way that the traced call takes.

Dynamo asks while it traces. What it has traced so far is then computed with the values of the call, so that
the truth value of the condition is known. The graph gets an ``assume`` in its place, which fails in a step
in which the condition is another one.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipec import torch_compat
from pipec.capture.call import Call
from pipec.capture.calls import changes_argument, draws_by_chance, is_never, where
from pipec.capture.diagnosis import brief, lines_in, model_line
from pipec.capture.markers import EXPECT
from pipec.capture.operators import module_of
from pipec.errors import CaptureError
from pipec.graph import ASSUME

CHECKED = ": this check fails for a microbatch; each is checked as if it were the whole mini-batch"


@dataclass
class Branches:
    """Decides the branches of one call: those on its arguments alone by the ``batch``, others by the rows
    of the ``call`` that is traced.

    ``originals`` are the tensors of the model, by the ``id`` of the fake ones that stand for them.
    ``refused`` says why a branch was not decided.
    """

    call: Call
    batch: Call
    originals: Mapping[int, Tensor]
    refused: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def decided(self, sample: Call, symbolic: bool) -> Iterator[None]:
        """Decide what is asked while ``sample`` is traced, whose tensors have no values.

        If the batch is not ``symbolic``, code is traced that is right for the rows of the call alone.
        """
        leaves, batch = [id(leaf) for leaf in sample.leaves], self.batch if symbolic else self.call
        with ThreadPoolExecutor(1, initializer=_like_here()) as thread:  # modes of tracing are a thread's own
            of_batch = _Values(dict(zip(leaves, batch.leaves, strict=True)), self.originals, given=True)
            of_call = _Values(dict(zip(leaves, self.call.leaves, strict=True)), self.originals, given=False)

            def decide(node: fx.Node, held: Callable[[str], Any]) -> torch_compat.Decision | None:
                try:
                    return thread.submit(_decide, node, held, of_batch, of_call).result()
                except CaptureError as error:
                    self.refused.append(str(error))
                except Exception as error:
                    self.refused.append(f"its condition cannot be computed now: {brief(error)}")
                return None

            with torch_compat.branches_decided(decide, ASSUME, EXPECT):
                yield


def describe_branches(captured: fx.GraphModule) -> None:
    """Let each ``assume`` and ``expect`` say which line of the model asked."""
    for target, text in ((ASSUME, ""), (EXPECT, CHECKED)):
        for node in captured.graph.find_nodes(op="call_function", target=target):
            module, _ = module_of(node)
            line = model_line(lines_in(node.meta.get("stack_trace") or ""))
            node.args = (*node.args[:-1], f"{line or 'a branch'} ({module or 'model'}){text}")


def refuse_branches(captured: fx.GraphModule, why: str) -> None:
    """Raise CaptureError if the model asks for values of tensors."""
    for node in captured.graph.find_nodes(op="call_function", target=ASSUME):
        raise CaptureError(
            f"the model cannot be captured as one graph{where(node)}\n"
            f"  A branch asks for the value of a tensor, which cannot be followed {why}.\n"
            "Choose with torch.where or a mask."
        )


def _decide(
    node: fx.Node, held: Callable[[str], Any], of_batch: "_Values", of_call: "_Values"
) -> torch_compat.Decision:
    if is_never(node):
        return torch_compat.Decision(False, is_certain=True)
    for values in (of_batch, of_call):
        values.follow(node.graph, held)
    if node in of_call.by_chance:
        raise CaptureError("it goes one way or the other by a number that is drawn at random")
    found = (of_batch if node in of_batch.known else of_call).known[node]
    return torch_compat.Decision(bool(found))


@dataclass
class _Values:
    """What the nodes of a graph are, which is still being made. If ``given``, of those that need no model.

    ``by_chance`` are the nodes that depend on what is drawn, unless it is dropout.
    """

    leaves: Mapping[int, Any]
    originals: Mapping[int, Tensor]
    given: bool
    known: dict[fx.Node, Any] = field(default_factory=dict)
    by_chance: set[fx.Node] = field(default_factory=set)
    _graph: fx.Graph | None = None
    _sizes: dict[Any, int] = field(default_factory=dict)
    _seen: set[fx.Node] = field(default_factory=set)
    _parameters: set[int] = field(default_factory=set)

    def follow(self, graph: fx.Graph, held: Callable[[str], Any]) -> None:
        """Compute what was added to the graph since."""
        if graph is not self._graph:
            self._graph, self.known, self._seen, self.by_chance = graph, {}, set(), set()
        with _random_state_kept(), torch.no_grad(), torch_compat.MemoryKept(self._parameters):
            for node in graph.nodes:
                if node not in self._seen:
                    self._seen.add(node)
                    self._visit(node, held)

    def _visit(self, node: fx.Node, held: Callable[[str], Any]) -> None:
        inputs = node.all_input_nodes
        if draws_by_chance(node) or any(source in self.by_chance for source in inputs):
            self.by_chance.add(node)
            if changes_argument(node):
                self.by_chance.update(inputs[:1])
        if node.op == "placeholder":
            self._take(node)
        elif node.target not in (ASSUME, EXPECT) and all(source in self.known for source in inputs):
            size = torch_compat.size_in(node.meta.get("example_value"), self._sizes)
            self.known[node] = self._call(node, held) if size is None else size
        elif changes_argument(node) and node.args[0] in self.known:
            del self.known[inputs[0]]

    def _take(self, node: fx.Node) -> None:
        example = torch_compat.example_of(node)
        if not isinstance(example, Tensor):
            size = torch_compat.size_in(node.meta.get("example_value"), self._sizes)
            if size is not None:
                self.known[node] = size
        elif id(example) in self.leaves:
            value = torch.as_tensor(self.leaves[id(example)])
            self._sizes |= torch_compat.symbols_of(node.meta["example_value"], value)
            self.known[node] = value.clone()
        elif not self.given:
            value = self.originals.get(id(example), example)
            if not torch_compat.has_values(value):
                raise CaptureError("its condition needs tensors of the model that are not in this process")
            is_parameter = isinstance(value, torch.nn.Parameter)
            if is_parameter:
                self._parameters.add(value.untyped_storage().data_ptr())
            self.known[node] = value if is_parameter else value.clone()

    def _call(self, node: fx.Node, held: Callable[[str], Any]) -> Any:
        if node.op == "get_attr":
            return held(str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.known.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _like_here() -> Callable[[], None]:
    """What gives a thread the autocast of this one."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]

    def set_autocast() -> None:
        for kind, dtype in zip(kinds, dtypes, strict=True):
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)

    return set_autocast


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put back the generators of torch and of Python."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
