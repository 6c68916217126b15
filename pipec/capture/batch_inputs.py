"""Decides which tensors of a call are split along the batch.

A tensor with as many rows as the batch need not hold its rows: it may be a table, a mask of time by time, or
a list of edges. This file decides what is certain. The rest is split, unless a check shows that it is whole.
"""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipec.capture.batched_option import (
    UNSPECIFIED,
    ArgumentLeaf,
    BatchedOption,
    argument_leaves,
    check_batch_size,
)
from pipec.capture.model_call import ModelCall
from pipec.errors import InputError
from pipec.ir.batch_axis import LEADING, BatchAxis
from pipec.torch_compat import pytree


def with_batch_axes(
    call: ModelCall,
    batched: BatchedOption | None = None,
    parameters: Sequence[str] = (),
    before: Mapping[str, bool] | None = None,
) -> ModelCall:
    """The call with the rows in front of each leaf that is split or may be, and where the user has them.

    ``parameters`` are the names of the model's positional arguments. ``before`` has by path what was split in
    an earlier call, and what was not.

    Raises:
        InputError: ``batched`` does not fit, or it is not certain which tensor has the batch.
    """
    leaves = [_as_before(leaf, before or {}) for leaf in argument_leaves(call, batched or {}, parameters)]
    size = _batch_size(leaves)
    check_batch_size(leaves, size)
    for leaf in leaves:
        if leaf.axis is UNSPECIFIED and leaf.rows not in (None, size) and (before or {}).get(leaf.path):
            raise InputError(
                f"{leaf.path} has {leaf.rows} rows but the batch has {size}, and it was split in an earlier "
                f"call. Pass as many rows, or batched={{{leaf.argument!r}: None}} to pipec.compile"
            )
    axes = tuple(_axis(leaf, size) for leaf in leaves)
    first = next(leaf for leaf, axis in zip(leaves, axes, strict=True) if axis)
    ambiguous_leaves = {
        leaf.path: leaf.argument
        for leaf, axis in zip(leaves, axes, strict=True)
        if axis and leaf.axis is UNSPECIFIED and leaf is not first and not _is_certain(leaf, first)
    }
    return replace(call, split=axes, ambiguous_leaves=ambiguous_leaves).with_batch_first(size)


def _axis(leaf: ArgumentLeaf, size: int) -> BatchAxis | None:
    """The batch axis of a leaf; None if it is whole."""
    if isinstance(leaf.axis, BatchAxis):
        return leaf.axis
    return LEADING if leaf.axis is UNSPECIFIED and leaf.rows == size else None


def _as_before(leaf: ArgumentLeaf, before: Mapping[str, bool]) -> ArgumentLeaf:
    """A tensor that was whole in an earlier call is whole, though it has as many rows as this batch."""
    was_whole = leaf.axis is UNSPECIFIED and before.get(leaf.path) is False
    return replace(leaf, axis=None) if was_whole else leaf


def observed_splits(call: ModelCall) -> dict[str, bool]:
    """By path, whether a call shows a tensor to be split; it has other rows than the batch if it is not.

    A batch of one row proves nothing.
    """
    found = {}
    for path, leaf, split in zip(call.paths, call.leaves, call.batched, strict=True):
        if isinstance(leaf, Tensor) and leaf.ndim and call.batch_size > 1:
            found[path] = split
    return found


def positional_names(model: nn.Module) -> list[str]:
    """The names of the arguments that a model takes by position."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]


def refuse_nested_batches(tree: Any) -> None:
    """Raise InputError for an argument that has a batch of its own, which pipec cannot split."""
    for leaf in pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise InputError(
                "a PackedSequence has its rows mixed, and cannot be split into microbatches; "
                "pass the padded tensor and the lengths, and pack them in the model"
            )
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise InputError("a nested tensor cannot be split into microbatches; pass it padded, with a mask")


def _batch_size(leaves: Sequence[ArgumentLeaf]) -> int:
    """The rows of the first tensor that is certainly split, else of the first that may be."""
    merged = next((leaf for leaf in leaves if leaf.is_declared_split and leaf.rows is None), None)
    declared = [leaf for leaf in leaves if leaf.is_declared_split and leaf.rows is not None]
    for leaf in declared[1:]:
        if leaf.rows != declared[0].rows:
            raise InputError(
                f"{declared[0].path} has {declared[0].rows} rows and {leaf.path} has {leaf.rows}, but "
                "batched says that both are split; pass as many rows in both, or in batched None for one "
                "that microbatches need whole"
            )
    if merged and not declared:
        raise InputError(
            f"batched says that the rows of {merged.path} are merged with others, and not how many rows the "
            "batch has. Say of another argument which dimension is the batch, such as batched={'x': 1}"
        )
    undeclared = [leaf for leaf in leaves if leaf.rows is not None and leaf.axis is not None]
    candidates = declared or undeclared
    if not candidates:
        raise InputError(
            "pipec needs a batch to split: no argument is a tensor with at least one dimension. "
            "Pass the inputs of the whole mini-batch to step()."
        )
    first = candidates[0]
    assert first.rows is not None
    if not declared:
        _check_first(first, candidates)
    return first.rows


def _check_first(first: ArgumentLeaf, candidates: Sequence[ArgumentLeaf]) -> None:
    """Keyword arguments have no order of their own, so that most must have the batch's rows."""
    counts = Counter(leaf.rows for leaf in candidates)
    as_many = (
        leaf for leaf in candidates if leaf.rows != first.rows and counts[leaf.rows] >= counts[first.rows]
    )
    if first.path.startswith("kwargs") and (other := next(as_many, None)):
        raise InputError(
            f"it is not certain which arguments hold the batch: {first.path} has {first.rows} rows and "
            f"{other.path} has {other.rows}. Pass batched={{{first.argument!r}: None}} to pipec.compile if "
            f"every microbatch needs all of {first.argument}, or batched={{{first.argument!r}: 0}} if it is "
            "split"
        )
    siblings = [leaf for leaf in candidates if leaf.argument == first.argument]
    if len({leaf.rows for leaf in siblings}) > 1 and "[" in first.path.removeprefix("args["):
        raise InputError(
            f"{first.argument!r} holds tensors of {', '.join(str(leaf.rows) for leaf in siblings[:4])} rows, "
            "so it has no batch to split. Pass one tensor that is padded or stacked, or say in batched=... "
            "which of the tensors are split"
        )


def _is_certain(leaf: ArgumentLeaf, first: ArgumentLeaf) -> bool:
    """Targets have the batch's rows, and so have numbers beside the tokens of the same texts."""
    if leaf.path.startswith("target"):
        return True
    value, tokens = leaf.value, first.value
    if not first.is_leading:
        return False
    beside = value.ndim > 1 and value.shape[:2] == tokens.shape[:2] and not tokens.is_floating_point()
    square = value.shape[:2] == (first.rows, first.rows)
    return beside and not value.is_floating_point() and (not square or value.dtype == tokens.dtype)
