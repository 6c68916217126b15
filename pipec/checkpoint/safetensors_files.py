"""Files of tensors in the format of safetensors, written and read one tensor at a time.

The library's own writer needs all tensors of a file at once. The format is a length, a JSON header and the
elements: https://huggingface.co/docs/safetensors. The library reads files through memory maps, so tensors
take memory only where they are accessed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from pipec.checkpoint.manifest import ChecksummedFile, FileChecksum
from pipec.errors import CheckpointError, InputError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """The type, as safetensors names it, and the shape of a whole tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{str(self.torch_dtype).removeprefix('torch.')}{list(self.shape)}"


def torch_dtype(name: str) -> torch.dtype:
    """The type that safetensors names so. Raises CheckpointError for one that torch lacks."""
    if name not in _DTYPES:
        raise CheckpointError(f"a file has tensors of type {name}, which torch lacks")
    return _DTYPES[name]


def tensor_spec(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """Raises InputError for a type that safetensors lacks."""
    if dtype not in _NAMES:
        raise InputError(f"{name} has type {dtype}, which safetensors files cannot store")
    return TensorSpec(_NAMES[dtype], tuple(shape))


class TensorWriter:
    """Writes a file of the tensors ``specs``, in this order.

    After an error ``write`` does nothing and does not raise, since other processes are waiting to send.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, kind in specs.items():
            start, end = end, end + kind.num_bytes
            header[name] = {"dtype": kind.dtype, "shape": kind.shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._path = path
        self._file: ChecksummedFile | None = None
        self._failure: OSError | None = None
        self._write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        self._write(flat.view(torch.uint8).numpy().data)

    def end(self) -> None:
        """Flush the file; no more tensors follow."""
        self._attempt(ChecksummedFile.end)

    def finish(self) -> FileChecksum:
        """Wait until the file is on the disk; returns its checksum. Raises the OSError of any write."""
        if self._file is None or self._failure is not None:
            raise self._failure or AssertionError
        return self._file.sync()

    def abandon(self) -> None:
        """Close a file that will not be used."""
        if self._file is not None:
            self._file.abandon()

    def _write(self, data: memoryview | bytes) -> None:
        self._attempt(lambda file: file.write(data))

    def _attempt(self, call: Callable[[ChecksummedFile], None]) -> None:
        if self._failure is not None:
            return
        try:
            self._file = self._file or ChecksummedFile(self._path)
            call(self._file)
        except OSError as error:
            self._failure = error
            self.abandon()


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several files, by name. The files stay open, so they may be replaced meanwhile.

    Raises:
        CheckpointError: a file is not a safetensors file, or two files have a tensor of the same name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, tuple[Path, safetensors.safe_open]] = {}
        self.specs: dict[str, TensorSpec] = {}
        for path in paths:
            with _as_checkpoint_error(path):
                file = safetensors.safe_open(path, "pt")
                for name in file.keys():  # noqa: SIM118, since it is not a dict
                    part = file.get_slice(name)
                    self._add(name, path, file, part.get_dtype(), part.get_shape())

    def __getitem__(self, name: str) -> Tensor:
        path, file = self._files[name]
        with _as_checkpoint_error(path):
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _add(
        self, name: str, path: Path, file: safetensors.safe_open, dtype: str, shape: Sequence[int]
    ) -> None:
        if name in self._files:
            raise CheckpointError(f"{path} and {self._files[name][0]} both have {name}")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has type {dtype}, which pipec cannot load")
        self._files[name] = path, file
        self.specs[name] = TensorSpec(dtype, tuple(shape))


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
