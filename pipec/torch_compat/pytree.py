"""Nested lists, tuples, dicts and registered classes as flat lists of leaves, as torch flattens them.

Torch has no public module for this. All functions here need only the few private ones that are imported.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.utils import _pytree
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_flatten_with_path

__all__ = [
    "TreeSpec",
    "dump_structure",
    "load_structure",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]


class TreeSpec(Protocol):
    """The structure of a tree."""

    @property
    def num_leaves(self) -> int: ...


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """The tree of this structure with these leaves."""
    return _pytree.tree_unflatten(leaves, structure)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, in order. What ``is_leaf`` says is one, whatever it holds."""
    return tree_flatten(tree, is_leaf)[0]


def tree_structure(tree: Any) -> TreeSpec:
    """The structure of a tree without its leaves."""
    return tree_flatten(tree)[1]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with what ``function`` makes of each leaf."""
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(map(function, leaves), structure)


def tree_map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """The same where a leaf is of a class, or one of some; the other leaves stay."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def dump_structure(structure: TreeSpec) -> str:
    """The structure as text. Raises NotImplementedError if it has classes that torch cannot name."""
    text: str = _pytree.treespec_dumps(structure)  # type: ignore[arg-type]
    return text


def load_structure(text: str) -> TreeSpec:
    """The structure that ``dump_structure`` returned."""
    return _pytree.treespec_loads(text)
