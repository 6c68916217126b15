"""Loaders that yield the same batches on every rank."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pipec.errors import InputError
from pipec.pipeline import Pipeline


def refuse_local_batches(pipe: Pipeline) -> Pipeline:
    """The pipeline. Raises InputError if its replicas read their own rows, as loaders here do not."""
    if pipe.num_replicas > 1:
        raise InputError(
            'batch="local" leaves it to the loop which rows each rank reads, but here every rank reads all '
            "rows of a batch, and pipec divides them among replicas; leave it out"
        )
    return pipe


def shared_loader(loader: Any, pipe: Pipeline) -> Any:
    """A loader that shuffles as rank 0, if it is a torch DataLoader with a sampler of batches."""
    is_sampled = type(loader) is DataLoader and loader.batch_sampler is not None
    if not pipe.ranks.world.is_distributed or not is_sampled or isinstance(loader.dataset, IterableDataset):
        return loader
    kept = (
        "collate_fn generator multiprocessing_context num_workers persistent_workers pin_memory "
        "prefetch_factor timeout worker_init_fn"
    )
    arguments = {name: getattr(loader, name) for name in kept.split()}
    return DataLoader(loader.dataset, batch_sampler=SharedBatches(loader, pipe), **arguments)


class SharedBatches:
    """The batches of a loader's sampler, with the state of rank 0's generator."""

    def __init__(self, loader: Any, pipe: Pipeline) -> None:
        self._batches, self._pipe = loader.batch_sampler, pipe
        self.sampler = getattr(self._batches, "sampler", None)
        self.batch_size = getattr(self._batches, "batch_size", None)
        self.drop_last = getattr(self._batches, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        generator = getattr(self.sampler, "generator", None) or torch.default_generator
        state = generator.get_state()
        activity = "shuffling as rank 0"
        generator.set_state(self._pipe.ranks.exchange.broadcast_tensor(0, activity, state))
        yield from self._batches

    def __len__(self) -> int:
        return len(self._batches)
