"""Runs the graph of a microbatch on several microbatches in turn, and merges what they return.

It says in a page what the programs of a step do, on one device and in one thread::

    batch_counts(all rows)
    for each microbatch:  what does not wait for the tail, or for a loss that the script computes
    tail(the inputs of all microbatches), or what stands for the loss
    for each microbatch:  the rest, with its rows of the gradients
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipec.capture.markers import OUTPUT_GRADIENT
from pipec.capture.model_call import ModelCall
from pipec.compiler.check.compare import Tolerance, is_close
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
    Operator,
    Output,
    OutputGradient,
    Parameter,
    Precomputed,
    ResultRole,
    TailGradient,
    TailInput,
    TrainingGraph,
    UpdatedBuffer,
    is_branch_check,
    is_random,
    is_view,
)
from pipec.ir import Sizes
from pipec.ir.batch_axis import LEADING, BatchAxis
from pipec.torch_compat.module_state import without_autocast

Observer = Callable[[fx.Node, Any], None]
"""Called with a node and its value for a microbatch."""

_Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class _Rows:
    """The rows of a microbatch, or of the whole batch, and the weight of their loss.

    ``leaves`` are those of the arguments of the batch, or of a given microbatch; ``values`` are its other
    sizes, by name.
    """

    start: int
    count: int
    weight: float
    leaves: Sequence[Any]
    values: Sizes

    def of(self, whole: Tensor, per_row: int = 1) -> Tensor:
        return whole[self.start * per_row : (self.start + self.count) * per_row]


@dataclass(frozen=True, eq=False)
class SplitRun:
    """A graph to run on microbatches of a call.

    ``tensors`` holds parameters, buffers and constants by FQN. ``loss_weights`` are those of microbatches if
    the user gives them; None: their fractions of the rows. ``values`` are the other sizes, by name, of all
    microbatches, or of each given one.
    """

    graph: TrainingGraph
    tensors: Mapping[str, Tensor]
    device: torch.device
    values: Sequence[Sizes]
    draws: FixedDraws
    loss_weights: Sequence[float] | None = None

    def run(self, call: ModelCall, sizes: Sequence[int], observe: Observer | None = None) -> StepValues:
        """The merged values of consecutive microbatches of these ``sizes``, which make up ``call``.

        Raises:
            BranchError: the model would branch otherwise than the graph does.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), without_autocast():
            return _Step(self, call, sizes).run(observe)


class _Step:
    def __init__(self, run: SplitRun, call: ModelCall, sizes: Sequence[int]) -> None:
        self._run, self._graph, self._given = run, run.graph, call.given
        self._whole = _Rows(0, sum(sizes), 1.0, call.leaves, run.values[0])
        weights = run.loss_weights or [size / self._whole.count for size in sizes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        leaves = [part.leaves for part in call.parts] * (1 if call.given else len(sizes))
        values = [*run.values] * (1 if call.given else len(sizes))
        self._microbatches = [_Rows(*x) for x in zip(starts, sizes, weights, leaves, values, strict=True)]
        self._buffers, self._gradients = dict(run.tensors), dict[str, Tensor]()
        self._parts: dict[ResultRole, list[Any]] = defaultdict(list)
        self._tail: dict[ResultRole, Any] = {}
        self._numbers: dict[tuple[Any, ...], _Numbers] = {}
        self._precomputed: dict[int, Sequence[Any]] = {}
        self._counts = self._batch_counts()

    def run(self, observe: Observer | None) -> StepValues:
        early, late = _before_and_behind_loss(self._graph.module.graph)
        every = [_Values() for _ in self._microbatches]
        last_reads = _last_reads([*early, *late], {node for _, node in self._graph.outputs})
        for nodes in (early, late):
            members = {*nodes}
            results = [(role, node) for role, node in self._graph.outputs if node in members]
            for rows, values in zip(self._microbatches, every, strict=True):
                for node in nodes:
                    values[node] = self._value(node, rows, values)
                    if observe is not None and node.op != "placeholder":
                        observe(node, values[node])
                    for source in last_reads[node]:
                        del values[source]
                for role, node in results:
                    self._collect(role, values[node])
                if not late:
                    values.clear()
            if nodes is early:
                self._merged_early = self._merged()
            if nodes is early and self._graph.tail is not None:
                found = self._evaluate(self._graph.tail, self._whole)
                self._tail = dict(zip(self._graph.tail_results, found, strict=True))
                for role, value in self._tail.items():
                    self._collect(role, value)
        return StepValues(self._merged(), self._gradients)

    def _collect(self, role: ResultRole, value: Any) -> None:
        match role:
            case Gradient(fqn=fqn):
                value = value.to_dense() if value.is_sparse else value
                known = self._gradients.get(fqn)
                self._gradients[fqn] = value if known is None else known + value
            case UpdatedBuffer(fqn=fqn):
                if fqn not in self._graph.step_buffers:
                    self._buffers[fqn] = value
            case Output() | TailInput():
                self._parts[role].append(value)

    def _value(self, node: fx.Node, rows: _Rows, values: Mapping[fx.Node, Any]) -> Any:
        if node.op != "placeholder":
            return _compute(node, values, self._numbers_for(rows), self._run)
        match node.meta["role"]:
            case Parameter(fqn=fqn) | Buffer(fqn=fqn):
                return self._buffers[fqn] if fqn in self._buffers else self._graph.constants[fqn]
            case Precomputed(index=index):
                return self._precomputed_for(rows if self._given else self._whole)[index]
            case ModelInput(position=position, batched=batched):
                leaf = rows.leaves[position]
                leaf = leaf.to(self._run.device) if isinstance(leaf, Tensor) else leaf
                return rows.of(leaf) if batched else leaf
            case LossGradient():
                return torch.full((), rows.weight, dtype=node.meta["val"].dtype, device=self._run.device)
            case BatchFraction():
                share = rows.count / self._whole.count
                return torch.tensor(share, dtype=torch.float64, device=self._run.device)
            case BatchCount(index=index):
                return self._counts[index]
            case TailInput() as role:
                return torch.cat(self._parts[role])
            case TailGradient() as role:
                gradient = self._tail[role]
                return rows.of(gradient, gradient.shape[0] // self._whole.count)
            case OutputGradient(position=position):
                return self._output_gradient(position, rows)
        raise AssertionError(node.meta["role"])

    def _evaluate(self, graph: fx.Graph, rows: _Rows) -> Sequence[Any]:
        """What another graph of the step returns for these rows."""
        values = _Values()
        for node in graph.nodes:
            if node.op != "output":
                values[node] = self._value(node, rows, values)
        found: Any = fx.map_arg(graph.output_node().args[0], values.__getitem__)
        return tuple(found)

    def _precomputed_for(self, rows: _Rows) -> Sequence[Any]:
        if rows.start not in self._precomputed:
            assert self._graph.precomputed is not None, "its results are arguments"
            self._precomputed[rows.start] = self._evaluate(self._graph.precomputed, rows)
        return self._precomputed[rows.start]

    def _numbers_for(self, rows: _Rows) -> "_Numbers":
        key = rows.count, *rows.values.values()
        if key not in self._numbers:
            self._numbers[key] = _Numbers(self._graph, {"b": rows.count, **rows.values})
        return self._numbers[key]

    def _batch_counts(self) -> Sequence[Any]:
        """The values of the whole batch. A graph for microbatches of one size adds up theirs."""
        graph = self._graph.batch_counts
        if graph is None:
            return ()
        if self._graph.batch is not None:
            return self._evaluate(graph, self._whole)
        parts = [self._evaluate(graph, rows) for rows in self._microbatches]
        return [torch.stack(values).sum(0) for values in zip(*parts, strict=True)]

    def _merged(self) -> dict[int, Tensor]:
        merged = {role.position: x for role, x in self._tail.items() if isinstance(role, Output)}
        for role, node in self._graph.outputs:
            if isinstance(role, Output) and isinstance(self._parts[role][0], Tensor):
                whole = self._merge(role, node, self._parts[role])
                if whole is not None:
                    merged[role.position] = whole
        return merged

    def _output_gradient(self, position: int, rows: _Rows) -> Tensor:
        """The gradient of a microbatch's part of an output, of what stands for a loss of the whole."""
        [(role, part)] = [
            (role, parts[0])
            for role, parts in self._parts.items()
            if isinstance(role, Output) and role.position == position
        ]
        output, axis = self._merged_early[position], role.axis or LEADING
        gradient: Tensor = OUTPUT_GRADIENT(torch.ones((), dtype=output.dtype), output, position)
        if axis.has_outer:
            gradient = axis.rows_first(gradient, self._whole.count)
        dims = [k for k, size in enumerate(part.shape) if size != gradient.shape[k]]
        if role.is_sum or len(self._microbatches) == 1:
            return gradient
        if not dims:
            return gradient * (rows.count / self._whole.count)
        per_row = gradient.shape[dims[0]] // self._whole.count
        return gradient.narrow(dims[0], rows.start * per_row, rows.count * per_row).contiguous()

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
        weights = [
            rows.weight if role.position == 0 else rows.count / self._whole.count
            for rows in self._microbatches
        ]
        return functools.reduce(torch.add, (x * w for x, w in zip(parts, weights, strict=True)))


def _before_and_behind_loss(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that need nothing of the tail, nor of a loss outside, and those that do, each in order."""
    behind: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op != "output":
            needs = isinstance(node.meta.get("role"), TailGradient | OutputGradient)
            behind[node] = needs or any(behind[source] for source in node.all_input_nodes)
    return [node for node in behind if not behind[node]], [node for node in behind if behind[node]]


def _last_reads(nodes: Sequence[fx.Node], kept: Collection[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """The nodes whose values each of ``nodes`` is the last one to read, without those that are ``kept``."""
    last = {source: node for node in nodes for source in node.all_input_nodes}
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for source, node in last.items():
        if source not in kept:
            found[node].append(source)
    return found


def _restored(whole: Tensor, axis: BatchAxis) -> Tensor:
    restored: Tensor = axis.restore(whole) if axis.has_outer else whole
    return restored


def _has(size: Any, symbol: sympy.Symbol | None) -> bool:
    return symbol is not None and hasattr(size, "node") and symbol in size.node.expr.free_symbols


class _Numbers(dict[sympy.Basic, Any]):
    """The values of a graph's expressions, each computed once, where its names have these ``sizes``."""

    def __init__(self, graph: TrainingGraph, sizes: Sizes) -> None:
        super().__init__()
        self._symbols = {each: sizes[name] for each, name in graph.symbols.items() if name in sizes}

    def __missing__(self, expression: sympy.Basic) -> Any:
        number = expression.subs(self._symbols)
        if number.is_number:  # else a data-dependent size, which comes as a node besides
            number = int(number) if number.is_integer else float(number)
        self[expression] = number
        return number


def _compute(node: fx.Node, values: Mapping[fx.Node, Any], numbers: _Numbers, run: SplitRun) -> Any:
    def resolved(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
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


def first_difference(
    run: SplitRun, call: ModelCall, sizes: Sequence[int], tolerance: Tolerance
) -> Operator | None:
    """The operator of the first node whose parts do not make up its value for all rows; None for none.

    The parts are to be rows of the whole value, its terms, or equal to it.
    """
    whole: dict[fx.Node, Tensor] = {}
    parts: dict[fx.Node, list[Tensor]] = {}

    def keep_whole(node: fx.Node, value: object) -> None:
        if isinstance(value, Tensor):
            whole[node] = value.clone()

    def keep_part(node: fx.Node, value: object) -> None:
        if isinstance(value, Tensor):
            parts.setdefault(node, []).append(value.clone())

    run.run(call, [sum(sizes)], keep_whole)
    run.run(call, sizes, keep_part)
    for node in run.graph.nodes:
        if node not in whole or is_view(node) or is_random(node):
            continue
        if not _makes_up(whole[node], parts.get(node, []), sizes, tolerance):
            number: int = node.meta["operator"]
            return run.graph.operators[number]
    return None


def _makes_up(whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], tolerance: Tolerance) -> bool:
    if len(parts) != len(sizes) or any(part.ndim != whole.ndim for part in parts):
        return False
    if all(part.shape == whole.shape for part in parts):
        rows = sum(sizes)
        total = torch.stack([part.double() if part.is_floating_point() else part for part in parts])
        shares = [total[k] * (size / rows) for k, size in enumerate(sizes)]
        candidates = [total.sum(0), sum(shares[1:], shares[0])]
        if all(is_close(part, whole, tolerance) for part in parts):
            return True
        return any(is_close(found.to(whole.dtype), whole, tolerance) for found in candidates)
    dims = [k for k, size in enumerate(whole.shape) if any(part.shape[k] != size for part in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return False
    (dim,) = dims
    if is_close(torch.cat([*parts], dim), whole, tolerance):
        return True
    rows, beside = sum(sizes), whole.shape[dim] // sum(sizes)
    if whole.shape[dim] != beside * rows:
        return False
    unmerged = [part.unflatten(dim, (beside, -1)) for part in parts]  # time and batch in one
    return is_close(torch.cat(unmerged, dim + 1).flatten(dim, dim + 1), whole, tolerance)
