"""Reads the option ``batched``: the batch axis that it declares for each leaf of a call."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

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
        yield ArgumentLeaf(path, argument, _axis(word, path, value), value)


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


def _axis(word: Any, path: str, value: Any) -> BatchAxis | Unspecified | None:
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
