"""Folders that are whole or absent: written beside their place, synced, then renamed, and checked on reading.

While ``name`` is replaced, the same folder may contain::

    .name.partial-1f2e3d4c   the new folder, incomplete; left over if its writer was killed
    .name.previous           the old folder; it is valid while there is no ``name``

``SHA256SUMS`` has the SHA-256 of every other file, as sha256sum writes and checks it.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pipec.errors import DAMAGED_DATA_ERRORS, PipecError

CHECKSUMS = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_file(path: Path, data: bytes) -> str:
    """Write a new file to the disk; returns its SHA-256."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return hashlib.sha256(data).hexdigest()


def sync_file(path: Path) -> str:
    """Sync a file that another library wrote; returns its SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, sums: Mapping[str, str]) -> str:
    """Write the checksums of the files; returns the digest that identifies the folder."""
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    digest = write_file(folder / CHECKSUMS, "".join(lines).encode())
    _sync(folder)
    return digest


class SavedFolder:
    """A folder of files with checksums, ``sums``. ``digest`` identifies what it holds.

    Raises:
        error: the checksums are missing or damaged. ``remedy`` says what to do.
    """

    def __init__(self, path: Path, error: type[PipecError], remedy: str) -> None:
        self.path, self._error, self._remedy = path, error, remedy
        self._listed_in = path / CHECKSUMS
        try:
            data = self._listed_in.read_bytes()
            self.sums = _parsed(data)
        except OSError as failure:
            raise error(f"{self._listed_in} cannot be read: {failure.strerror}. {remedy}") from failure
        except DAMAGED_DATA_ERRORS as failure:
            raise error(f"{self._listed_in} is damaged: {failure}. {remedy}") from failure
        if strange := [name for name in self.sums if Path(name).name != name]:
            raise error(f"{self._listed_in} names a file outside its folder: {strange[0]!r}")
        self.digest = hashlib.sha256(data).hexdigest()

    def require(self, names: Iterable[str]) -> None:
        """Raise the folder's error unless all of these files have checksums."""
        if missing := sorted({*names} - self.sums.keys()):
            raise self._error(
                f"{self._listed_in} lists no {', '.join(missing)}; it was edited or cut short. {self._remedy}"
            )

    def check(self, name: str) -> None:
        """Raise the folder's error unless a file is what was written."""
        path, listed = self.path / name, self._listed_in
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as failure:
            raise self._error(f"{path} is missing, which {listed.name} lists. {self._remedy}") from failure
        except (OSError, ValueError) as failure:  # ValueError for a name that no file can have
            raise self._error(f"{path}, which {listed.name} lists, cannot be read: {failure}") from failure
        if found != self.sums[name]:
            raise self._error(
                f"{path} is not what was saved: its SHA-256 differs from the one in {listed.name}. "
                f"{self._remedy}"
            )


def _parsed(data: bytes) -> dict[str, str]:
    sums = {}
    *lines, last = data.decode().split("\n")
    for line in lines:
        if (match := _LINE.fullmatch(line)) is None:
            raise ValueError(f"found {line[:80]!r}, expected a SHA-256 and a name")
        sums[match[2]] = match[1]
    if last:
        raise ValueError("its last line is cut short")
    return sums


class StagingFolder:
    """The folder in which another one is written. One process makes, publishes and discards it.

    That process locks the folder while it lives, so that others do not remove it.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._lock = target, -1
        self.path = _beside(target, f"partial-{secrets.token_hex(4)}")

    def make(self) -> Path:
        """Make the folder. Removes those that killed processes have left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left in self.path.parent.glob(f".{self._target.name}.partial-*"):
            _remove_unused(left)
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self.path

    def publish(self) -> None:
        """Rename the folder to its target, replacing the previous one."""
        target, previous = self._target, _beside(self._target, "previous")
        os.fsync(self._lock)
        if target.exists() and any(target.iterdir()):
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
            _sync(target.parent)
        self.path.rename(target)
        _sync(target.parent)
        shutil.rmtree(previous, ignore_errors=True)
        self._unlock()

    @contextlib.contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove the folder if the body of the ``with`` raises."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def find_folder(folder: Path) -> Path:
    """The folder, or the previous one if a process was killed while replacing it."""
    previous = _beside(folder, "previous")
    return previous if not folder.exists() and previous.exists() else folder


def clean_up(folder: Path) -> None:
    """Restore or remove what killed processes have left beside the folders in ``folder``."""
    for previous in folder.glob(".*.previous"):
        name = previous.name.removeprefix(".").removesuffix(".previous")
        if (folder / name).exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            previous.rename(folder / name)
    for left in folder.glob(".*.partial-*"):
        _remove_unused(left)


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that nobody finds half of it."""
    left = _beside(folder, f"partial-{secrets.token_hex(4)}")
    folder.rename(left)
    shutil.rmtree(left, ignore_errors=True)


def _beside(folder: Path, ending: str) -> Path:
    return folder.parent / f".{folder.name}.{ending}"


def _remove_unused(left: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(left, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(lock)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
