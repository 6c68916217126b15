"""The size and the SHA-256 of every file of a checkpoint: taken as it is written, checked as it is read."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pydantic

from pipec.errors import CheckpointError

MANIFEST = "manifest.json"
_CHUNK = 2**24


@dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    bytes: int
    sha256: str


class SummedFile:
    """A new file that is summed up as it is written, and is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._sum = hashlib.sha256()
        self._size = 0

    def write(self, data: memoryview | bytes) -> None:
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            self._sum.update(part)
            with _naming(self._path):
                self._file.write(part)
        self._size += len(data)

    def sync(self) -> FileSum:
        """Wait until the disk has it; returns what it must be from now on."""
        with _naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileSum(self._size, self._sum.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. What could not be written before cannot now."""
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error say which file it is of."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sum_of(path: Path) -> FileSum:
    """What a file that something else has written must be from now on. It is on the disk then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileSum(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a new file to the disk."""
    with SummedFile(path) as file:
        file.write(data)
        return file.sync()


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, FileSum]
    sha256_of_files: str


_MANIFEST = pydantic.TypeAdapter(_Manifest)


def write_manifest(directory: Path, files: Mapping[str, FileSum]) -> str:
    """Write the manifest of these files; returns the digest that tells a checkpoint from all others."""
    sums = {name: asdict(files[name]) for name in sorted(files)}
    digest = _digest(sums)
    text = json.dumps({"files": sums, "sha256_of_files": digest}, indent=1)
    write_file(directory / MANIFEST, text.encode())
    return digest


@dataclass(frozen=True)
class Manifest:
    """What the files of a directory must be, and the digest of all of that."""

    files: Mapping[str, FileSum]
    digest: str


def read_manifest(directory: Path) -> Manifest:
    """What the files of a checkpoint must be.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    path = directory / MANIFEST
    try:
        found = _MANIFEST.validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {describe(error)}. {_REMEDY}") from error
    if found.sha256_of_files != _digest({name: asdict(each) for name, each in found.files.items()}):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its last line. {_REMEDY}")
    if strange := [name for name in found.files if Path(name).name != name]:
        raise CheckpointError(f"{path} names a file outside its folder: {strange[0]!r}")
    return Manifest(found.files, found.sha256_of_files)


def check_file(directory: Path, name: str, expected: FileSum) -> None:
    """Raise CheckpointError unless a file is what was written."""
    path = directory / name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, not the {expected.bytes} written. {_REMEDY}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete. {_REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected.sha256:
        raise CheckpointError(f"{path} is not what was written: its SHA-256 differs. {_REMEDY}")


_REMEDY = "Restore the file, or load an earlier checkpoint"


def _digest(sums: object) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def describe(error: pydantic.ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}"
