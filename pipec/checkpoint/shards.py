"""Which process holds which part of each tensor of the whole, which one writes it, and how it gets there."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipec.checkpoint.safetensors_files import TensorSpec
from pipec.errors import CheckpointError
from pipec.runtime.step.execution import Ranks


@dataclass(frozen=True)
class TensorShard:
    """Elements ``start`` to ``stop`` of a tensor of the whole, row by row, in the memory of this process."""

    name: str
    spec: TensorSpec
    start: int
    stop: int
    memory: Tensor


def unsharded(name: str, spec: TensorSpec, memory: Tensor) -> TensorShard:
    return TensorShard(name, spec, 0, spec.num_elements, memory)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the whole. ``sources`` have the rank, the start and the stop of parts that make it up."""

    name: str
    spec: TensorSpec
    sources: tuple[tuple[int, int, int], ...]
    writer: int


def assign_writers(parts: Sequence[TensorShard], ranks: Ranks, loads: dict[int, int]) -> list[SavedTensor]:
    """Every tensor that some process has parts of, with its writer. Every process calls it.

    Among those that have a part, the one with the least to write, by ``loads``, writes the tensor.

    Raises:
        CheckpointError: processes hold different things under a name, or the parts are not the whole.
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
                    f"{name} is {kinds[name]} on one rank and {spec} on rank {rank}; see what in the script "
                    "depends on the rank"
                )
            found[name][start, stop].append(rank)
    aligned = sorted(kinds.items(), key=lambda item: -item[1].torch_dtype.itemsize)  # in any file of them
    return [_stored(name, spec, found[name], loads) for name, spec in aligned]


def _stored(
    name: str, spec: TensorSpec, found: dict[tuple[int, int], list[int]], loads: dict[int, int]
) -> SavedTensor:
    if all_of_it := found.get((0, spec.num_elements)):
        writer = _least(all_of_it, loads)
        sources = [(writer, 0, spec.num_elements)]
    else:
        sources = [(owners[0], *span) for span, owners in sorted(found.items())]
        ends = [stop for _, _, stop in sources]
        if [0, *ends] != [*(start for _, start, _ in sources), spec.num_elements]:
            raise CheckpointError(f"the ranks do not have every part of {name} once; compile anew")
        writer = _least([rank for rank, _, _ in sources], loads)
    loads[writer] = loads.get(writer, 0) + spec.num_bytes
    return SavedTensor(name, spec, tuple(sources), writer)


def _least(ranks: Iterable[int], loads: dict[int, int]) -> int:
    return min(ranks, key=lambda rank: (loads.get(rank, 0), rank))


def gather_shards(
    stored: Sequence[SavedTensor], parts: Sequence[TensorShard], ranks: Ranks
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """What this process writes, one tensor after the other. Every process takes all of its own."""
    held = {(part.name, part.start, part.stop): part.memory for part in parts}
    me = ranks.world.rank
    for each in stored:
        whole_here = held.get((each.name, 0, each.spec.num_elements))
        if len(each.sources) == 1 and each.writer == me:
            assert whole_here is not None
            yield each, whole_here
        elif len(each.sources) > 1 and any(rank == me for rank, _, _ in each.sources):
            flat = _assembled(each, held, ranks)
            if each.writer == me:
                yield each, flat


def _assembled(stored: SavedTensor, held: dict[tuple[str, int, int], Tensor], ranks: Ranks) -> Tensor:
    """The tensor on its writer, to which the others that have parts of it send them."""
    me, writes = ranks.world.rank, stored.writer == ranks.world.rank
    flat = torch.empty(stored.spec.num_elements if writes else 0, dtype=stored.spec.torch_dtype)
    for rank, start, stop in stored.sources:
        mine = held[stored.name, start, stop] if rank == me else flat[start:stop]
        if rank != stored.writer:
            if not writes and rank != me:
                continue
            activity = f"saving {stored.name}"
            mine = ranks.agreement.broadcast_tensor(rank, activity, mine, to=[stored.writer])
        if writes:
            flat[start:stop].copy_(mine.reshape(-1))
    return flat
