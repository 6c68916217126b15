"""The rows of a replica: loaders that read them, and results of all replicas brought together."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipec.errors import InputError
from pipec.pipeline import Pipeline


def shared_loader(loader: Any, pipe: Pipeline) -> Any:
    """A loader of the same batches on every rank, or with ``batch="local"`` of its replica's rows.

    Where ranks would shuffle differently, they shuffle as rank 0.
    """
    if not pipe.ranks.world.is_distributed:
        return loader
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        if pipe.num_replicas > 1:
            raise InputError(
                'batch="local" divides the batches of a torch DataLoader by its sampler, which this one '
                'lacks; let it yield the same batches on every rank, and leave batch="local" out'
            )
        return loader
    kept = (
        "collate_fn generator multiprocessing_context num_workers persistent_workers pin_memory "
        "prefetch_factor timeout worker_init_fn"
    )
    arguments = {name: getattr(loader, name) for name in kept.split()}
    return DataLoader(loader.dataset, batch_sampler=ReplicaBatches(loader, pipe), **arguments)


class ReplicaBatches:
    """The batches of a loader's sampler, or the rows of one replica of each."""

    def __init__(self, loader: Any, pipe: Pipeline) -> None:
        self._batches, self._pipe = loader.batch_sampler, pipe
        self.sampler = getattr(self._batches, "sampler", None)
        self.batch_size = getattr(self._batches, "batch_size", None)
        self.drop_last = getattr(self._batches, "drop_last", False)
        self._generator = getattr(self.sampler, "generator", None)

    def __iter__(self) -> Iterator[list[Any]]:
        self._follow_rank_0()
        count, replica = self._pipe.num_replicas, self._pipe.replica
        for batch in self._batches:
            if len(batch) < count:
                raise InputError(
                    f"a batch of {len(batch)} rows cannot be divided among {count} replicas; leave "
                    'batch="local" out, or pass drop_last=True to the loader'
                )
            yield batch[len(batch) * replica // count : len(batch) * (replica + 1) // count]

    def __len__(self) -> int:
        return len(self._batches)

    def _follow_rank_0(self) -> None:
        """Shuffle as rank 0 does."""
        ranks = self._pipe.ranks
        generator = torch.default_generator if self._generator is None else self._generator
        state = generator.get_state()
        generator.set_state(ranks.exchange.broadcast_tensor(0, "shuffling as rank 0", state))


def of_replicas(pipe: Pipeline, own: Any) -> list[Any]:
    """What each replica passes, from its first rank. Every rank calls this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (pipe.replica, own))
    by_replica: dict[int, Any] = {}
    for replica, each in found:
        by_replica.setdefault(replica, each)
    return [by_replica[replica] for replica in sorted(by_replica)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all replicas; of numbers, a vector."""
    return torch.cat([*parts]) if parts[0].dim() else torch.stack([*parts])


REDUCTIONS = {
    "mean": lambda values: values.mean(0),
    "avg": lambda values: values.mean(0),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}
"""Of the values of replicas, stacked, by name."""
