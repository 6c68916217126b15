"""Tracks which sizes and numbers change from call to call, such as the length of sequences.

A variable has a name, and code compiled for that name serves other values too. Lengths of sequences of token
ids are variables from the first call on, because most scripts pad each batch to its longest sequence. Any
other size or number becomes one when it differs in a later call. Dimensions that had the same size in every
call share a name, until a call in which they differ. The sizes and whole numbers 0 and 1 never vary, because
a dimension of one element is broadcast where others are not, nor does a number that is not finite.

Given microbatches are like calls one after the other. In them the sizes and whole numbers 0 and 1 vary too,
since each microbatch may have a graph of its own: these are never symbols.

Every rank makes the same calls, and so comes to the same variables by itself.
"""

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.capture.model_call import ModelCall
from pipec.ir import Mode, Variable
from pipec.ir.batch_split import variable_values

MAX_CALL_KINDS = 64
"""So many kinds of calls are remembered."""

LeafDim = tuple[int, int | None]
"""The position of a leaf among the arguments, and one of its dimensions; None if it is a number."""


@dataclass(frozen=True)
class _Seen:
    """The values of the last compiled call of a kind, and the names of those that vary.

    Those of ``fixed`` were expected to vary, could not be symbols, and have not changed so far.
    """

    values: Mapping[LeafDim, float]
    names: Mapping[LeafDim, str]
    fixed: frozenset[LeafDim] = frozenset()

    def before(self, values: Mapping[LeafDim, float]) -> Mapping[LeafDim, object]:
        """The name or the value of each until now. Dimensions may share a name if they agree in this.

        As soon as one of ``fixed`` changes, the others are no longer expected to.
        """
        expects = all(self.values[site] == values[site] for site in self.fixed)
        names = {site: name for site, name in self.names.items() if expects or site not in self.fixed}
        return {site: names.get(site, self.values[site]) for site in values}


class VariableHistory:
    """The history of one pipeline's calls."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}

    def of(self, call: ModelCall, mode: Mode) -> tuple[Variable, ...]:
        """The variables of a call: values that differ from earlier calls of its kind, or are expected to.

        The first evaluation of a kind has the variables of the steps before it.
        """
        values = _values(call.parts[0])
        seen = self._seen.get(_kind(call, mode, values))
        if seen is None and mode is Mode.LOSS:
            trained = self._seen.get(_kind(call, Mode.TRAIN, values))
            seen = _Seen(values, trained.names, trained.fixed) if trained else None
        if seen is None:
            seen = _Seen(values, {site: "" for site in _lengths(call) if site in values})
        variables = list[Variable]()
        for part in call.parts:
            values = _values(part)
            variables = _variables(part, seen, values)
            seen = _Seen(values, _names(variables), seen.fixed)
        return tuple(variables)

    def change(self, call: ModelCall, mode: Mode) -> str:
        """The new values of a call, in words; empty if there are none, or if its kind is new."""
        seen = self._seen.get(_kind(call, mode, _values(call)))
        variables, parts = self.of(call, mode), map(_values, call.parts)
        return next(filter(None, (_change(seen, variables, values) for values in parts)), "") if seen else ""

    def note(self, call: ModelCall, mode: Mode, constants: Collection[str]) -> None:
        """Remember a call that was compiled. Variables among ``constants`` could not be symbols.

        Those that were expected to vary, and have not done so, are tried again when they do: a size may be a
        symbol together with others that change with it.
        """
        values, variables = _values(call.parts[-1]), self.of(call, mode)
        kind = _kind(call, mode, values)
        seen = self._seen.pop(kind, _Seen(values, {}))
        names = _names(variables)
        fixed = frozenset(
            site
            for site, name in names.items()
            if name in constants and seen.values[site] == values[site] and not call.given
            if site in seen.fixed or site not in seen.names
        )
        self._seen[kind] = _Seen(values, names, fixed)
        for oldest in list(self._seen)[:-MAX_CALL_KINDS]:
            del self._seen[oldest]


def equal_dimensions(variables: Sequence[Variable]) -> list[list[LeafDim]]:
    """The dimensions of each name that several have, and behind them the numbers that have it too."""
    groups: dict[str, list[LeafDim]] = {}
    for variable in sorted(variables, key=lambda variable: variable.dim is None):
        groups.setdefault(variable.name, []).append((variable.position, variable.dim))
    return [group for group in groups.values() if len(group) > 1]


def own_numbers(variables: Sequence[Variable]) -> list[Variable]:
    """The variables that are numbers, and not also the size of a dimension."""
    sizes = {variable.name for variable in variables if variable.dim is not None}
    return [variable for variable in variables if variable.name not in sizes]


def symbolic_candidates(variables: Sequence[Variable], call: ModelCall) -> list[tuple[Variable, ...]]:
    """Which of the variables may be symbols together, the best choice first: all, the sizes, the numbers.

    Sizes and whole numbers of the call that are 0 or 1 may not.
    """
    values = variable_values(variables, call.leaves)
    variables = [each for each in variables if _may_vary(values[each.name])]
    numbers = tuple(own_numbers(variables))
    sizes = tuple(variable for variable in variables if variable not in numbers)
    return [choice for choice in dict.fromkeys([tuple(variables), sizes, numbers]) if choice]


def _values(call: ModelCall) -> dict[LeafDim, float]:
    """The values that may vary: sizes of all dimensions except the batch, and numbers."""
    found: dict[LeafDim, float] = {}
    for position, (leaf, batched) in enumerate(zip(call.leaves, call.batched, strict=True)):
        if isinstance(leaf, Tensor):
            sizes = {(position, dim): x for dim, x in enumerate(leaf.shape) if x > 1 or call.is_whole}
            found |= {site: size for site, size in sizes.items() if not (batched and site[1] == 0)}
        elif _may_vary(leaf) or (call.is_whole and type(leaf) is int):
            found[position, None] = leaf
    return found


def _lengths(call: ModelCall) -> Iterator[LeafDim]:
    """The dimensions that are the length of a sequence of token ids, or have its size.

    Ids are the arguments of whole numbers with two dimensions; their masks and labels have the same size,
    and so may a tensor of floats have, in the dimension behind its rows.
    """
    leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in call.leaves]
    of_ids = {
        leaf.shape[1]
        for leaf, batched, path in zip(leaves, call.batched, call.paths, strict=True)
        if leaf is not None and batched and leaf.ndim == 2 and leaf.dtype in _IDS
        if not path.startswith("target")
    }
    for position, leaf in enumerate(leaves):
        shape = () if leaf is None else leaf.shape[:2] if leaf.is_floating_point() else leaf.shape
        yield from ((position, dim) for dim, size in enumerate(shape) if size in of_ids)


_IDS = (torch.int64, torch.int32)


def _may_vary(leaf: Any) -> bool:
    return (type(leaf) is float and math.isfinite(leaf)) or (type(leaf) is int and 1 < leaf < 2**31)


def _names(variables: Sequence[Variable]) -> dict[LeafDim, str]:
    return {(each.position, each.dim): each.name for each in variables}


def _kind(call: ModelCall, mode: Mode, values: Mapping[LeafDim, float]) -> Hashable:
    """A key shared by calls that differ in variables alone."""
    return mode, call.signature([Variable("*", position, "", dim) for position, dim in values])


def _variables(call: ModelCall, seen: _Seen, values: Mapping[LeafDim, float]) -> list[Variable]:
    """The variables that changed, each with a name. Dimensions that were equal in every call share one.

    So does, in given microbatches, a whole number that was equal to a dimension, as the number of graphs is.
    """
    equal_dimensions: dict[tuple[object, float], str] = {}
    found: list[Variable] = []
    every = seen.before(values)
    changed = [(site, (every[site], value)) for site, value in values.items() if every[site] != value]
    for (_, dim), change in changed:
        if dim is not None:
            number = f"t{len(equal_dimensions) + 1}" if equal_dimensions else "t"
            equal_dimensions.setdefault(change, number)
    for (position, dim), change in changed:
        path, shared = call.paths[position], equal_dimensions.get(change)
        if dim is not None or (call.is_whole and type(call.leaves[position]) is int and shared):
            name = equal_dimensions[change]
        else:
            name = _number_name(path, position, {variable.name for variable in found})
        found.append(Variable(name, position, path, dim, call.axes[position]))
    return found


def _number_name(path: str, position: int, taken: Collection[str]) -> str:
    """``temperature_value`` for ``kwargs['temperature']``, which nothing else in generated code is called."""
    name = f"{re.sub('[^0-9a-zA-Z]+', '_', path.removeprefix('kwargs')).strip('_')}_value"
    return f"value_{position}" if name in taken or not name.isidentifier() else name


def _change(seen: _Seen, variables: Sequence[Variable], values: Mapping[LeafDim, float]) -> str:
    """``kwargs['input_ids'] has 96 in dimension 1, compiled for 64: it becomes symbolic``"""
    for variable in variables:
        site = variable.position, variable.dim
        if site in seen.fixed and seen.values[site] != values[site]:
            return f"{variable.what} is {values[site]}, compiled for {seen.values[site]}"
        if site not in seen.names and seen.values[site] != values[site]:
            return f"{variable.what} is {values[site]}, compiled for {seen.values[site]}: it becomes symbolic"
        if seen.names.get(site, variable.name) != variable.name:
            return f"{variable.what} is {values[site]}, which was the size of other dimensions too until now"
    return ""
