"""Two hosts: network namespaces of this machine, joined by a slow link."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MBIT = 200


def may_make_hosts() -> bool:
    """Whether this user and this kernel can make network namespaces with a link of a given rate."""
    tools = ("ip", "tc", "unshare", "nsenter")
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return False
    pair = "ip link add pipec0 type veth peer name pipec1"
    tried = f"{pair} && tc qdisc add dev pipec0 root tbf rate 1mbit burst 9k latency 9ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_make_hosts(), reason="needs root, iproute2 and network namespaces")
@pytest.mark.parametrize("on_each", [1, 2])
def test_a_step_over_a_slow_link_takes_as_long_as_simulated(on_each: int) -> None:
    """With two ranks on each host, these sum between themselves first: a third less travels."""
    link, script = ROOT / "benchmarks" / "link.sh", ROOT / "tests" / "two_hosts.py"
    command = ["sh", str(link), f"{MBIT}mbit", sys.executable, str(script), str(MBIT * 1e6 / 8)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "RANKS_PER_HOST": str(on_each)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=given)
    found = re.findall(r"simulated (\S+) measured (\S+)", done.stdout)
    assert len(found) == on_each, done.stdout + done.stderr
    simulated, measured = map(float, found[0])
    assert simulated > 0.3  # 8.4 MB at 25 MB/s: the gradients are what takes time
    assert 0.7 < measured / simulated < 1.6  # beside other tests
    if on_each == 2:
        assert simulated / float(found[1][0]) == pytest.approx(2 / 3, rel=0.05)
