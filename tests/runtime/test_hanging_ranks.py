"""A rank that hangs in a step, whichever it is: all others end, and name it."""

import itertools
import os
import re
import threading
from pathlib import Path

import pytest
from bare_programs import lower
from handwritten_stages import (
    CPU,
    LINKS,
    NUM_RANKS,
    SIZES,
    make_batch,
    make_interpreter,
    make_model,
    whole_batch,
)
from worker_processes import free_port, start_ranks

from pipec.runtime import DistributedTransport
from pipec.schedules import make_schedule


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    ranks = []
    for victim in range(NUM_RANKS):
        (tmp_path / str(victim)).mkdir()
        ranks.append(start_ranks(live, [(victim,)] * NUM_RANKS, tmp_path / str(victim), free_port()))
    try:
        for victim, rank in itertools.permutations(range(NUM_RANKS), 2):
            ranks[victim][rank].join(300)
            assert ranks[victim][rank].exitcode == 0
            said = (tmp_path / str(victim) / f"error_{rank}").read_text()
            assert said.startswith("TransportError: "), said
            assert re.search(rf"rank {victim}\b.*is alive, but waits for no other rank", said), said
    finally:
        for process in itertools.chain(*ranks):
            process.kill()


def live(victim: int) -> None:
    """One rank, without a store of ``torchrun``; the victim hangs in its sixth step."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    rank, transport = int(os.environ["RANK"]), DistributedTransport(CPU, 60.0)
    schedule = make_schedule("1f1b", NUM_RANKS, len(SIZES))
    transport.connect(lower(schedule, LINKS), (), "the same text")
    interpreter = make_interpreter(schedule, rank, transport, make_model())
    for step in itertools.count():
        if (rank, step) == (victim, 5):
            interpreter.begin_step = lambda *_: threading.Event().wait()  # type: ignore[method-assign]
        interpreter.run(make_batch(SIZES), whole_batch(SIZES))
