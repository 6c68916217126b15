"""What the analysis says of each of torch's operators, against brute force.

``python tests/helpers/operator_classification.py [NAMES...]`` prints a table; torch's samples need the
package expecttest.

For samples of ``op_db``, one dimension of some arguments is taken as the batch. ``classify`` asks what the
operator is then to the batch. Brute force runs it on the batch and on its parts: it works row by row if the
parts' results, one behind the other along a dimension, are the batch's, and is a sum if they add up to it.
"""

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from batch_analysis_check import SkippedError, check_graph, is_close, wide
from torch import Tensor, fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.torch_compat import pytree

UNDEFINED = ("empty",)
"""Operators whose values are whatever memory has."""

TYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
FORK = multiprocessing.get_context("fork")
SAMPLES, PATIENCE = 8, 5.0
"""Samples of each operator, and seconds for all of them."""

ALONE, MIXES = "row by row or a sum", "mixes rows"
PROVED, REFUSED, UNPROVEN, WARNED, WRONG = "proved", "refused", "unproven", "assumed", "wrong"


@dataclass(frozen=True)
class Call:
    """A call of an operator: ``dims`` says which dimension of each tensor is the batch."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]

    def parts(self) -> Iterator[list[Tensor]]:
        """The tensors of each microbatch."""
        for place, size in enumerate(self.sizes):
            yield [
                x if dim is None else x.narrow(dim, sum(self.sizes[:place]), size)
                for x, dim in zip(self.tensors, self.dims, strict=True)
            ]


@dataclass
class Row:
    """How many calls of an operator came to what."""

    name: str
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""

    def __str__(self) -> str:
        alone = [self.counts[ALONE, said] for said in (PROVED, WARNED, UNPROVEN, REFUSED)]
        mixes = [self.counts[MIXES, said] for said in (WARNED, UNPROVEN, REFUSED)]
        return f"| {self.name} | {' | '.join(map(str, [*alone, *mixes, len(self.wrong)]))} |"


HEADER = f"""\
| operator | {ALONE}: proved | assumed | unproven | refused | {MIXES}: assumed | unproven | refused | wrong |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def classify(call: Call) -> tuple[str, list[str]]:
    """What the analysis says of the first result, and which claims are wrong. The seam to what is judged."""
    graph = fx.Graph()
    names = [f"x{place}" for place in range(len(call.tensors))]
    read = []
    for name, dim in zip(names, call.dims, strict=True):
        node = graph.placeholder(name)
        read.append(node if not dim else graph.call_function(torch.movedim, (node, 0, dim)))
    result = graph.call_function(call.function, tuple(read))
    graph.output((result,))
    given = {
        name: x if not dim else x.movedim(dim, 0).clone()
        for name, x, dim in zip(names, call.tensors, call.dims, strict=True)
    }
    batched = [name for name, dim in zip(names, call.dims, strict=True) if dim is not None]
    checked = check_graph(fx.GraphModule({}, graph), given, batched, call.sizes)
    return checked.said, checked.wrong


def brute_force(call: Call) -> str:
    """Whether the first result is that of the microbatches: joined, added up, or the same."""
    whole = first_of(call.function(*call.tensors))
    parts = [first_of(call.function(*part)) for part in call.parts()]
    if all(is_close(part, whole) for part in parts):
        return ALONE
    if all(part.shape == whole.shape for part in parts):
        total = sum(map(wide, parts))
        mean = sum(wide(part) * size for part, size in zip(parts, call.sizes, strict=True)) / sum(call.sizes)
        if is_close(total, whole) or is_close(mean, whole):
            return ALONE
    for dim in range(whole.ndim):
        for block in (1, 2, 3, 4, 5, 6):
            if is_close(joined(parts, dim, block, call.sizes), whole):
                return ALONE
    return MIXES


def joined(parts: Sequence[Tensor], dim: int, outer: int, sizes: Sequence[int]) -> Tensor | None:
    """The parts, one behind the other along a dimension, which has ``outer`` times the rows."""
    try:
        apart = [part.unflatten(dim, (outer, size, -1)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(apart, dim + 1).flatten(dim, dim + 2)
    except (RuntimeError, IndexError):
        return None


def first_of(result: Any) -> Tensor:
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    if not tensors:
        raise SkippedError("returns no tensor")
    return tensors[0]


def calls_of(op: OpInfo) -> Iterator[Call]:
    """Calls with each dimension of the first tensor as the batch, and of others where it is as long."""
    if any(word in op.name for word in UNDEFINED):
        raise SkippedError("has no values")
    dtype = next((x for x in TYPES if x in op.supported_dtypes("cpu")), None)
    if dtype is None:
        raise SkippedError("no type")
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = tuple(leaves[place].detach().clone() for place in places)
        if not tensors or any(x.layout is not torch.strided or x.numel() > 20_000 for x in tensors):
            continue
        function = function_of(op, leaves, places, spec)
        for dim in range(tensors[0].ndim):
            rows = tensors[0].shape[dim]
            if rows >= 4:
                sizes = (rows - rows // 2, rows // 2)
                yield from (Call(function, tensors, dims, sizes) for dims in batched_dims(tensors, dim))


def batched_dims(tensors: Sequence[Tensor], dim: int) -> list[tuple[int | None, ...]]:
    """The batch in the first tensor alone; and in all that have it in the same place, from left or right."""
    rows, back = tensors[0].shape[dim], dim - tensors[0].ndim
    left = [dim if x.ndim > dim and x.shape[dim] == rows else None for x in tensors]
    right = [x.ndim + back if x.ndim >= -back and x.shape[back] == rows else None for x in tensors]
    return list(dict.fromkeys([(dim, *[None] * (len(tensors) - 1)), tuple(left), tuple(right)]))


def function_of(op: OpInfo, leaves: Sequence[Any], places: Sequence[int], spec: Any) -> Callable[..., Any]:
    def function(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor.clone()  # it may be written to
        given, args, kwargs = pytree.tree_unflatten(filled, spec)
        return op.op(given, *args, **kwargs)

    function.__name__ = op.name.split(".")[-1]
    return function


def row_of(op: OpInfo) -> Row:
    """Try an operator, for about PATIENCE seconds of the processor."""
    row = Row(op.name + (f" ({op.variant_test_name})" if op.variant_test_name else ""))
    begun, reasons = time.process_time(), Counter[str]()
    try:
        for call in calls_of(op):
            if time.process_time() > begun + PATIENCE:
                break
            reasons.update(filter(None, [_tried(call, row)]))
    except SkippedError as error:
        reasons[str(error)] += 1
    except Exception as error:
        reasons[f"samples fail: {type(error).__name__}"] += 1
    if not row.counts:
        row.skipped = ", ".join(reasons) or "no tensor with four rows or more"
    return row


def _tried(call: Call, row: Row) -> str:
    """Add one call to the row. Returns why it is no case, if it is not."""
    try:
        with _Draws() as draws:
            call.function(*call.tensors)
        if draws.found:
            return "draws random numbers"
        truth = brute_force(call)
    except SkippedError as error:
        return str(error)
    except Exception:
        return "parts do not run"
    try:
        said, wrong = classify(call)
    except SkippedError as error:
        return str(error)
    row.counts[truth, said] += 1
    row.wrong += wrong[:1]
    return ""


class _Draws(TorchDispatchMode):
    """Whether an operator draws random numbers, even if a sample seeds the generator."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def row_in_process(op: OpInfo) -> Row:
    """The same in a process of its own, for some samples crash and others never end."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(row_of(op)), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(3 * PATIENCE) else Row(op.name, skipped="takes too long")
    except EOFError:
        return Row(op.name, skipped="crashes")
    finally:
        process.kill()
        process.join()


def summary(rows: Sequence[Row]) -> str:
    tried = [row for row in rows if row.counts]
    total: Counter[tuple[str, str]] = sum((row.counts for row in tried), Counter())
    skipped = Counter(row.skipped for row in rows if row.skipped)
    kinds: Mapping[str, int] = {
        "proved in all calls": sum({said for _, said in row.counts} == {PROVED} for row in tried),
        "proved in some": sum(any(said == PROVED for _, said in row.counts) for row in tried),
        "refused or unproven in all": sum(
            not any(s in (PROVED, WARNED) for _, s in row.counts) for row in tried
        ),
        "wrong": sum(bool(row.wrong) for row in tried),
    }
    lines = [
        f"{len(rows)} operators, {len(tried)} tried: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    ]
    lines += [f"{count} calls: {truth}, {said}" for (truth, said), count in sorted(total.items())]
    lines += [f"{count} operators not tried: {why}" for why, count in skipped.most_common()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="operators whose names contain one of these")
    parser.add_argument("--all", action="store_true", help="list those that are not tried, too")
    options = parser.parse_args()
    rows = []
    print(HEADER)
    for op in op_db:
        if not options.names or any(name in op.name for name in options.names):
            rows.append(row_in_process(op))
            if rows[-1].counts:
                print(rows[-1], flush=True)
            for fault in rows[-1].wrong[:2]:
                print(f"{rows[-1].name}: {fault}", file=sys.stderr, flush=True)
            if options.all and rows[-1].skipped:
                print(f"{rows[-1].name}: {rows[-1].skipped}", file=sys.stderr)
    print(f"\n{summary(rows)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    main()
