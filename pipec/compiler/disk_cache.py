"""A folder of compiled calls that processes share: files by the digest of their key, the oldest evicted.

``PIPEC_COMPILE_CACHE`` names the folder; without it nothing is kept. An entry holds code that will run, so
the folder must belong to the user and be writable by nobody else. A file appears whole, under the digest of
its key, and begins with the digest of the rest.
"""

import functools
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipec.console import logger

COMPILE_CACHE = "PIPEC_COMPILE_CACHE"

MAX_BYTES = 2**30
"""The most that the files of a folder may take. Those that were used longest ago are deleted."""

_NAME = re.compile(r"[0-9a-f]{64}\.pipec(\.[0-9a-f]{16}\.tmp)?")

_ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class DiskCache:
    """The files in a folder. Whatever fails is logged, and counts as a file that is not there."""

    folder: Path

    def read(self, key: str) -> bytes | None:
        """What was written for this key; None if there is nothing, or it is damaged."""
        name = _name(key)
        try:
            with self._opened() as folder, open(os.open(name, _READ, dir_fd=folder), "rb") as file:
                _require_private(os.fstat(file.fileno()), self.folder / name)
                digest, _, data = file.read(MAX_BYTES).partition(b"\n")
                os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except (OSError, _NotPrivateError) as error:
            _warn_once(f"{self.folder} is not used as compilation cache: {error}")
            return None
        return data if digest == _digest(data) else None

    def write(self, key: str, data: bytes) -> None:
        """Write what a later process will read for this key, whole or not at all."""
        name, content = _name(key), b"\n".join([_digest(data), data])
        if len(content) > MAX_BYTES:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                temporary = f"{name}.{secrets.token_hex(8)}.tmp"
                try:
                    with open(os.open(temporary, _WRITE, 0o600, dir_fd=folder), "wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                    raise
                _evict(folder)
        except (OSError, _NotPrivateError) as error:
            _warn_once(f"{self.folder} is not used as compilation cache: {error}")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder as a descriptor, so that it cannot be exchanged after it was checked."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _require_private(os.fstat(folder), self.folder)
            yield folder
        finally:
            os.close(folder)


def disk_cache() -> DiskCache | None:
    """The folder that the environment names, if any. None if it is in a home that is not known."""
    folder = os.environ.get(COMPILE_CACHE)
    try:
        return DiskCache(Path(folder).expanduser()) if folder else None
    except RuntimeError as error:
        _warn_once(f"{folder} is not used as compilation cache: {error}")
        return None


_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class _NotPrivateError(Exception):
    """Others could have written a file."""


def _require_private(found: os.stat_result, path: Path) -> None:
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise _NotPrivateError(f"{path} is no file; delete it, or set {COMPILE_CACHE} to another folder")
    if found.st_uid != os.geteuid():
        raise _NotPrivateError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}. Its files "
            f"are code; set {COMPILE_CACHE} to a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _NotPrivateError(
            f"others may write to {path}, and its files are code. Call `chmod go-w {path}`"
        )


def _evict(folder: int) -> None:
    """Delete the files that were used longest ago until the others take no more than ``MAX_BYTES``."""
    found = []
    for name in filter(_NAME.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            known = os.stat(name, dir_fd=folder, follow_symlinks=False)
            found.append((known.st_mtime, known.st_size, name))
    left, now = sum(size for _, size, _ in found), time.time()
    for used, size, name in sorted(found):
        if left > MAX_BYTES or (name.endswith(".tmp") and now - used > _ABANDONED_SECONDS):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            left -= size


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}.pipec"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
