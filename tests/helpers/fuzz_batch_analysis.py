"""Draws random programs over a batch, and checks claims about their values against brute force.

The rewritten graph runs on the mini-batch and on each microbatch. Rows, as the analysis calls them, must be
the microbatches' values, one behind the other; sums must add up; whole values must be the same.

``python tests/helpers/fuzz_batch_analysis.py --seconds 3600`` goes on for so long; ``--seed 17 --count 1``
tries one again and prints it; ``--whole`` trains a pipeline of each program instead, and compares it with
eager torch.
"""

import argparse
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import batch_comparison
import torch
from batch_cases import flat, weighted
from batch_comparison import BrokenCase, ComparisonStatus, compare_with_eager, wide
from random_batch_programs import (
    BATCHED,
    ROWS,
    SIZES,
    TRAINED,
    WIDTH,
    Program,
    arguments,
    draw_program,
)
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from unsplit_reference import microbatches

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

TOLERANCE, MOST_FAULTS = 1e-8, 10
"""A run ends after so many wrong programs."""


@dataclass
class Checked:
    """What becomes of a program, and each claim about any of its values that is wrong."""

    said: str
    wrong: list[str] = field(default_factory=list)
    num_claims: int = 0
    num_proved: int = 0


class SkippedError(Exception):
    """The program is no case: it does not run on microbatches, or is traced for one number of rows."""


class NodeError(Exception):
    """A node of a rewritten graph fails."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def check_claims(program: Program) -> Checked:
    """Analyse a program, and compare the claims about all of its values with microbatches.

    What is computed of ``TRAINED`` arguments depends on parameters, so that it is never counted once over
    the whole batch.
    """
    function = program.function(f"({', '.join(reversed(program.names))},)", program.reads)
    module = fx.symbolic_trace(function)
    given = {name: x for name, x in arguments().items() if name in program.reads}
    rows = {name: x for name, x in given.items() if name in BATCHED}
    parts = [{**given, **part} for part in microbatches(rows, SIZES)]
    try:
        expected = fx.Interpreter(module).run(*copied(given))
        for part in parts:
            fx.Interpreter(module).run(*copied(part))
        give_values(module, parts[0])
    except Exception as error:
        return Checked(f"skipped ({error if isinstance(error, SkippedError) else 'it does not run'})")
    walk = _BatchAnalysis(module, set(BATCHED), SIZES[0], 1)
    try:
        walk.run()
        claim = walk.dependence_of(module.graph.output_node().args[0][0])
        findings = walk.finish(False)
    except PipecError:
        return Checked("refused")
    except Exception as error:
        return Checked("raw", [f"the analysis fails: {error!r}"])
    module.recompile()
    if findings.assumed or findings.num_batch_norms:
        return Checked("assumed" if findings.assumed else "declared")
    unproven = isinstance(claim, Unproven | SelectedRows)
    checked = Checked("refused" if isinstance(claim, MixedRows) else "unproven" if unproven else "proved")
    try:
        whole = Run(module, 0, ROWS)
        found = whole.run(*copied(given))
        runs = list[Run]()
        for place, part in enumerate(parts):
            runs.append(Run(module, sum(SIZES[:place]), SIZES[place], whole.counted))
            runs[-1].run(*copied(part))
    except NodeError as failed:
        if not isinstance(walk.dependence_of(failed.node), MixedRows):  # else nothing runs that needs it
            text = f"the rewritten graph fails: {failed.__cause__}"
            checked.wrong.append(text.split("While executing")[0].strip())
        return checked
    for node, mine, theirs in zip(module.graph.output_node().args[0], found, expected, strict=True):
        is_refused = node.target is OUTPUT_MERGE and node.args[1]
        if not is_refused and not is_close(mine, theirs):
            checked.wrong.append("the rewritten graph computes something else of the whole batch")
    checked.wrong += compare(walk, whole, runs, checked)
    return checked


def copied(given: Mapping[str, Tensor]) -> list[Tensor]:
    return [x.clone() for x in given.values()]


def give_values(module: fx.GraphModule, part: Mapping[str, Tensor]) -> None:
    """Give each node its fake value for a microbatch, the rows symbolic, as a front end does."""
    shapes = ShapeEnv(specialize_zero_one=True, duck_shape=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def fake(name: str, x: Tensor) -> Any:
        kinds = [DimDynamic.STATIC] * x.ndim
        if name in BATCHED:
            kinds[0] = DimDynamic.DUCK
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    made = {name: fake(name, x) for name, x in part.items()}
    try:
        with mode, enable_python_dispatcher():
            _Values(module).run(*made.values())
    except Exception as error:
        raise SkippedError("cannot be traced") from error
    for node in module.graph.find_nodes(op="placeholder"):
        if str(node.target) in TRAINED:
            node.meta["example_value"] = nn.Parameter(node.meta["example_value"], requires_grad=False)
    size = made["h"].shape[0]
    if not isinstance(size, torch.SymInt) or shapes.replacements or size.node.expr.is_number:
        raise SkippedError("one number of rows")


class _Values(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        node.meta["example_value"] = result
        return result


class Run(fx.Interpreter):
    """Runs a rewritten graph on ``rows`` of the mini-batch, from row ``first`` on."""

    def __init__(
        self,
        module: fx.GraphModule,
        first: int,
        rows: int,
        batch_counts: Mapping[fx.Node, Any] | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.first, self.rows, self.batch_counts = first, rows, batch_counts
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
            result = torch.tensor(self.rows / ROWS, dtype=torch.float64)
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
    return part if not degree else wide(part) * (ROWS / run.rows) ** degree


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


def check_pipeline(program: Program) -> Checked:
    """Train a pipeline of a program's last value, where ``c`` and ``t`` are parameters of a layer."""
    function = program.function(program.names[-1])
    others = [name for name in BATCHED if name != "h"]
    case = flat(
        lambda h, layer, *given: function(h, *given, layer.bias, layer.weight),
        lambda: nn.Linear(WIDTH, WIDTH),
        others=tuple(lambda rows, name=name: arguments(rows)[name] for name in others),
        target=lambda rows: arguments(rows, 1)["w"],
        loss_fn=weighted_if_rows,
        rows=(ROWS,),
        options={"batched": {**dict.fromkeys(range(len(BATCHED)), 0), "target": 0}},
        name=f"seed {program.seed}",
    )
    try:
        result = compare_with_eager(case)
    except BrokenCase:
        return Checked("skipped")
    wrong = result.verdict in (ComparisonStatus.SILENT, ComparisonStatus.RAW, ComparisonStatus.WARNED_WRONG)
    return Checked(result.verdict, [f"{result.verdict}: {result.message}"] if wrong else [])


def weighted_if_rows(y: Tensor, target: Tensor) -> Tensor:
    return weighted(y, target) if y.ndim and len(y) == len(target) else y.sin().mean()


Check = Callable[[Program], Checked]


def fuzz(
    programs: Iterable[Program], check: Check = check_claims, seconds: float = float("inf")
) -> tuple[Counter[str], list[str]]:
    """Check programs, for at most so many seconds of the processor.

    Returns how many came to what, and how many of their values are proved; and those that are wrong.
    """
    outcomes, faults, end = Counter[str](), list[str](), time.process_time() + seconds
    for program in programs:
        if time.process_time() > end or len(faults) >= MOST_FAULTS:
            break
        if program.names:
            checked = check(program)
            outcomes[checked.said] += 1
            outcomes.update({"values": checked.num_claims, "of them proved": checked.num_proved})
            if checked.wrong:
                faults.append("\n".join([f"seed {program.seed}", program.source, *checked.wrong[:3]]))
    return outcomes, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    check, most = (check_pipeline, 3) if options.whole else (check_claims, 6)
    programs = (draw_program(options.seed + number, most) for number in range(options.count))
    if options.count == 1:
        print(draw_program(options.seed, most).source, "\n")
    outcomes, faults = fuzz(programs, check, options.seconds)
    print(*faults, dict(outcomes), sep="\n\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    main()
