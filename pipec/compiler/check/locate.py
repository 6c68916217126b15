"""Finds the operator at which the values of microbatches stop making up those of all rows."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from pipec.capture.model_call import ModelCall
from pipec.compiler.check.compare import Tolerance, is_close
from pipec.compiler.check.split_run import SplitRun
from pipec.graph import Operator, is_random, is_view


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
