"""Which process has which part of each tensor, which one writes the tensor, and how the parts get there."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.checkpoint.safetensors_files import TensorSpec
from pipec.errors import CheckpointError
from pipec.runtime.step.ranks import Ranks


@dataclass(frozen=True)
class TensorShard:
    """Elements ``start`` to ``stop`` of a whole, flattened tensor, in the memory of this process."""

    name: str
    spec: TensorSpec
    start: int
    stop: int
    memory: Tensor


def unsharded(name: str, spec: TensorSpec, memory: Tensor) -> TensorShard:
    return TensorShard(name, spec, 0, spec.num_elements, memory)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor. ``sources`` are the rank, start and stop of the parts that make it up."""

    name: str
    spec: TensorSpec
    sources: tuple[tuple[int, int, int], ...]
    writer: int


def assign_writers(parts: Sequence[TensorShard], ranks: Ranks, loads: dict[int, int]) -> list[SavedTensor]:
    """The tensors of all processes, each with its writer. Every process calls it.

    The writer has a part of the tensor and, among those, the fewest bytes to write, by ``loads``.

    Raises:
        CheckpointError: a name has different types or shapes, or the parts do not make up the whole.
    """
    own = [[part.name, part.spec.dtype, part.spec.shape, part.start, part.stop] for part in parts]
    found: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[str, TensorSpec] = {}
    for rank, rows in enumerate(
        map(json.loads, ranks.all_gather_text_no_timeout(json.dumps(own), "listing what to save"))
    ):
        for name, dtype, shape, start, stop in rows:
            spec = TensorSpec(dtype, tuple(shape))
            if kinds.setdefault(name, spec) != spec:
                raise CheckpointError(
                    f"{name} is {kinds[name]} on one rank and {spec} on rank {rank}; find what in the "
                    "script depends on the rank"
                )
            found[name][start, stop].append(rank)
    aligned = sorted(
        kinds.items(), key=lambda item: -item[1].torch_dtype.itemsize
    )  # so that tensors are aligned in every file
    return [_stored(name, spec, found[name], loads) for name, spec in aligned]


def _stored(
    name: str, spec: TensorSpec, found: dict[tuple[int, int], list[int]], loads: dict[int, int]
) -> SavedTensor:
    if whole := found.get((0, spec.num_elements)):
        writer = _least(whole, loads)
        sources = [(writer, 0, spec.num_elements)]
    else:
        sources = [(owners[0], *span) for span, owners in sorted(found.items())]
        ends = [stop for _, _, stop in sources]
        if [0, *ends] != [*(start for _, start, _ in sources), spec.num_elements]:
            raise CheckpointError(f"the ranks do not have every part of {name} exactly once; compile again")
        writer = _least([rank for rank, _, _ in sources], loads)
    loads[writer] = loads.get(writer, 0) + spec.num_bytes
    return SavedTensor(name, spec, tuple(sources), writer)


def _least(ranks: Iterable[int], loads: dict[int, int]) -> int:
    return min(ranks, key=lambda rank: (loads.get(rank, 0), rank))


def gather_shards(
    stored: Sequence[SavedTensor], parts: Sequence[TensorShard], ranks: Ranks
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """The tensors that this process writes, one by one. Every process must iterate to the end."""
    local = {(part.name, part.start, part.stop): part.memory for part in parts}
    me = ranks.world.rank
    for each in stored:
        whole = local.get((each.name, 0, each.spec.num_elements))
        if len(each.sources) == 1 and each.writer == me:
            assert whole is not None
            yield each, whole
        elif len(each.sources) > 1 and any(rank == me for rank, _, _ in each.sources):
            flat = _assembled(each, local, ranks)
            if each.writer == me:
                yield each, flat


def _assembled(stored: SavedTensor, local: dict[tuple[str, int, int], Tensor], ranks: Ranks) -> Tensor:
    """The whole tensor on its writer, which receives the other ranks' parts; empty elsewhere."""
    me, writes = ranks.world.rank, stored.writer == ranks.world.rank
    flat = torch.empty(stored.spec.num_elements if writes else 0, dtype=stored.spec.torch_dtype)
    for rank, start, stop in stored.sources:
        mine = local[stored.name, start, stop] if rank == me else flat[start:stop]
        if rank != stored.writer:
            if not writes and rank != me:
                continue
            activity = f"saving {stored.name}"
            mine = ranks.exchange.broadcast_tensor(rank, activity, mine, to=[stored.writer])
        if writes:
            flat[start:stop].copy_(mine.reshape(-1))
    return flat
