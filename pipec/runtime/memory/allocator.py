"""Makes glibc's allocator keep the memory that a step frees, for the next step.

By default it returns blocks to the system, from a size that it adapts (``man mallopt``, M_MMAP_THRESHOLD).
A step then has to get most of its memory again, and the system zeroes thousands of pages, one at a time.
"""

import ctypes
import functools
import logging
import os
import platform

from pipec.ir import MMAP_THRESHOLD_BYTES

log = logging.getLogger("pipec")

_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, MMAP_THRESHOLD_BYTES),
    "M_TRIM_THRESHOLD": (-1, 1 << 30),
}
"""Parameters of ``mallopt``, by their numbers in ``malloc.h``, and their values in bytes."""


@functools.cache
def retain_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 32 MiB, and 1 GiB in total. Returns whether it does.

    The user's settings take precedence: the environment variables ``MALLOC_...`` and ``GLIBC_TUNABLES``.
    """
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    succeeded = [mallopt(number, size) == 1 for number, size in _SETTINGS.values()]
    retains = all(succeeded)
    log.debug("glibc's allocator %s freed memory", "keeps" if retains else "does not keep")
    return retains
