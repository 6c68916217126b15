"""Runs the graph of a microbatch on several microbatches in turn, and merges what they return.

It says in a page what the programs of a step do, on one device and in one thread::

    batch_counts(all rows)
    for each microbatch:  forward, up to the inputs of the tail
    tail(the inputs of all microbatches)
    for each microbatch:  the rest, with its rows of the tail's gradients
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipec.capture.model_call import ModelCall
from pipec.compiler.check.draws import FixedDraws
from pipec.compiler.check.unsplit_run import StepValues
from pipec.errors import BranchError
from pipec.graph import (
    BatchCount,
    BatchFraction,
    Buffer,
    Gradient,
    LossGradient,
    ModelInput,
    Output,
    Parameter,
    Precomputed,
    ResultRole,
    TailGradient,
    TailInput,
    TrainingGraph,
    UpdatedBuffer,
    is_branch_check,
    is_random,
)
from pipec.ir import Sizes
from pipec.ir.batch_axis import LEADING, BatchAxis

Observer = Callable[[int, fx.Node, Any], None]
"""Called with the number of a microbatch, a node and its value."""


@dataclass(frozen=True, eq=False)
class SplitRun:
    """A graph to run on microbatches of ``call``.

    ``tensors`` holds parameters, buffers and constants by FQN. ``loss_weights`` are those of microbatches if
    the user gives them; None: their fractions of the rows. ``values`` are the other sizes, by name.
    """

    graph: TrainingGraph
    tensors: Mapping[str, Tensor]
    device: torch.device
    values: Sizes
    draws: FixedDraws
    loss_weights: Sequence[float] | None = None

    def run(self, call: ModelCall, sizes: Sequence[int], observe: Observer | None = None) -> StepValues:
        """The merged values of consecutive microbatches of these ``sizes``, which make up ``call``.

        Raises:
            BranchError: the model would branch otherwise than the graph does.
        """
        step = _Step(self, call, sizes)
        with torch.no_grad():
            return step.run(observe)


@dataclass(eq=False)
class _Microbatch:
    """The values of a microbatch: ``env`` has those that are still needed, ``waiting`` the nodes to come."""

    number: int
    rows: int
    start: int
    env: dict[fx.Node, Any] = field(default_factory=dict)
    waiting: Sequence[fx.Node] = ()
    results: dict[int, Any] = field(default_factory=dict)


class _Step:
    def __init__(self, run: SplitRun, call: ModelCall, sizes: Sequence[int]) -> None:
        self._run, self._graph, self._call, self._sizes = run, run.graph, call, sizes
        self._buffers, self._numbers = dict(run.tensors), dict[int, _Numbers]()
        self._rows = sum(sizes)
        weights = run.loss_weights or [size / self._rows for size in sizes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._microbatches = [_Microbatch(k, *each) for k, each in enumerate(zip(sizes, starts, strict=True))]
        self._weights = weights
        self._counts = self._batch_counts()
        self._step_buffers = self._graph.step_buffers
        self._precomputed = self._precompute()
        self._tail: dict[ResultRole, Any] = {}
        self._gradients: dict[str, Tensor] = {}

    def run(self, observe: Observer | None) -> StepValues:
        uses = _uses(self._graph.module.graph)
        for each in self._microbatches:
            each.waiting = [*self._graph.module.graph.nodes]
            self._advance(each, uses, observe)
        if self._graph.tail is not None:
            self._run_tail()
            for each in self._microbatches:
                self._advance(each, uses, observe)
        return StepValues(self._merged(), self._gradients)

    def _advance(
        self, microbatch: _Microbatch, uses: Mapping[fx.Node, int], observe: Observer | None
    ) -> None:
        """Compute all nodes whose inputs are known, and collect the results among them."""
        env, left, waiting = microbatch.env, dict(uses), []
        for node in microbatch.waiting:
            if node.op == "output" or any(source not in env for source in node.all_input_nodes):
                waiting.append(node)
                continue
            if node.op == "placeholder":
                found = self._argument(node, microbatch)
                if found is _UNKNOWN:
                    waiting.append(node)
                    continue
                env[node] = found
            else:
                env[node] = _compute(node, env, self._symbols(microbatch.rows), self._run)
            if observe is not None and node.op != "placeholder":
                observe(microbatch.number, node, env[node])
            for source in node.all_input_nodes if not waiting else ():
                left[source] -= 1
                if not left[source]:
                    env[source] = None
        microbatch.waiting = waiting
        for position, (role, node) in enumerate(self._graph.outputs):
            if node in env and position not in microbatch.results:
                microbatch.results[position] = env[node]
                self._collect(role, env[node])

    def _collect(self, role: ResultRole, value: Any) -> None:
        if isinstance(role, Gradient):
            value = value.to_dense() if value.is_sparse else value
            known = self._gradients.get(role.fqn)
            self._gradients[role.fqn] = value if known is None else known + value
        elif isinstance(role, UpdatedBuffer) and role.fqn not in self._step_buffers:
            self._buffers[role.fqn] = value

    def _argument(self, node: fx.Node, microbatch: _Microbatch) -> Any:
        match node.meta["role"]:
            case Parameter(fqn=fqn) | Buffer(fqn=fqn):
                return self._tensor(fqn)
            case Precomputed(index=index):
                return self._precomputed[index]
            case ModelInput(position=position, batched=batched):
                leaf = self._leaf(position)
                stop = microbatch.start + microbatch.rows
                return leaf[microbatch.start : stop] if batched else leaf
            case LossGradient():
                weight = 1.0 if microbatch.number == _WHOLE else self._weights[microbatch.number]
                return torch.full((), weight, dtype=node.meta["val"].dtype, device=self._run.device)
            case BatchFraction():
                share = microbatch.rows / self._rows
                return torch.tensor(share, dtype=torch.float64, device=self._run.device)
            case BatchCount(index=index):
                return self._counts[index]
            case TailGradient() as role:
                return self._own_rows(self._tail[role], microbatch) if role in self._tail else _UNKNOWN
        raise AssertionError(node.meta["role"])

    def _tensor(self, fqn: str) -> Tensor:
        return self._buffers[fqn] if fqn in self._buffers else self._graph.constants[fqn]

    def _leaf(self, position: int) -> Any:
        leaf = self._call.leaves[position]
        return leaf.to(self._run.device) if isinstance(leaf, Tensor) else leaf

    def _symbols(self, rows: int) -> "_Numbers":
        if rows not in self._numbers:
            sizes = {"b": rows, **self._run.values}
            symbols = self._graph.symbols.items()
            self._numbers[rows] = _Numbers({each: sizes[name] for each, name in symbols if name in sizes})
        return self._numbers[rows]

    def _batch_counts(self) -> Sequence[Any]:
        """The values of the whole batch. A graph for microbatches of one size adds up theirs."""
        graph = self._graph.batch_counts
        if graph is None:
            return ()

        def of_rows(start: int, rows: int) -> Sequence[Any]:
            part = _Microbatch(_WHOLE, rows, start)
            return _evaluate(graph, lambda node: self._argument(node, part), self._symbols(rows), self._run)

        if self._graph.batch is not None:
            return of_rows(0, self._rows)
        parts = [of_rows(each.start, each.rows) for each in self._microbatches]
        return [torch.stack(values).sum(0) for values in zip(*parts, strict=True)]

    def _precompute(self) -> Sequence[Any]:
        graph = self._graph.precomputed
        if graph is None:
            return ()
        whole = _Microbatch(_WHOLE, self._rows, 0)
        return _evaluate(
            graph, lambda node: self._argument(node, whole), self._symbols(self._rows), self._run
        )

    def _run_tail(self) -> None:
        assert self._graph.tail is not None
        parts: dict[int, list[Tensor]] = defaultdict(list)
        for each in self._microbatches:
            for position, (role, _) in enumerate(self._graph.outputs):
                if isinstance(role, TailInput):
                    parts[role.index].append(each.results[position])
        whole = _Microbatch(_WHOLE, self._rows, 0)

        def argument(node: fx.Node) -> Any:
            role = node.meta["role"]
            return (
                torch.cat(parts[role.index]) if isinstance(role, TailInput) else self._argument(node, whole)
            )

        found = _evaluate(self._graph.tail, argument, self._symbols(self._rows), self._run)
        for role, value in zip(self._graph.tail_results, found, strict=True):
            self._tail[role] = value
            self._collect(role, value)

    def _own_rows(self, gradient: Tensor, microbatch: _Microbatch) -> Tensor:
        per_row = gradient.shape[0] // self._rows
        return gradient[microbatch.start * per_row : (microbatch.start + microbatch.rows) * per_row]

    def _merged(self) -> dict[int, Tensor]:
        merged = {role.position: x for role, x in self._tail.items() if isinstance(role, Output)}
        for position, (role, node) in enumerate(self._graph.outputs):
            parts = [each.results[position] for each in self._microbatches]
            if isinstance(role, Output) and isinstance(parts[0], Tensor):
                whole = self._merge(role, node, parts)
                if whole is not None:
                    merged[role.position] = whole
        return merged

    def _merge(self, role: Output, node: fx.Node, parts: Sequence[Tensor]) -> Tensor | None:
        """The value of the batch; None if it is not known where parts have their rows."""
        if len(parts) == 1:
            return _restored(parts[0], role.axis or LEADING)
        if role.is_sum:
            return torch.stack([*parts]).sum(0, dtype=parts[0].dtype)
        axis, shape, rows = role.axis or LEADING, node.meta["val"].shape, self._graph.batch_size
        dim, inner = (0, 1) if axis.has_outer else (axis.dim, axis.inner)
        dims = [k for k, size in enumerate(shape) if _has(size, self._graph.batch)]
        if self._graph.batch is None and shape[dim : dim + 1] == (rows * inner,):
            dims = [dim]
        if dims:
            return _restored(torch.cat([*parts], dims[0]), axis) if len(dims) == 1 else None
        if not (parts[0].is_floating_point() or parts[0].is_complex()):
            return parts[0]
        own = self._run.loss_weights if role.position == 0 else None
        weights = own or [size / self._rows for size in self._sizes]
        return functools.reduce(torch.add, (x * w for x, w in zip(parts, weights, strict=True)))


_UNKNOWN = object()

_WHOLE = -1
"""The number of the batch as one microbatch."""


def _restored(whole: Tensor, axis: BatchAxis) -> Tensor:
    restored: Tensor = axis.restore(whole) if axis.has_outer else whole
    return restored


def _has(size: Any, symbol: sympy.Symbol | None) -> bool:
    return symbol is not None and hasattr(size, "node") and symbol in size.node.expr.free_symbols


def _uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """How often each node is read; the results of a graph are never dropped."""
    results = set(graph.output_node().all_input_nodes)
    return {node: len(node.users) + (node in results) for node in graph.nodes}


def _evaluate(
    graph: fx.Graph,
    argument: Callable[[fx.Node], Any],
    numbers: "_Numbers",
    run: SplitRun,
) -> Sequence[Any]:
    """What a graph returns for these arguments."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = argument(node)
        elif node.op == "output":
            found: Any = fx.map_arg(node.args[0], env.__getitem__)
            return tuple(found)
        else:
            env[node] = _compute(node, env, numbers, run)
    raise AssertionError("a graph ends with its output")


class _Numbers(dict[sympy.Basic, Any]):
    """The values of expressions, each computed once, for these values of ``symbols``."""

    def __init__(self, symbols: Mapping[sympy.Basic, float]) -> None:
        super().__init__()
        self._symbols = symbols

    def __missing__(self, expression: sympy.Basic) -> Any:
        number = expression.subs(self._symbols)
        if number.is_number:  # else a data-dependent size, which comes as a node besides
            number = int(number) if number.is_integer else float(number)
        self[expression] = number
        return number


def _compute(node: fx.Node, env: Mapping[fx.Node, Any], numbers: _Numbers, run: SplitRun) -> Any:
    def resolved(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return env[argument]
        if isinstance(argument, sympy.Basic):
            return numbers[argument]
        return run.device if isinstance(argument, torch.device) else argument

    args: Any = map_aggregate(node.args, resolved)
    kwargs: Any = map_aggregate(node.kwargs, resolved)
    if is_branch_check(node):
        condition, outcome, branch = args
        if bool(condition) is not outcome:
            raise BranchError(f"{branch} is {bool(condition)}, and {outcome} in what was captured")
        return None
    if node.target is torch.ops.aten.view.default:
        return args[0].reshape(args[1])  # as stages do: strides may be others than those that were traced
    if is_random(node):
        return run.draws.draw(node.target, args, kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
