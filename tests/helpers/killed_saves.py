"""A process that is killed before one of its calls that open, sync, rename or remove files."""

import os
import signal
import sys
from collections.abc import Callable

WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "fsync")


def killed_in_call(write: Callable[[], object], number: int) -> bool:
    """Whether a forked process that writes came to the call of this number, before which it is killed."""
    child = os.fork()
    if child == 0:
        calls = iter(range(number))

        def watch(event: str, _: object) -> None:
            if event in WATCHED and next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        def sync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
            watch("fsync", None)
            fsync(descriptor)

        os.fsync = sync
        sys.addaudithook(watch)
        try:
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
