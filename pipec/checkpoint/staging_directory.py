"""How a checkpoint is replaced: written to a folder beside it, synced, then renamed.

While ``name`` is replaced, the same folder may contain::

    .name.partial-1f2e3d4c   the new checkpoint, incomplete; left over if its writer was killed
    .name.previous           the old checkpoint; it is valid while there is no ``name``
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from pipec.checkpoint.manifest import MANIFEST, read_manifest
from pipec.errors import CheckpointError


def find_checkpoint(directory: Path) -> Path:
    """The folder of a checkpoint: the previous one, if a process was killed while replacing it."""
    previous = _previous(directory)
    return previous if not directory.exists() and previous.exists() else directory


def require_replaceable(directory: Path, known_digest: str | None) -> None:
    """Refuse to replace anything but the checkpoint ``known_digest``, which this run wrote or loaded.

    Raises:
        CheckpointError: the directory holds something else.
    """
    place = find_checkpoint(directory)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / MANIFEST).is_file():
        raise CheckpointError(f"{place} exists and is not a checkpoint of pipec; choose another directory")
    if read_manifest(place).digest != known_digest:
        raise CheckpointError(
            f"{place} has a checkpoint that this run has neither written nor loaded: another run writes "
            "to it, or has written it. Load it first to go on from it, choose another directory, "
            "or delete it"
        )


def clean_up(folder: Path) -> None:
    """Restore or remove what killed processes have left among the checkpoints of a folder."""
    for previous in folder.glob(".*.previous"):
        name = previous.name.removeprefix(".").removesuffix(".previous")
        if (folder / name).exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            previous.rename(folder / name)
    for left in folder.glob(".*.partial-*"):
        _remove_unused(left)


class StagingDirectory:
    """The folder in which a checkpoint is written. One process makes, publishes and discards it.

    That process locks the folder while it lives, so that others do not remove it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1
        self.path = directory.parent / f".{directory.name}.partial-{secrets.token_hex(4)}"

    def make(self) -> str:
        """Make the folder; returns its path. Removes those that killed runs have left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left in self.path.parent.glob(f".{self._directory.name}.partial-*"):
            _remove_unused(left)
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(self.path)

    def publish(self) -> None:
        """Rename the folder to the checkpoint's name, replacing the previous one."""
        directory, previous = self._directory, _previous(self._directory)
        os.fsync(self._lock)
        if directory.exists() and any(directory.iterdir()):
            shutil.rmtree(previous, ignore_errors=True)
            directory.rename(previous)
            _sync(directory.parent)
        self.path.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(previous, ignore_errors=True)
        self._unlock()

    def discard(self) -> None:
        """Remove the folder, if it was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove(directory: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that nobody finds half of it."""
    left = directory.parent / f".{directory.name}.partial-{secrets.token_hex(4)}"
    directory.rename(left)
    shutil.rmtree(left, ignore_errors=True)


def _previous(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.previous"


def _remove_unused(left: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(left, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(lock)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
