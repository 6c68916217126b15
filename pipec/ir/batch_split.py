"""The names and sizes of the arguments of a mini-batch, and its split into microbatches."""

from collections.abc import Sequence
from typing import Any

from pipec.errors import InputError
from pipec.ir.values import Sizes, Variable


def split_sizes(batch: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch, as equal as can be, larger ones first.

    If there are fewer rows than microbatches, the last microbatches have none, and are not computed.

    Raises InputError if there are no rows.
    """
    if not batch:
        raise InputError("the batch has no rows; pass at least one, or leave out the call for an empty batch")
    return [batch // num_microbatches + (i < batch % num_microbatches) for i in range(num_microbatches)]


def require_equal_rows(sizes: Sequence[int]) -> None:
    """Raise InputError unless all microbatches have equally many rows, as a model needs that joins them."""
    if len({*sizes}) > 1:
        raise InputError(
            f"the model joins the rows of its replicas, which must have equally many, but {len(sizes)} "
            f"microbatches share {sum(sizes)} rows; pass a batch that {len(sizes)} divides, as "
            "drop_last=True does"
        )


def replica_microbatch_sizes(rows: Sequence[int], num_microbatches: int) -> list[int]:
    """Rows of each microbatch if replica k has ``rows[k]`` of the batch, and splits them by itself.

    Replicas take the microbatches in turn. If a replica has few rows, some of its microbatches have none.
    """
    count = len(rows)
    sizes = [0] * num_microbatches
    for k, own in enumerate(rows):
        share = len(range(k, num_microbatches, count))
        sizes[k::count] = [own // share + (i < own % share) for i in range(share)]
    return sizes


def leaf_path(keys: Sequence[Any]) -> str:
    """The name of a leaf as a user would write it, from its path: ``kwargs['mask']`` or ``target``.

    ``keys`` is torch's path of a leaf of a dict of ``args``, ``kwargs`` and ``target``.
    """
    return str(keys[0].key) + "".join(str(key) for key in keys[1:])


def repeated_tensors(leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """The positions of tensors that are among the leaves before, each with the first such position."""
    first: dict[int, int] = {}
    found = ((k, first.setdefault(id(x), k)) for k, x in enumerate(leaves) if hasattr(x, "shape"))
    return tuple((position, before) for position, before in found if position != before)


def variable_values(variables: Sequence[Variable], leaves: Sequence[Any]) -> Sizes:
    """The size or number of each variable by name, in a call whose arguments have these leaves."""
    return {
        variable.name: leaf if variable.dim is None else leaf.shape[variable.dim]
        for variable in variables
        for leaf in [leaves[variable.position]]
    }
