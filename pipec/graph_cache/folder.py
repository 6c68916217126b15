"""The folder in which captured graphs are kept, and what was measured of the machine: a file each.

A file is a checksum and a JSON document.

``PIPEC_CACHE_DIR`` names another folder than ``~/.cache/pipec``; where it is empty, nothing is kept. The
folder is the user's alone, because whoever can write it decides what models compute. The files that were
read longest ago go when there are too many.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("pipec")

VARIABLE = "PIPEC_CACHE_DIR"

MOST_BYTES = 1 << 29
"""So much is kept in all, and an eighth of it in one file."""


def cache_folder() -> Path | None:
    """The folder, which may not be there yet; None if nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pipec"


def load(folder: Path, key: str) -> Any:
    """The document of this name; None if there is none that can be read."""
    path = _path(folder, key)
    if not path.is_file() or not _is_own(folder):
        return None
    try:
        checksum, _, text = path.read_text(encoding="utf-8").partition("\n")
        if checksum != _checksum(text):
            raise ValueError("its checksum is another one")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        log.warning("what is kept in %s cannot be read, and is made again: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return document


def store(folder: Path, key: str, document: Any) -> None:
    """Write a document, whole or not at all."""
    text = json.dumps(document, separators=(",", ":"))
    if len(text) > MOST_BYTES // 8:
        log.debug("a document of %d bytes is not kept", len(text))
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            return
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as file:
            file.write(f"{_checksum(text)}\n{text}")
        os.replace(file.name, _path(folder, key))
        _let_go(folder)
    except OSError as error:
        log.warning("nothing can be kept in %s: %s", folder, error)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_own(folder: Path) -> bool:
    """Whether the user alone can write the folder."""
    state = folder.stat()
    if state.st_uid == os.getuid() and not state.st_mode & 0o022:
        return True
    log.warning(
        "nothing is kept in %s, because others can write it; "
        "`chmod 700` it, or let %s name a folder of your own",
        folder,
        VARIABLE,
    )
    return False


def _let_go(folder: Path) -> None:
    """Remove the files that were used longest ago, until the others are small enough together."""
    files = [(path, path.stat()) for path in folder.iterdir()]
    rest = sum(state.st_size for _, state in files)
    for path, state in sorted(files, key=lambda each: each[1].st_mtime):
        if rest <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        rest -= state.st_size
