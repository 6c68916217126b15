"""The part of a mini-batch that one artifact runs: all of it, unless there are several artifacts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pipec.ir import Sizes

T = TypeVar("T")


@dataclass(frozen=True)
class BatchSlice:
    """Consecutive microbatches of a batch of so many rows. ``sizes`` has the rows of each.

    ``start`` is the number in the batch of the first row, and ``first`` that of the first microbatch.
    ``custom_loss_weights`` are the microbatch weights, if they are not the fractions of the batch's rows.
    ``values`` has, for each microbatch, the other sizes and the numbers that change from call to call, by
    name; none if there are none. Microbatches of one batch share them. With ``is_given``, each microbatch was
    given as a batch of its own, which counts as one row: it has its own values, and its own arguments.
    With several replicas that each were given their own part of the batch, this process has the rows of
    ``replica`` alone: of every ``num_replicas``-th microbatch. Some microbatches may then have no rows.
    """

    sizes: Sequence[int]
    batch: int
    start: int = 0
    first: int = 0
    custom_loss_weights: Sequence[float] | None = None
    replica: int = 0
    num_replicas: int = 1
    values: Sequence[Sizes] = ()
    is_given: bool = False

    @cached_property
    def own_microbatches(self) -> Sequence[int]:
        """The microbatches whose rows this process has."""
        return range(self.replica, len(self.sizes), self.num_replicas)

    @cached_property
    def own_sizes(self) -> Sequence[int]:
        """The rows of each of them."""
        return self.sizes[self.replica :: self.num_replicas]

    @property
    def first_rows(self) -> list[int]:
        """The number of each microbatch's first row in the batch: replica by replica, if that is local."""
        first = [0] * len(self.sizes)
        row = self.start if not self.is_local else 0
        for replica in range(self.num_replicas):
            for each in range(replica, len(self.sizes), self.num_replicas):
                first[each], row = row, row + self.sizes[each]
        return first

    @property
    def is_local(self) -> bool:
        """Whether each replica was given its own part of the batch."""
        return self.num_replicas > 1

    def own_leaves(self, leaves: Sequence[T]) -> Sequence[T]:
        """The ``leaves`` that this slice reads: of the batch; or of each of its given microbatches."""
        return leaves[self.start : self.start + self.num_rows] if self.is_given else leaves

    @cached_property
    def names(self) -> Sequence[Sizes]:
        """What the names in shapes stand for in each microbatch: ``b`` is its number of rows."""
        values = self.values or [{}] * len(self.sizes)
        return [{**own, "b": size} for own, size in zip(values, self.sizes, strict=True)]

    @cached_property
    def all_names(self) -> Sequence[Sizes]:
        """What they stand for in each microbatch, and then in all of them together."""
        return [*self.names, self.joined_names(self.num_rows)]

    @cached_property
    def batch_names(self) -> Sizes:
        """What they stand for in the batch."""
        return self.joined_names(self.batch)

    def joined_names(self, rows: int) -> Sizes:
        """What they stand for in ``rows`` rows of several microbatches, which share all other sizes."""
        return {**next(iter(self.values), {}), "b": rows}

    @cached_property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def loss_weights(self) -> Sequence[float]:
        """The weight of each microbatch's loss."""
        return self.custom_loss_weights or [size / self.batch for size in self.sizes]


NO_ROWS = BatchSlice((), 0)
"""What an update alone has of a batch."""
