"""Which dimensions of the arguments change from call to call, as the length of sequences does.

The first call of a kind is compiled for the sizes it has. A dimension in which a later one differs becomes a
length: it gets a name, and what is compiled for that name serves other sizes too. Dimensions that had the
same size in every call so far share a name, and a call in which they differ takes them apart. Sizes of 0 and
1 are never generalized, because a dimension of one element is repeated where others are not.

Every rank makes the same calls, and so comes to the same lengths by itself.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipec.capture.call import Call
from pipec.ir import Length, Mode

Dimension = tuple[int, int]
"""The position of a leaf among the arguments, and one of its dimensions."""


@dataclass(frozen=True)
class _Seen:
    """The sizes of the last call of a kind that was compiled, and the dimensions that had others before."""

    sizes: Mapping[Dimension, int]
    names: Mapping[Dimension, str]


class Lengths:
    """What is known of the calls of one pipeline so far."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}

    def of(self, call: Call, mode: Mode) -> tuple[Length, ...]:
        """The lengths of a call: the dimensions that differ from those of its kind before it."""
        seen = self._seen.get(_kind(call, mode))
        names = _names(seen, _sizes(call)) if seen else {}
        paths = call.paths if names else []
        return tuple(Length(name, position, paths[position], dim) for (position, dim), name in names.items())

    def note(self, call: Call, mode: Mode) -> str:
        """Remember a call that is compiled. Returns what about its lengths is new, in words."""
        kind, sizes = _kind(call, mode), _sizes(call)
        seen = self._seen.get(kind)
        names = _names(seen, sizes) if seen else {}
        self._seen[kind] = _Seen(sizes, names)
        return _change(seen, sizes, names, call) if seen else ""


def _sizes(call: Call) -> dict[Dimension, int]:
    """The sizes that may become lengths: of all dimensions but that of the batch."""
    return {
        (position, dim): size
        for position, (leaf, batched) in enumerate(zip(call.leaves, call.batched(), strict=True))
        if isinstance(leaf, Tensor)
        for dim, size in enumerate(leaf.shape)
        if size > 1 and not (dim == 0 and batched)
    }


def _kind(call: Call, mode: Mode) -> Hashable:
    """What calls have in common that differ in lengths alone."""
    anything = [Length("*", position, "", dim) for position, dim in _sizes(call)]
    return mode, call.signature(anything)


def _names(seen: _Seen, sizes: Mapping[Dimension, int]) -> dict[Dimension, str]:
    """A name for each dimension that has differed. Those that were alike in every call share one."""
    alike: dict[tuple[object, int], str] = {}
    found = {}
    for dimension, size in sizes.items():
        before: str | int = seen.names.get(dimension, seen.sizes[dimension])
        if before != size:
            name = "t" if not alike else f"t{len(alike) + 1}"
            found[dimension] = alike.setdefault((before, size), name)
    return found


def _change(seen: _Seen, sizes: Mapping[Dimension, int], names: Mapping[Dimension, str], call: Call) -> str:
    """``kwargs['input_ids'] has 96 in dimension 1, compiled for 64: it becomes symbolic``"""
    grown = [dimension for dimension in names if dimension not in seen.names]
    apart = [
        dimension for dimension in names if seen.names.get(dimension, names[dimension]) != names[dimension]
    ]
    for dimension in grown[:1]:
        position, dim = dimension
        also = f", and {len(grown) - 1} more with it" if len(grown) > 1 else ""
        return (
            f"{call.paths[position]} has size {sizes[dimension]} in dimension {dim}, compiled for "
            f"{seen.sizes[dimension]}: that dimension becomes symbolic{also}"
        )
    for dimension in apart[:1]:
        position, dim = dimension
        return (
            f"{call.paths[position]} has size {sizes[dimension]} in dimension {dim}, which was that of other "
            "dimensions until now"
        )
    return ""


def alike(lengths: Sequence[Length]) -> list[list[Dimension]]:
    """The dimensions of each name that several have."""
    groups: dict[str, list[Dimension]] = {}
    for length in lengths:
        groups.setdefault(length.name, []).append((length.position, length.dim))
    return [group for group in groups.values() if len(group) > 1]
