"""Memory that a step frees stays with the process."""

import platform
import resource

import pytest
import torch

from pipec.runtime.allocator import keep_freed_memory
from pipec.runtime.execution import Ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")


def _page_faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = [torch.zeros(1 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_one_step_frees_the_next_one_finds() -> None:
    Ranks(["cpu"], timeout=60.0)
    fresh = _page_faults_of_a_step()
    assert _page_faults_of_a_step() < 100, f"the first one had {fresh}"


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_users_own_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    assert not keep_freed_memory.__wrapped__()
