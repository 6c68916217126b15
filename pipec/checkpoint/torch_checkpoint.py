"""Folders of ``torch.distributed.checkpoint``, read without running any code in them.

Their ``.metadata`` is a pickle, which can name any function. It is read by an unpickler that allows only the
classes of that library. The files that it refers to were written by ``torch.save`` and are read with
``weights_only=True``.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.plain_values import refusal
from pipec.checkpoint.safetensors_files import TensorSpec, tensor_spec
from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError

METADATA = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_type:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which such a file does not contain")


@dataclass(frozen=True)
class TorchCheckpoint:
    """``paths`` has the path of each entry in the nested state, by its name in the folder."""

    directory: Path
    paths: Mapping[str, tuple[Any, ...]]
    specs: Mapping[str, TensorSpec]
    _entries: Mapping[str, Any]
    _places: Mapping[tuple[str, tuple[int, ...]], Any]

    @classmethod
    def open(cls, directory: Path) -> "TorchCheckpoint":
        """Raises CheckpointError if the metadata are damaged, or name other classes than allowed."""
        path = directory / METADATA
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
            entries = found.state_dict_metadata
            paths = {name: tuple((found.planner_data or {}).get(name, (name,))) for name in entries}
            specs = {
                name: tensor_spec(name, entry.properties.dtype, entry.size)
                for name, entry in entries.items()
                if hasattr(entry, "chunks")
            }
            places = {(at.fqn, tuple(at.offset or ())): place for at, place in found.storage_data.items()}
        except (*DAMAGED_DATA_ERRORS, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(directory, paths, specs, entries, places)

    def tensor(self, name: str) -> Tensor:
        """A tensor, assembled from the parts that processes have written."""
        kind, chunks = self.specs[name], self._entries[name].chunks
        parts = (self._loaded(name, tuple(chunk.offsets), chunk) for chunk in chunks)
        if len(chunks) == 1 and tuple(chunks[0].sizes) == kind.shape:
            return next(parts)
        whole, covered = torch.empty(kind.shape, dtype=kind.torch_dtype), 0
        for chunk, part in zip(chunks, parts, strict=True):
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in spans)] = part
            covered += part.numel()
        if covered != kind.num_elements:
            raise CheckpointError(
                f"{self.directory}: the parts of {name} have {covered} of {kind.num_elements} elements"
            )
        return whole

    def value(self, name: str) -> Any:
        """An entry that is not a tensor."""
        return self._read(name, ())

    def _loaded(self, name: str, offset: tuple[int, ...], chunk: Any) -> Tensor:
        found, kind = self._read(name, offset), self.specs[name]
        shape, dtype = tuple(chunk.sizes), kind.torch_dtype
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype != dtype:
            raise CheckpointError(f"{self.directory}: {name} is not the {kind} that {METADATA} says")
        return found

    def _read(self, name: str, offset: tuple[int, ...]) -> Any:
        place = self._places.get((name, offset)) or self._places.get((name, ()))
        if place is None or getattr(place, "transform_descriptors", None):
            how = "is missing" if place is None else f"was transformed by {place.transform_descriptors}"
            raise CheckpointError(f"{self.directory}: {name} {how}, and cannot be read")
        path = self.directory / place.relative_path
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{self.directory / METADATA} names a file outside its folder: {path}")
        try:
            with path.open("rb") as file:
                section: Any = _Section(file, place.offset, place.length)
                return torch.load(section, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {refusal(error)}") from error


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._at)])
        self._at += count
        return count


def model_and_optimizer_entries(folder: TorchCheckpoint) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The entries with their paths from ``model`` or ``optimizer`` on, which may be nested one level."""
    for name, path in folder.paths.items():
        depth = next((k for k, key in enumerate(path[:2]) if key in _TOP), None)
        yield name, path if depth is None else (_TOP[path[depth]], *path[depth + 1 :])


_TOP = {"model": "model", "optim": "optimizer", "optimizer": "optimizer"}
