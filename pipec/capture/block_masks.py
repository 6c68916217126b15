"""A ``BlockMask`` of FlexAttention as an argument of a step.

A mask is a function and the blocks that follow from it. What it reads of the batch is in the variables around
the function, which no stage can see::

    def same_document(b, h, q, k):                   MaskArgument
        return documents[b, q] == documents[b, k]        leaves: lengths of queries and keys, documents
                                                         form: the function, with a place for documents

So a mask is taken apart where a step gets it, its tensors are split and sent as others are, and the mask is
made again where the model is called.
"""

import sys
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.batch_split import leaf_path
from pipec.torch_compat import pytree

_LIBRARY = "torch.nn.attention.flex_attention"

_NAMED = (type, types.ModuleType, types.BuiltinFunctionType)

_CONSTANTS = (int, float, str, type(None), torch.dtype, torch.device, *_NAMED)

_ONE_BLOCK = 1 << 30


@dataclass(frozen=True)
class _Name:
    """A key of pytree, as that of an attribute is."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


LENGTHS = _Name("lengths")
"""The key of a leaf that has no rows, whatever is said of its mask."""

_FIRST_NAMES = (LENGTHS, _Name("function"))


class _Place:
    """Where a function reads a tensor."""

    def __repr__(self) -> str:
        return "tensor"


@dataclass(frozen=True, eq=False)
class MaskForm:
    """What two masks have in common that share a compilation: all but values of tensors, and lengths.

    ``function`` has a place for each tensor, and ``names`` are those of the variables that held them.
    ``description`` says what it does, in the same words in every process.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    description: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskForm) and self.description == other.description

    def __hash__(self) -> int:
        return hash(self.description)

    def __repr__(self) -> str:
        return self.description


class MaskArgument:
    """A mask as leaves: an empty tensor of its size, what its function does, and the tensors that it reads.

    ``bool[0, queries, keys]`` has lengths that are equal to those of other tensors, and vary with them.
    """

    def __init__(self, form: MaskForm, leaves: Sequence[Any]) -> None:
        self.form, self.leaves = form, [*leaves]
        tensors = iter(self.leaves[len(_FIRST_NAMES) :])
        self.function = _rebuilt(form.function, lambda x, _: next(tensors) if isinstance(x, _Place) else x)


def is_mask(value: object) -> bool:
    return isinstance(value, MaskArgument)


def _with_keys(mask: MaskArgument) -> tuple[list[tuple[Any, Any]], MaskForm]:
    names = (*_FIRST_NAMES, *map(_Name, mask.form.names))
    return [*zip(names, mask.leaves, strict=True)], mask.form


pytree.register_pytree_node(
    MaskArgument,
    lambda mask: (mask.leaves, mask.form),
    lambda leaves, form: MaskArgument(form, [*leaves]),
    flatten_with_keys_fn=_with_keys,
)


def with_block_masks(found: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` with a ``BlockMask`` in the place of those of each mask in ``found``. Dynamo can trace this.

    The mask has one block, for all rows and heads, so that the function alone decides.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    count = torch.ones((1, 1, 1), dtype=torch.int32, device=device)
    blocks = (count, torch.zeros_like(count)[..., None], None, None)
    made, place = [], 0
    for each in found:
        if is_mask(each):
            _, queries, keys = leaves[place].shape
            whole = (_ONE_BLOCK, _ONE_BLOCK)
            mask = BlockMask((queries, keys), *blocks, *blocks, BLOCK_SIZE=whole, mask_mod=each.function)
            made.append(mask)
            place += len(each.leaves)
        else:
            made.append(leaves[place])
            place += 1
    return made


def with_mask_arguments(tree: Any) -> Any:
    """Arguments with a ``MaskArgument`` in the place of each ``BlockMask``.

    Raises:
        InputError: a function reads what is no function, tensor, or plain value; or blocks leave out pairs of
            queries and keys that the function does not, or the other way round.
    """
    library: Any = sys.modules.get(_LIBRARY)
    if library is None:  # then no mask can have been made
        return tree
    named = dict(zip(("args", "kwargs", "target"), tree, strict=True))
    found, structure = pytree.tree_flatten_with_path(
        named, is_leaf=lambda x: isinstance(x, library.BlockMask)
    )
    leaves = [leaf for _, leaf in found]
    for place, (keys, leaf) in enumerate(found):
        if isinstance(leaf, library.BlockMask):
            leaves[place] = _argument_of(leaf, leaf_path(keys))
            _check_blocks(leaf, leaf_path(keys))
    if not any(map(is_mask, leaves)):
        return tree
    return tuple(pytree.tree_unflatten(leaves, structure).values())


def refuse_moved_rows(tree: Any, axes: Sequence[BatchAxis | None], paths: Sequence[str]) -> None:
    """Raise InputError if the function of a mask would find the rows of a tensor elsewhere than it looks."""
    place = 0
    for each in pytree.tree_leaves(tree, is_leaf=is_mask):
        for number in range(place, place + len(each.leaves)) if is_mask(each) else ():
            axis = axes[number]
            if axis is not None and not axis.is_leading:
                raise InputError(
                    f"{paths[number]} has its rows in dimension {axis.dim}; expected them in dimension 0 of "
                    "a tensor that the function of a BlockMask reads"
                )
        place += len(each.leaves) if is_mask(each) else 1


def _argument_of(mask: Any, path: str) -> MaskArgument:
    names, tensors = list[str](), list[Tensor]()

    def taken(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            names.append(f"{name}_{len(names)}" if name in names else name)
            tensors.append(value)
            return _Place()
        if isinstance(value, _CONSTANTS):
            return value
        raise InputError(
            f"the function of {path} reads {name!r}, a {type(value).__module__}.{type(value).__qualname__}, "
            "which no stage can take; let it read tensors, plain values and functions that do, or make the "
            "mask in forward()"
        )

    function = _rebuilt(mask.mask_mod, taken, "mask_mod")
    form = MaskForm(function, tuple(names), _described(function))
    lengths = torch.empty(0, *mask.shape[-2:], dtype=torch.bool, device=mask.kv_num_blocks.device)
    return MaskArgument(form, [lengths, form.description, *tensors])


def _check_blocks(mask: Any, path: str) -> None:
    """Raise InputError unless a mask is its function alone: no pair is left out, and none is let through.

    It costs one look at all pairs in every call, where each layer computes scores of them.
    """
    kind = type(mask)
    made = sys.modules[_LIBRARY].create_block_mask(
        mask.mask_mod, *mask.shape, device=mask.kv_num_blocks.device, BLOCK_SIZE=mask.BLOCK_SIZE
    )

    def full(each: Any) -> Tensor:
        if each.full_kv_num_blocks is None:
            return torch.zeros_like(each.to_dense())
        numbers, indices = each.full_kv_num_blocks, each.full_kv_indices
        blocks: Tensor = kind.from_kv_blocks(numbers, indices, BLOCK_SIZE=each.BLOCK_SIZE).to_dense()
        return blocks

    if bool((made.to_dense() > mask.to_dense()).any() or (full(mask) > full(made)).any()):
        raise InputError(
            f"the blocks of {path} are not those of its function, and stages use the function alone; pass "
            "what create_block_mask(mask_mod, ...) returns"
        )


def _rebuilt(value: Any, of_leaf: Callable[[Any, str], Any], name: str = "") -> Any:
    """A copy of a function, or of a list of some, that reads other values in defaults and around it.

    ``of_leaf`` gets a value that is neither a function nor a list or tuple, and the name of its variable.
    """
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(each, of_leaf, name) for each in value)
    if not isinstance(value, types.FunctionType):
        return of_leaf(value, name)
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    held = tuple(types.CellType(_rebuilt(cell.cell_contents, of_leaf, each)) for each, cell in cells)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, closure=held)
    made.__defaults__ = _rebuilt(value.__defaults__, of_leaf, "a default") if value.__defaults__ else None
    named = value.__kwdefaults__ or {}
    made.__kwdefaults__ = {each: _rebuilt(x, of_leaf, each) for each, x in named.items()} or None
    return made


def _described(value: Any) -> str:
    if type(value) in (list, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        read = _described([*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()])
        return f"{value.__module__}.{value.__qualname__} {_checksum(value.__code__):08x}{read}"
    if isinstance(value, _NAMED):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    return f"{type(value).__name__} {value!r}"  # tells 0.0 from -0.0, and 1 from True


def _checksum(code: types.CodeType) -> int:
    constants = [_checksum(x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    read = code.co_filename, code.co_firstlineno, code.co_code, code.co_names, code.co_freevars, constants
    return zlib.crc32(repr(read).encode())
