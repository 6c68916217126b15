"""Checks what the analysis says of every value of a graph against brute force.

The rewritten graph runs on the mini-batch and on each microbatch. What the analysis calls rows must be the
microbatches' values, one behind the other; what it calls a sum must add up; what is whole must be the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import batch_comparison
import torch
from batch_comparison import wide
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pipec.capture.batch.analyse_batch import _BatchAnalysis
from pipec.capture.batch.dependence import (
    Dependence,
    MixedRows,
    PerRow,
    SelectedRows,
    SumOverRows,
    Unproven,
    Whole,
)
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION, OUTPUT_MERGE
from pipec.errors import PipecError
from pipec.torch_compat import pytree

TOLERANCE = 1e-8


@dataclass
class Checked:
    """What the analysis says of the first output, and each claim about any value that is wrong."""

    said: str
    claim: Dependence | None = None
    wrong: list[str] = field(default_factory=list)
    num_proved: int = 0
    num_claims: int = 0


class SkippedError(Exception):
    """The graph is no case: it does not run on microbatches, or can only be traced for one number of rows."""


class NodeError(Exception):
    """A node of a rewritten graph fails."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def check_graph(
    module: fx.GraphModule,
    inputs: Mapping[str, Any],
    batched: Sequence[str],
    sizes: Sequence[int],
    trained: Collection[str] = (),
) -> Checked:
    """Analyse a graph of the arguments ``inputs``; compare each claim with microbatches of these sizes.

    What is computed of the arguments ``trained`` depends on parameters, so that it is never counted once over
    the whole batch.
    """
    parts = list(split(inputs, batched, sizes))
    try:
        expected = pytree.tree_leaves(fx.Interpreter(module).run(*copied(inputs)))
        for part in parts:
            fx.Interpreter(module).run(*copied(part))
    except Exception as error:
        raise SkippedError("microbatches do not run") from error
    give_values(module, parts[0], batched, trained)
    walk = _BatchAnalysis(module, set(batched), sizes[0], 1)
    try:
        walk.run()
        output = pytree.tree_leaves(module.graph.output_node().args)[0]
        claim = walk.dependence_of(output) if isinstance(output, fx.Node) else Whole()
        findings = walk.finish(False)
    except PipecError:
        return Checked("refused")
    except Exception as error:
        return Checked("raw", wrong=[f"the analysis fails: {error!r}"])
    module.recompile()
    if findings.assumed or findings.num_batch_norms:
        return Checked("assumed" if findings.assumed else "declared", claim)
    unproven = isinstance(claim, Unproven | SelectedRows)
    checked = Checked(
        "refused" if isinstance(claim, MixedRows) else "unproven" if unproven else "proved", claim
    )
    try:
        whole = Run(module, 0, sum(sizes), sum(sizes))
        result = whole.run(*copied(inputs))
        runs = list[Run]()
        for place, part in enumerate(parts):
            runs.append(Run(module, sum(sizes[:place]), sizes[place], sum(sizes), whole.counted))
            runs[-1].run(*copied(part))
    except NodeError as failed:
        if isinstance(walk.dependence_of(failed.node), MixedRows):
            return checked  # nothing runs that needs it
        error = failed.__cause__
        checked.wrong.append(f"the rewritten graph fails: {error}".split("While executing")[0].strip())
        return checked
    found = pytree.tree_leaves(result)
    returned = pytree.tree_leaves(module.graph.output_node().args)
    for node, mine, theirs in zip(returned, found, expected, strict=True):
        is_refused = isinstance(node, fx.Node) and node.target is OUTPUT_MERGE and node.args[1]
        if not is_refused and not is_close(mine, theirs):
            checked.wrong.append("the rewritten graph computes something else of the whole batch")
    checked.wrong += compare(walk, whole, runs, checked)
    return checked


def split(
    inputs: Mapping[str, Any], batched: Sequence[str], sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for place, size in enumerate(sizes):
        start = sum(sizes[:place])
        yield {name: x[start : start + size].clone() if name in batched else x for name, x in inputs.items()}


def copied(inputs: Mapping[str, Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs.values()]


def give_values(
    module: fx.GraphModule, part: Mapping[str, Any], batched: Sequence[str], trained: Collection[str]
) -> None:
    """Give each node its fake value for a microbatch, the rows symbolic, as a front end does."""
    shapes = ShapeEnv(specialize_zero_one=True, duck_shape=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def fake(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        kinds = [DimDynamic.STATIC] * x.ndim
        if name in batched:
            kinds[0] = DimDynamic.DUCK
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    made = [fake(name, x) for name, x in part.items()]
    try:
        with mode, enable_python_dispatcher():
            _Values(module).run(*made)
    except Exception as error:
        raise SkippedError("cannot be traced") from error
    for node in module.graph.find_nodes(op="placeholder"):
        if str(node.target) in trained:
            node.meta["example_value"] = nn.Parameter(node.meta["example_value"], requires_grad=False)
    first = next(x for name, x in zip(part, made, strict=True) if name in batched)
    size = first.shape[0]
    if not isinstance(size, torch.SymInt) or shapes.replacements or size.node.expr.is_number:
        raise SkippedError("one number of rows")


class _Values(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        node.meta["example_value"] = result
        return result


class Run(fx.Interpreter):
    """Runs a rewritten graph on ``rows`` of the mini-batch's ``total``, from row ``first`` on."""

    def __init__(
        self,
        module: fx.GraphModule,
        first: int,
        rows: int,
        total: int,
        batch_counts: Mapping[fx.Node, Any] | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.first, self.rows, self.total, self.batch_counts = first, rows, total, batch_counts
        self.values: dict[fx.Node, Any] = {}
        self.counted: dict[fx.Node, Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.target is BATCH_COUNT and self.batch_counts is not None:
            result = self.batch_counts[node].clone()
        elif node.target is BATCH_COUNT:
            result = self.fetch_args_kwargs_from_env(node)[0][0].clone()
            self.counted[node] = result.clone()
        elif node.target is OUTPUT_MERGE:
            result = self.fetch_args_kwargs_from_env(node)[0][0].clone()
        elif node.target is BATCH_FRACTION:
            result = torch.tensor(self.rows / self.total, dtype=torch.float64)
        else:
            try:
                result = super().run_node(node)
            except Exception as error:
                raise NodeError(node) from error
        self.values[node] = result
        return result


def compare(walk: Any, whole: Run, runs: Sequence[Run], checked: Checked) -> Iterator[str]:
    """What is wrong with the claims about the values of each node."""
    for node, result in walk.values.items():
        if node not in whole.values or node.op == "output" or node.target in (OUTPUT_MERGE, BATCH_FRACTION):
            continue
        claims = pytree.tree_leaves(result)
        wanted = pytree.tree_leaves(whole.values[node])
        parts = [pytree.tree_leaves(run.values[node]) for run in runs]
        if any(len(claims) != len(found) for found in (wanted, *parts)):
            continue
        for place, claimed in enumerate(claims):
            if not isinstance(claimed, Tensor) or not isinstance(wanted[place], Tensor):
                continue
            value = walk.tracker.dependence_of(claimed)
            checked.num_claims += 1
            if isinstance(value, MixedRows | Unproven | SelectedRows):
                continue
            checked.num_proved += 1
            if not holds(value, wanted[place], [found[place] for found in parts], runs):
                yield f"{node.format_node()} is not {value}"


def holds(value: Dependence, wanted: Tensor, parts: Sequence[Tensor], runs: Sequence[Run]) -> bool:
    """Whether microbatches' values make the batch's in the way that is claimed."""
    match value:
        case Whole(degree=degree):
            return all(
                is_close(scaled(part, run, degree), wanted) for part, run in zip(parts, runs, strict=True)
            )
        case SumOverRows(degree=degree):
            made = [scaled(part, run, degree) for part, run in zip(parts, runs, strict=True)]
            shapes = {part.shape for part in parts}
            return shapes == {wanted.shape} and is_close(sum(map(wide, made)), wanted)  # type: ignore[arg-type]
        case PerRow():
            made = [
                (part + run.first) if value.is_row_number else scaled(part, run, value.degree)
                for part, run in zip(parts, runs, strict=True)
            ]
            return is_close(joined(value, made, runs), wanted)
    return False


def scaled(part: Tensor, run: Run, degree: int) -> Tensor:
    return part if not degree else wide(part) * (run.total / run.rows) ** degree


def joined(rows: PerRow, parts: Sequence[Tensor], runs: Sequence[Run]) -> Tensor | None:
    """Values of microbatches, one behind the other."""
    try:
        apart = [
            part.unflatten(rows.dim, (rows.outer, run.rows, rows.inner))
            for part, run in zip(parts, runs, strict=True)
        ]
    except (RuntimeError, IndexError):
        return None
    return torch.cat(apart, rows.dim + 1).flatten(rows.dim, rows.dim + 2)


def is_close(found: Any, wanted: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return bool(found is not None and found == wanted)
    return found.shape == wanted.shape and batch_comparison.is_close(found, wanted, TOLERANCE)
