"""Two hosts: network namespaces of this machine, joined by a slow link."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def may_make_hosts() -> bool:
    """Whether this user and this kernel can make network namespaces with a link of a given rate."""
    tools = ("ip", "tc", "unshare", "nsenter")
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return False
    pair = "ip link add pipec0 type veth peer name pipec1"
    tried = f"{pair} && tc qdisc add dev pipec0 root tbf rate 1mbit burst 9k latency 9ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_make_hosts(), reason="needs root, iproute2 and network namespaces"),
]


def test_a_host_that_lost_its_link_is_named() -> None:
    """Nothing says so but its silence."""
    script = ROOT / "tests" / "helpers" / "lost_host_script.py"
    command = [str(ROOT / "benchmarks" / "link.sh"), "200mbit", sys.executable, str(script)]
    done = subprocess.run(
        ["sh", *command],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANKS_PER_HOST": "1"},
    )
    assert "rank 1: no sign of life for" in done.stdout, done.stdout + done.stderr
