"""Finds what gives each process a part of the data, for errors about batches that differ."""

import gc

from pipec.runtime.wrappers import lightning_advice

_OF_ACCELERATE = ("BatchSamplerShard", "IterableDatasetShard")

_SHARDING = {
    "BatchSamplerShard": "num_processes",
    "DistributedBucketSampler": "num_replicas",
    "DistributedConfig": "world_size",
    "DistributedLengthGroupedSampler": "num_replicas",
    "DistributedSampler": "num_replicas",
    "IterableDatasetShard": "num_processes",
}
"""Classes of torch, transformers, accelerate and datasets, and their attribute for the number of parts."""


def find_sharded_loader() -> str:
    """What gives this process a part of the data, such as ``DistributedSampler(num_replicas=2)``, or ""."""
    for found in gc.get_objects():
        for base in type(found).__mro__:
            attribute = _SHARDING.get(base.__name__, "")
            if attribute and isinstance(count := vars(found).get(attribute), int) and count > 1:
                return f"{type(found).__name__}({attribute}={count})"
    return ""


def same_batch_advice() -> str:
    """What to do if the ranks passed different batches, and all should pass the same."""
    if found := find_sharded_loader():
        leave_out = "Leave it out"
        if found.startswith(_OF_ACCELERATE):
            leave_out = (
                "Keep the loader out of accelerator.prepare(...), which puts it there, as a Trainer does "
                "unless its get_train_dataloader() returns a DataLoader of your own"
            )
        leave_out += lightning_advice()
        return (
            f"{found} gives each rank a part of the data of its own, but the ranks of a pipeline train on "
            f"the same rows. {leave_out}, and every rank passes the whole mini-batch; or for replicas with "
            "parts of their own, make it with num_replicas=pipe.num_replicas and rank=pipe.replica, and pass "
            'batch="local" and replicas=... to pipec.compile. batch="rank0" would drop the other ranks\' '
            "parts"
        )
    return (
        'With batch="same", the default, every rank passes the same whole mini-batch, which pipec splits '
        "into microbatches: shuffle and draw with the same seed on every rank, and leave out what gives each "
        'rank a part. batch="local" is for replicas with a '
        'DistributedSampler(num_replicas=pipe.num_replicas, rank=pipe.replica). batch="rank0" uses what rank '
        "0 passes and drops the rest: it is right only if all ranks have the same data, in whatever order. "
        "If the batches should be the same, one rank made a call that others did not"
    )


def dropped_parts_warning() -> str:
    """The warning that ``batch="rank0"`` drops the other ranks' parts of the data, or ""."""
    found = find_sharded_loader()
    return found and (
        f'{found} gives each rank a part of the data of its own, and batch="rank0" uses rank 0\'s alone: the '
        'other parts train nothing. Leave it out; or for replicas with parts of their own, pass batch="local"'
    )
