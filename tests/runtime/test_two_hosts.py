"""Two hosts: network namespaces of this machine, joined by a slow link."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MBIT = 200


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


def on_two_hosts(script: str, argument: str, on_each: int) -> str:
    """What the ranks of a script print."""
    command = [
        str(ROOT / "benchmarks" / "link.sh"),
        f"{MBIT}mbit",
        sys.executable,
        str(ROOT / "tests" / "helpers" / script),
    ]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "RANKS_PER_HOST": str(on_each)}
    done = subprocess.run(["sh", *command, argument], capture_output=True, text=True, timeout=150, env=given)
    return done.stdout + done.stderr


def test_a_step_over_a_slow_link_takes_as_long_as_simulated() -> None:
    """Over gloo, the four ranks are one ring."""
    printed = on_two_hosts("two_hosts_script.py", str(MBIT * 1e6 / 8), 2)
    found = re.search(r"simulated (\S+) measured (\S+)\nsimulated (\S+)", printed)
    assert found, printed
    assert "hosts [0, 0, 2, 2]" in printed, "what is assumed of links between GPUs follows from this"
    on_hosts, measured, of_a_ring = map(float, found.groups())
    assert on_hosts > 0.3  # 8.4 MB at 25 MB/s: the gradients are what takes time
    assert 0.7 < measured / of_a_ring < 1.6  # beside other tests


def test_a_host_that_lost_its_link_is_named(tmp_path: Path) -> None:
    """Nothing says so but its silence; the timeout is 4 s."""
    printed = on_two_hosts("lost_host_script.py", str(tmp_path / "lost"), 1)
    found = re.search(r"after (\S+) s: .*rank 1: no sign of life for", printed)
    assert found, printed
    assert float(found[1]) < 4 + 1
