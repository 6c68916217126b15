"""The files of a checkpoint: which tensors each contains, and how they are written and hashed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pipec.checkpoint.manifest import FileChecksum, checksum_of, write_file, write_manifest
from pipec.checkpoint.safetensors_files import TensorWriter
from pipec.checkpoint.shards import SavedTensor

Checksums = dict[str, FileChecksum]

TensorWrite = tuple[str, SavedTensor, Tensor]
"""The file of a tensor, its description, and its values."""


def assign_files(family: str, stored: Sequence[SavedTensor]) -> dict[str, list[SavedTensor]]:
    """The tensors of each file. A process writes several files, so that they are hashed in parallel."""
    writers = sorted({each.writer for each in stored})
    own = [_spread([each for each in stored if each.writer == writer]) for writer in writers]
    files = [file for each in own for file in each]
    return {
        f"{family}-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, 1)
    }


def _spread(stored: Sequence[SavedTensor]) -> list[list[SavedTensor]]:
    """The tensors of one process, in files of about the same size."""
    size = sum(each.spec.num_bytes for each in stored)
    files: list[list[SavedTensor]] = [[] for _ in range(min(_MAX_FILES, 1 + size // _FILE_BYTES))]
    sizes = [0] * len(files)
    for each in stored:
        least = sizes.index(min(sizes))
        files[least].append(each)
        sizes[least] += each.spec.num_bytes
    return [file for file in files if file]


_FILE_BYTES, _MAX_FILES = 2**27, 4
"""A process begins another file after so many bytes of a family, up to so many files."""


def weight_index(weights: Mapping[str, Sequence[SavedTensor]]) -> bytes:
    """The JSON that says which weight is in which file, for the libraries of Hugging Face."""
    files = {each.name: file for file, stored in weights.items() for each in stored}
    size = sum(each.spec.num_bytes for stored in weights.values() for each in stored)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=1).encode()


def open_writers(directory: Path, files: Mapping[str, Sequence[SavedTensor]]) -> dict[str, TensorWriter]:
    """The writer of each file. If not all files are written, abandon all writers."""
    kinds = {file: {each.name: each.spec for each in stored} for file, stored in files.items()}
    return {file: TensorWriter(directory / file, own) for file, own in kinds.items()}


def write_tensors(writers: Mapping[str, TensorWriter], tensors: Iterable[TensorWrite]) -> Checksums:
    """Write tensors, in the order of their file; returns the files' checksums after all were synced."""
    for file, _, tensor in tensors:
        writers[file].write(tensor)
    for writer in writers.values():
        writer.end()
    return {file: writer.finish() for file, writer in writers.items()}


def write_small_files(directory: Path, sums: Checksums, texts: Mapping[str, bytes]) -> str:
    """Write these small files and the checksums of all files; returns the digest of the checkpoint."""
    every = {file.name: checksum_of(file) for file in directory.glob("*.json")} | sums
    for name, text in texts.items():
        every[name] = write_file(directory / name, text)
    return write_manifest(directory, every)
