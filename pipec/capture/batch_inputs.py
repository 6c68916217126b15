"""Decides which tensors of a call are split along the batch, and reads the option ``batched``, which says so.

A tensor with as many rows as the batch need not hold its rows: it may be a table, a mask of time by time, or
a list of edges. What is not certain is split, unless a check shows that it is whole.
"""

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipec.capture.block_masks import LENGTHS
from pipec.capture.model_call import ModelCall
from pipec.errors import InputError
from pipec.ir.batch_axis import LEADING, BatchAxis
from pipec.torch_compat import pytree

BatchedOption = Mapping[str | int, Any]
"""By name or position of an argument, how it is split; or a structure of that, as the argument has it.

``1`` is the dimension that is the batch, and may be negative. ``"(t b)"`` is a dimension in which the batch,
``b``, is merged with another one, in the notation of einops. None is an argument that is whole.
"""


class Unspecified:
    """The option says nothing of a leaf."""


UNSPECIFIED: Final = Unspecified()


@dataclass(frozen=True)
class ArgumentLeaf:
    """``argument`` is what the user calls the argument that the leaf is, or that it is in.

    ``axis`` is where the user says that the rows are; None if the leaf is said to be whole.
    """

    path: str
    argument: str | int
    axis: BatchAxis | Unspecified | None
    value: Any

    @property
    def is_declared_split(self) -> bool:
        """Whether it is declared to be split."""
        return isinstance(self.axis, BatchAxis)

    @property
    def is_leading(self) -> bool:
        """Whether its rows are dimension 0, if it is split."""
        return not isinstance(self.axis, BatchAxis) or self.axis.is_leading

    @property
    def rows(self) -> int | None:
        """The number of rows, dimension 0 if undeclared. None where the leaf alone does not show it."""
        axis = self.axis if isinstance(self.axis, BatchAxis) else LEADING
        return axis.rows(self.value.shape) if isinstance(self.value, Tensor) and self.value.ndim else None


def argument_leaves(
    call: ModelCall, batched: BatchedOption, parameters: Sequence[str]
) -> Iterator[ArgumentLeaf]:
    """The leaves of a call. ``parameters`` are the names of the model's positional arguments.

    Raises:
        InputError: ``batched`` names no argument, or says what does not fit one.
    """
    tree = dict(zip(("args", "kwargs", "target"), call.tree, strict=True))
    known: set[str | int] = {"target", *parameters, *call.kwargs, *range(len(call.args))}
    for name in batched:
        if name not in known:
            close = difflib.get_close_matches(str(name), list(map(str, known)), 1)
            listed = ", ".join(map(repr, known))
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {listed}"
            raise InputError(f"batched names {name!r}, which is no argument of the model; {hint}")
    for path, (keys, value) in zip(call.paths, pytree.tree_flatten_with_path(tree)[0], strict=True):
        kind, *rest = [_key(key) for key in keys]
        position: Any = rest.pop(0) if kind != "target" else "target"
        named = kind == "args" and position < len(parameters)
        argument: str | int = parameters[position] if named else position
        word = batched.get(position, batched.get(argument, UNSPECIFIED))
        for key in rest:
            word = _part(word, key)
        axis = None if keys[-1] == LENGTHS else _declared_axis(word, path, value)
        yield ArgumentLeaf(path, argument, axis, value)


def check_batch_size(leaves: Sequence[ArgumentLeaf], size: int) -> None:
    """Raise InputError unless each leaf that is said to be split has ``size`` rows.

    Nor may another leaf have that size in several dimensions, where some batch is not dimension 0.
    """
    axes = [(leaf, leaf.axis) for leaf in leaves if isinstance(leaf.axis, BatchAxis)]
    for leaf, axis in axes:
        if not axis.fits(leaf.value.shape, size):
            raise InputError(
                f"{leaf.path} has size {leaf.value.shape[axis.dim]} in dimension {axis.dim}; expected a "
                f"multiple of the {size} rows of the batch, which batched says are merged with others there"
            )
    if size == 1 or all(axis.is_leading for _, axis in axes):
        return
    for leaf in leaves:
        if leaf.axis is UNSPECIFIED and isinstance(leaf.value, Tensor):
            dims = [dim for dim, length in enumerate(leaf.value.shape) if length == size]
            if len(dims) > 1:
                raise InputError(
                    f"{leaf.path} has {size} rows in dimensions {' and '.join(map(str, dims))}, and may be "
                    f"split by either. Pass batched={{{leaf.argument!r}: {dims[0]}}} to pipec.compile, say, "
                    f"or batched={{{leaf.argument!r}: None}} if every microbatch needs all of it"
                )


def _part(word: Any, key: Any) -> Any:
    """The declaration for a part of an argument. One for the whole argument holds for each part."""
    if isinstance(word, Mapping):
        return word.get(key, UNSPECIFIED)
    if isinstance(word, list | tuple):
        return word[key] if key < len(word) else UNSPECIFIED
    return word


def _key(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def _declared_axis(word: Any, path: str, value: Any) -> BatchAxis | Unspecified | None:
    """The axis that a declaration gives a leaf. A number that is an argument is always whole."""
    if word is None or word is UNSPECIFIED:
        return word
    if isinstance(word, bool) or not isinstance(word, int | str):
        raise InputError(
            f"batched has {word!r} for {path}; expected the dimension that is the batch, such as 0 or -1, a "
            "pattern such as '(t b)' where it is merged with another one, or None for a tensor that every "
            "microbatch gets whole"
        )
    if not isinstance(value, Tensor):
        return None
    if isinstance(word, str):
        return _axis_of_pattern(word, path, value.ndim)
    if not -value.ndim <= word < value.ndim:
        raise InputError(
            f"batched has {word} for {path}, which has no dimension {word} to split: its shape is "
            f"{tuple(value.shape)}. Name one of these dimensions, or None if microbatches need it whole"
        )
    return BatchAxis(word % value.ndim)


_TOKEN = re.compile(r"\(([^()]*)\)|(\.\.\.)|([A-Za-z_]\w*)|(\S)")


def _axis_of_pattern(pattern: str, path: str, num_dims: int) -> BatchAxis:
    """``"(t b) d"`` as ``BatchAxis(0, outer=0)``: each word is a dimension, or several in parentheses."""

    def refused(why: str) -> InputError:
        return InputError(
            f"batched has {pattern!r} for {path}, but {why}. Write one name for each dimension, b for the "
            "batch, as einops does: 't b d' has the batch as dimension 1, '(t b)' has it merged with a "
            "dimension before it, '...' stands for any others"
        )

    groups = list[list[str]]()
    for match in _TOKEN.finditer(pattern):
        merged, dots, name, strange = match.groups()
        if strange or (merged is not None and not re.fullmatch(r"[\w\s]*", merged)):
            raise refused(f"{strange or match[0]!r} means nothing there")
        groups.append([dots or name] if merged is None else merged.split())
    names = [name for group in groups for name in group]
    if names.count("b") != 1:
        raise refused(f"it names b {names.count('b')} times")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise refused(f"it names {doubled[0]} twice")
    num_named = len(groups) - names.count("...")
    if num_named > num_dims or (num_named < num_dims and "..." not in names):
        raise refused(f"the tensor has {num_dims} dimensions")
    at = next(number for number, group in enumerate(groups) if "b" in group)
    behind_dots = ["..."] in groups[:at]
    group, dim = groups[at], at + (num_dims - len(groups) if behind_dots else 0)
    before, after = group.index("b"), len(group) - group.index("b") - 1
    if before and after:
        raise refused("the sizes before b and behind it are both unknown; merge b with one side alone")
    return BatchAxis(dim, 0 if before else 1, 0 if after else 1)


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
        if isinstance(leaf, Tensor) and leaf.ndim and call.batch_size > 1 and not call.is_whole:
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


# guesses, which the analysis or the check of a first step confirms


def sequence_first_spec(call: ModelCall) -> BatchedOption | None:
    """The ``batched`` option for a batch in dimension 1 of the first argument; None if that is impossible.

    Others are split where they have as many rows: along dimension 1 if they have it, with time and batch
    merged where they have the size of both, else along dimension 0. What the analysis then proves is right,
    whatever the dimensions mean. Only arguments that are tensors themselves are told apart.
    """
    given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs, "target": call.target}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if any(value.is_nested for value in tensors.values()):
        return None
    first = next((x for x in tensors.values() if x.ndim > 1), None)
    held = (x for value in given.values() if not isinstance(value, Tensor) for x in pytree.tree_leaves(value))
    if first is None or first.shape[1] < 2 or any(isinstance(x, Tensor) for x in held):
        return None
    rows = first.shape[1]
    lengths = {x.shape[0] for x in tensors.values() if x.ndim > 1 and x.shape[1] == rows}
    return {name: _word(x, first.ndim, rows, lengths) for name, x in tensors.items()}


def _word(x: Tensor, ndim: int, rows: int, lengths: set[int]) -> int | str | None:
    if x.ndim > 1 and x.shape[1] == rows and (x.ndim == ndim or x.shape[0] in lengths):
        return 1
    if x.ndim and x.shape[0] in {length * rows for length in lengths}:
        return "(t b) ..."
    return 0 if x.ndim and x.shape[0] == rows else None


def lists_as_tensors(
    arguments: tuple[tuple[Any, ...], dict[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any], Any] | None:
    """The arguments with lists and tuples of as many numbers as the batch has rows as tensors.

    None if there are none. The arguments are those by position, those by name, and the target.
    """
    leaves = pytree.tree_leaves(arguments)
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
    found = list[Tensor]()

    def converted(value: Any) -> Any:
        if type(value) in (list, tuple):
            if rows > 1 and len(value) == rows and all(type(each) in (int, float) for each in value):
                found.append(torch.tensor(value))
                return found[-1]
            return type(value)(converted(each) for each in value)
        if type(value) is dict:
            return {name: converted(each) for name, each in value.items()}
        return value

    args, kwargs, target = arguments
    other = tuple(converted(each) for each in args), converted(dict(kwargs)), converted(target)
    return other if found else None
