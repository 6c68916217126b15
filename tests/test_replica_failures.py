"""A replica that dies, hangs, or comes with other data, another plan or optimizer: named, within seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

SCRIPT = Path(__file__).parent / "replica_failures.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def outputs(*how: str) -> list[str]:
    """What each of two ranks prints. One that is stopped is killed when the other has ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *how],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first = ranks[0].communicate(timeout=90)[0]
        if how == ("hangs",):
            ranks[1].send_signal(signal.SIGKILL)
        return [first, ranks[1].communicate(timeout=90)[0]]
    finally:
        for rank in ranks:
            rank.kill()


DIFFERENT = {
    "learning rate": "optimizers that differ:",
    "optimizer": "different arguments to pipec.compile:",
    "plan": "microbatches: 2 on rank 0; 4 on rank 1",
    "rows": "rows: 24 on rank 0; 12 on rank 1",
}


def test_ranks_that_differ_are_told_so() -> None:
    for printed in outputs(*DIFFERENT):
        _, *errors = printed.split("InputError in time")
        assert len(errors) == len(DIFFERENT), printed
        for error, said in zip(errors, DIFFERENT.values(), strict=True):
            assert said in error


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_replica_that_is_gone_is_named(how: str) -> None:
    begun = time.monotonic()
    survivor, _ = outputs(how)
    assert survivor.startswith("TransportError in time")
    assert "rank 1" in survivor
    assert time.monotonic() - begun < 60


def test_a_replica_that_fails_in_a_collective_tells_the_others_why() -> None:
    survivor, failed = outputs("collective")
    assert failed.startswith("ExecutionError in time")
    assert "ValueError: broken" in failed
    assert survivor.startswith("TransportError in time")
    assert "ValueError: broken" in survivor
