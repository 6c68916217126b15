"""The size and SHA-256 of every file of a checkpoint, computed on writing and checked on reading."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from pipec.errors import CheckpointError
from pipec.ir.json_form import parse_json

MANIFEST = "manifest.json"
_CHUNK = 2**24
_MAX_QUEUED = 4
"""Parts of a file that are written and not yet hashed."""


@dataclass(frozen=True)
class FileChecksum:
    """The expected size and hash of a file."""

    bytes: int
    sha256: str


class ChecksummedFile:
    """A new file, hashed while it is written, on a thread of its own.

    Data passed to ``write`` must not change until ``sync``. After ``end``, the thread waits for the disk; so
    end all files before calling ``sync`` on the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._sum = hashlib.sha256()
        self._size = 0
        self._failure: OSError | None = None
        self._parts: Queue[memoryview | bytes | None] = Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._hash_parts, name="pipec checkpoint", daemon=True)
        self._thread.start()

    def write(self, data: memoryview | bytes) -> None:
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            self._parts.put(part)
            with _naming_file(self._path):
                self._file.write(part)
        self._size += len(data)

    def end(self) -> None:
        """Flush the file; nothing more will be written."""
        with _naming_file(self._path):
            self._file.flush()
        self._parts.put(None)

    def sync(self) -> FileChecksum:
        """Wait until the file is on the disk; returns its checksum."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._file.close()
        return FileChecksum(self._size, self._sum.hexdigest())

    def abandon(self) -> None:
        """Close a file that could not be written."""
        self._parts.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):
            self._file.close()

    def _hash_parts(self) -> None:
        while (part := self._parts.get()) is not None:
            self._sum.update(part)
        try:
            with _naming_file(self._path):
                os.fsync(self._file.fileno())
        except OSError as error:
            self._failure = error


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def checksum_of(path: Path) -> FileChecksum:
    """Sync a file that another library wrote; returns its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileChecksum(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_file(path: Path, data: bytes) -> FileChecksum:
    """Write a new file to the disk."""
    with _naming_file(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, FileChecksum]
    sha256_of_files: str


def write_manifest(directory: Path, files: Mapping[str, FileChecksum]) -> str:
    """Write the manifest of these files; returns the digest that identifies the checkpoint."""
    sums = {name: asdict(files[name]) for name in sorted(files)}
    digest = _digest(sums)
    text = json.dumps({"files": sums, "sha256_of_files": digest}, indent=1)
    write_file(directory / MANIFEST, text.encode())
    return digest


@dataclass(frozen=True)
class Manifest:
    """The checksums of the files of a checkpoint, and the digest that identifies it."""

    files: Mapping[str, FileChecksum]
    digest: str


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    path = directory / MANIFEST
    try:
        found = parse_json(_Manifest, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {_REMEDY}") from error
    if found.sha256_of_files != _digest({name: asdict(each) for name, each in found.files.items()}):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its last line. {_REMEDY}")
    if strange := [name for name in found.files if Path(name).name != name]:
        raise CheckpointError(f"{path} names a file outside its folder: {strange[0]!r}")
    return Manifest(found.files, found.sha256_of_files)


def check_file(directory: Path, name: str, expected: FileChecksum) -> None:
    """Raise CheckpointError unless a file has the expected size and hash."""
    path = directory / name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, not the {expected.bytes} written. {_REMEDY}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete. {_REMEDY}") from error
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found != expected.sha256:
        raise CheckpointError(f"{path} is not what was written: its SHA-256 differs. {_REMEDY}")


_REMEDY = "Restore the file, or load an earlier checkpoint"


def _digest(sums: object) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
