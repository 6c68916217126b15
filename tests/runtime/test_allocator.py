"""Memory that a step frees stays with the process."""

import platform
import subprocess
import sys

import pytest

from pipec.runtime.memory import allocator
from pipec.runtime.step.ranks import Ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")

PAGE_FAULTS = """
import resource, runpy, sys

def of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (4 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

of_a_step()
before = of_a_step()
assert runpy.run_path(sys.argv[1])["retain_freed_memory"]()
of_a_step()
print(before, of_a_step())
"""


def test_what_one_step_frees_the_next_one_finds() -> None:
    """A fresh process shows it: one with much freed memory already gives some of it back."""
    run = [sys.executable, "-c", PAGE_FAULTS, allocator.__file__]
    before, after = map(int, subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())
    assert after < 100 < before


def test_ranks_tell_it() -> None:
    Ranks(["cpu"], timeout=60.0)
    assert allocator.retain_freed_memory.cache_info().currsize == 1


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_users_own_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    assert not allocator.retain_freed_memory.__wrapped__()
