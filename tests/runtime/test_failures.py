"""A rank that is killed or stopped, whichever it is and whenever: all others end, and name it."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from bare_programs import lower
from handwritten_stages import CPU, LINKS, NUM_RANKS, SIZES, make_batch, make_interpreter, make_model
from worker_processes import forks, free_port

from pipec.errors import TransportError
from pipec.runtime import DistributedTransport
from pipec.runtime.processes import rendezvous
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.schedules import make_schedule

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT = 60.0
PHASES = ("rendezvous", "compilation", "steady state")


@dataclass(frozen=True)
class Blow:
    """What happens to which rank, and when."""

    phase: str
    victim: int
    signal: signal.Signals
    scratch: Path

    def strike(self, phase: str, rank: int) -> None:
        if (phase, rank) == (self.phase, self.victim):
            (self.scratch / "struck").touch()
            os.kill(os.getpid(), self.signal)

    def has_fallen(self) -> bool:
        return (self.scratch / "struck").exists()

    def told(self, rank: int) -> Path:
        return self.scratch / f"told_{rank}"


@pytest.mark.parametrize("phase", PHASES)
def test_whichever_rank_is_killed_or_stopped_the_others_end_and_name_it(phase: str, tmp_path: Path) -> None:
    blows = [
        Blow(phase, victim, how, tmp_path / f"{how.name}_{victim}")
        for how in (signal.SIGKILL, signal.SIGSTOP)
        for victim in range(NUM_RANKS)
    ]
    ranks = [start(blow) for blow in blows]
    try:
        for blow, processes in zip(blows, ranks, strict=True):
            assert_survivors_end(blow, processes)
    finally:
        for process in (process for processes in ranks for process in processes):
            process.kill()
    for blow in blows:
        for rank in {*range(NUM_RANKS)} - {blow.victim}:
            told = blow.told(rank).read_text()
            what = "is stopped|no sign of life|did not connect"
            if blow.signal is signal.SIGKILL:
                what = "died|ended"
            assert re.search(rf"rank {blow.victim}\b.*({what})", told), (blow, rank, told)


def start(blow: Blow) -> list[ForkServerProcess]:
    blow.scratch.mkdir()
    port = free_port()
    processes = [forks.Process(target=live, args=(rank, port, blow)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    return processes


def assert_survivors_end(blow: Blow, processes: list[ForkServerProcess]) -> None:
    survivors = [process for rank, process in enumerate(processes) if rank != blow.victim]
    for process in survivors:
        process.join(300)
    assert [process.exitcode for process in survivors] == [0] * len(survivors), blow
    assert blow.has_fallen(), [path.read_text() for path in blow.scratch.iterdir()]


def live(rank: int, port: int, blow: Blow) -> None:
    """One rank, from the rendezvous to many steps; it writes what ended it."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(NUM_RANKS), RANK=str(rank)
    )
    try:
        work(rank, blow)
    except TransportError as error:
        blow.told(rank).write_text(str(error))


def work(rank: int, blow: Blow) -> None:
    before(rendezvous, "connect", lambda: blow.strike("rendezvous", rank))
    transport = DistributedTransport(CPU, TIMEOUT)
    if rank > 0:
        threading.Timer(0.5, blow.strike, ("compilation", rank)).start()
    transport.call_on_rank_0("compile", lambda: compile_slowly(blow))
    schedule = make_schedule("1f1b", NUM_RANKS, len(SIZES))
    transport.connect(lower(schedule, LINKS), (), "the same text")
    interpreter = make_interpreter(schedule, rank, transport, make_model())
    for step in range(10**9):
        interpreter.run(make_batch(SIZES, step), BatchSlice(SIZES, sum(SIZES)), 5 + step)
        if step == 5:
            blow.strike("steady state", rank)


def compile_slowly(blow: Blow) -> None:
    """As rank 0 does, without an end where ranks are struck meanwhile."""
    time.sleep(0.5)
    blow.strike("compilation", 0)
    if blow.phase == "compilation":
        threading.Event().wait()


def before(owner: object, name: str, act: Callable[[], None]) -> None:
    """Let ``act`` happen before each call of a method or a function."""
    called = getattr(owner, name)

    def acting(*arguments: object) -> object:
        act()
        return called(*arguments)

    setattr(owner, name, acting)
