"""The tensors of a checkpoint: which process holds which part, which one writes it, and into which file.

Files are those of safetensors, which reads them through memory maps: tensors take memory only where they are
accessed, and stay readable when their file is replaced.
"""

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pipec.checkpoint.all_ranks import call_on_all_ranks
from pipec.errors import CheckpointError, InputError
from pipec.runtime.step.ranks import Ranks
from pipec.saved_folders import write_file

FILE_BYTES = 2**28
"""A process begins another file after so many bytes. It holds the tensors of one file in memory."""


@dataclass(frozen=True)
class TensorSpec:
    """The type and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def tensor_spec(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """Raises InputError for a type that safetensors lacks."""
    if not _is_storable(dtype):
        raise InputError(f"{name} has type {dtype}, which safetensors files cannot store")
    return TensorSpec(dtype, tuple(shape))


@functools.cache
def _is_storable(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # which one depends on the version
        return False
    return True


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
    own = [(part.name, part.spec, part.start, part.stop) for part in parts]
    found: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    specs: dict[str, TensorSpec] = {}
    for rank, every in enumerate(call_on_all_ranks(ranks, "listing what to save", lambda: own)):
        for name, spec, start, stop in every:
            if specs.setdefault(name, spec) != spec:
                raise CheckpointError(
                    f"{name} is {specs[name]} on one rank and {spec} on rank {rank}; find what in the "
                    "script depends on the rank"
                )
            found[name][start, stop].append(rank)
    return [_saved_tensor(name, specs[name], spans, loads) for name, spans in found.items()]


def _saved_tensor(
    name: str, spec: TensorSpec, found: Mapping[tuple[int, int], list[int]], loads: dict[int, int]
) -> SavedTensor:
    def least(ranks: Iterable[int]) -> int:
        return min(ranks, key=lambda rank: (loads.get(rank, 0), rank))

    if whole := found.get((0, spec.num_elements)):
        writer = least(whole)
        sources = [(writer, 0, spec.num_elements)]
    else:
        sources = [(owners[0], *span) for span, owners in sorted(found.items())]
        ends = [stop for _, _, stop in sources]
        if [0, *ends] != [*(start for _, start, _ in sources), spec.num_elements]:
            raise CheckpointError(f"the ranks do not have every part of {name} exactly once; compile again")
        writer = least(rank for rank, _, _ in sources)
    loads[writer] = loads.get(writer, 0) + spec.num_bytes
    return SavedTensor(name, spec, tuple(sources), writer)


def gather_shards(
    stored: Sequence[SavedTensor], parts: Sequence[TensorShard], ranks: Ranks
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """The tensors that this process writes, one by one. Every process must iterate to the end."""
    local = {(part.name, part.start, part.stop): part.memory for part in parts}
    me = ranks.world.rank
    for each in stored:
        if len(each.sources) > 1 and any(rank == me for rank, _, _ in each.sources):
            whole = _assembled(each, local, ranks)
        else:
            whole = local.get((each.name, 0, each.spec.num_elements), torch.empty(0))
        if each.writer == me:
            yield each, whole.reshape(each.spec.shape)


def _assembled(stored: SavedTensor, local: dict[tuple[str, int, int], Tensor], ranks: Ranks) -> Tensor:
    """The whole tensor on its writer, which receives the other ranks' parts; empty elsewhere."""
    me, writes = ranks.world.rank, stored.writer == ranks.world.rank
    flat = torch.empty(stored.spec.num_elements if writes else 0, dtype=stored.spec.dtype)
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


Files = dict[str, list[SavedTensor]]
"""The tensors of each file."""


def assign_files(family: str, stored: Sequence[SavedTensor]) -> Files:
    """The files of a family of tensors: each has some that follow each other, of one writer."""
    files: list[list[SavedTensor]] = []
    size = 0
    for each in sorted(stored, key=lambda each: each.writer):
        size += each.spec.num_bytes
        if not files or files[-1][0].writer != each.writer or size > FILE_BYTES:
            files.append([])
            size = each.spec.num_bytes
        files[-1].append(each)
    return {f"{family}-{k:05}-of-{len(files):05}.safetensors": own for k, own in enumerate(files, 1)}


def weight_index(files: Files) -> bytes:
    """The JSON that says which weight is in which file, for the libraries of Hugging Face."""
    names = {each.name: file for file, stored in files.items() for each in stored}
    size = sum(each.spec.num_bytes for stored in files.values() for each in stored)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=1).encode()


def write_tensors(
    folder: Path, files: Files, rank: int, tensors: Iterable[tuple[SavedTensor, Tensor]]
) -> dict[str, str]:
    """Write the files of this rank, whose ``tensors`` come in their order; returns the files' SHA-256.

    After an error nothing more is written, but ``tensors`` are read to the end, since other processes are
    waiting for what this one sends.
    """
    tensors, sums, failure = iter(tensors), dict[str, str](), None
    for file, stored in files.items():
        if stored[0].writer == rank:
            values = {each.name: tensor for each, tensor in itertools.islice(tensors, len(stored))}
            try:
                if failure is None:
                    sums[file] = write_file(folder / file, _serialized(values))
            except Exception as error:
                failure = error
    for _ in tensors:
        pass
    if failure is not None:
        raise failure
    return sums


def _serialized(values: Mapping[str, Tensor]) -> bytes:
    """The file of these tensors, which are copied, since the library refuses some that share memory."""
    copies = {
        name: x.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        for name, x in values.items()
    }
    return safetensors.torch.save(copies, {"format": "pt"})


def open_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of several files, by name.

    Raises:
        CheckpointError: a file is not a safetensors file, or two files have a tensor of the same name.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            own = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError, RuntimeError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if twice := found.keys() & own.keys():
            raise CheckpointError(f"{path} and another file both have {min(twice)}")
        found |= own
    return found
