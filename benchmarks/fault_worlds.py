"""Four ranks that are forked from this process, the script that they run, and what befalls some of them.

A process that imports torch and pipec needs seconds, a fork of one that has imported them needs none. So this
process has no threads and runs nothing itself.
"""

import gc
import hashlib
import itertools
import math
import mmap
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipec
from pipec.ir import Instruction
from pipec.runtime.step.interpreter import Interpreter
from pipec.runtime.step.linker import Linker

RANKS, ROWS, WIDTH = 4, 8, 32
PHASES = ("compile", "first step", "steady state", "checkpoint", "exit")
COMPILE, FIRST, STEADY, CHECKPOINT, EXIT, STRUCK, SAID = range(7)
_NUM_MARKS = 7
STEADY_STEPS = 4
_POLL_SECONDS, _GIVEN_UP_AFTER = 0.002, 60.0


class Clock:
    """When each rank came to each phase, was ``STRUCK``, and had ``SAID`` why it ends; 0 where it has not.

    It is in memory that all share.
    """

    def __init__(self) -> None:
        self._times = memoryview(mmap.mmap(-1, 8 * RANKS * _NUM_MARKS)).cast("d")

    def mark(self, rank: int, what: int) -> None:
        self._times[rank * _NUM_MARKS + what] = time.monotonic()

    def at(self, rank: int, what: int) -> float:
        return self._times[rank * _NUM_MARKS + what]


@dataclass(frozen=True)
class Blow:
    """A signal that ranks get in a phase, at a ``moment`` of it from 0 to 1.

    In steps that is before one of their instructions, in other phases so much of the usual time later. With
    ``op``, a step of ``kind`` in ``STEPS`` is run, and it is before the first instruction with this op.
    """

    phase: int
    signal: signal.Signals
    victims: tuple[int, ...]
    moment: float
    kind: str = ""
    op: str = ""

    @property
    def is_by_instruction(self) -> bool:
        return self.phase in (FIRST, STEADY)


@dataclass(frozen=True)
class World:
    """Ranks of one run. ``directory`` is that of its checkpoints, ``scratch`` has what each of them says."""

    directory: Path
    scratch: Path
    clock: Clock
    blow: Blow | None
    pids: tuple[int, ...]

    def said(self, rank: int) -> str:
        """The error of pipec's that ended a rank; nothing if it came to its end."""
        path = self.scratch / f"said_{rank}"
        return path.read_text() if path.exists() else ""

    def printed(self, rank: int) -> str:
        return (self.scratch / f"printed_{rank}").read_text()


def begin(directory: Path, scratch: Path, blow: Blow | None = None, timeout: float = 20.0) -> World:
    """Fork the ranks of a world. They share this process's memory, and free none of it when they end."""
    gc.freeze()
    scratch.mkdir()
    clock, port = Clock(), _free_port()
    lives = [partial(_live, rank, port, timeout, clock, blow, directory, scratch) for rank in range(RANKS)]
    return World(directory, scratch, clock, blow, tuple(fork(live) for live in lives))


def fork(call: Callable[[], None]) -> int:
    """Run ``call`` in a fork, which then ends as any script does; returns its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        call()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def outcome(pid: int) -> int:
    """The exit status of a fork that is waited for."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass(frozen=True)
class Ends:
    """How the ranks ended: the status of each, and what followed how long after the blow.

    ``known`` is until the last survivor had raised its error, ``late`` until its process had ended.
    """

    statuses: dict[int, int]
    known: float = math.nan
    late: float = math.nan


def follow(world: World, usual: Sequence[float]) -> Ends:
    """Strike as ``world.blow`` says, and wait for all ranks but those that are stopped.

    ``usual`` is how long the phases take.
    """
    blow, ended, statuses = world.blow, dict[int, float](), dict[int, int]()
    deadline = time.monotonic() + _GIVEN_UP_AFTER
    awaited = set(range(RANKS))
    if blow is not None and blow.signal is signal.SIGSTOP:
        awaited -= {*blow.victims}
    while awaited - statuses.keys() and time.monotonic() < deadline:
        for rank in awaited - statuses.keys():
            pid, status = os.waitpid(world.pids[rank], os.WNOHANG)
            if pid:
                ended[rank], statuses[rank] = time.monotonic(), os.waitstatus_to_exitcode(status)
        _strike_in_time(world, usual, statuses)
        time.sleep(_POLL_SECONDS)
    for rank in {*range(RANKS)} - statuses.keys():
        os.kill(world.pids[rank], signal.SIGKILL)
        statuses[rank] = outcome(world.pids[rank])
    struck = max((world.clock.at(rank, STRUCK) for rank in blow.victims), default=0.0) if blow else 0.0
    if blow is None or not struck:
        return Ends(statuses)
    survivors = {*range(RANKS)} - {*blow.victims}
    known = (world.clock.at(rank, SAID) - struck for rank in survivors)
    late = (ended.get(rank, math.inf) - struck for rank in survivors)
    return Ends(statuses, max(known, default=0.0), max(late, default=0.0))


def _strike_in_time(world: World, usual: Sequence[float], gone: dict[int, int]) -> None:
    """Send the signal of a blow that is not by instruction, once it is time."""
    blow, clock = world.blow, world.clock
    if blow is None or blow.is_by_instruction or clock.at(blow.victims[0], STRUCK):
        return
    came = clock.at(blow.victims[0], blow.phase)
    if came and time.monotonic() >= came + blow.moment * usual[blow.phase]:
        for rank in {*blow.victims} - gone.keys():
            clock.mark(rank, STRUCK)
            os.kill(world.pids[rank], blow.signal)


def usual_seconds(world: World) -> list[float]:
    """How long each phase took in a world that nothing befell; of the exit, a bit more than it may take."""
    ends = [max(world.clock.at(rank, phase) for rank in range(RANKS)) for phase in range(len(PHASES))]
    return [*(after - before for before, after in itertools.pairwise(ends)), 0.5]


# What the ranks run.


def pipeline(timeout: float = 20.0, devices: int | None = None) -> pipec.Pipeline:
    torch.manual_seed(0)
    layers = (layer for _ in range(RANKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)))
    return pipec.compile(
        nn.Sequential(*layers),
        devices,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        timeout=timeout,
    )


def prepared(devices: int | None = None) -> pipec.Pipeline:
    x, target = batch(0)
    return pipeline(devices=devices).prepare(x, target=target)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def step(pipe: pipec.Pipeline) -> None:
    x, target = batch(pipe.num_steps)
    pipe.step(x, target=target)


def digest(pipe: pipec.Pipeline) -> str:
    """Of the weights, in one process."""
    summed = hashlib.sha256()
    for tensor in pipe.state_dict().values():
        summed.update(tensor.numpy().tobytes())
    return summed.hexdigest()


class Tied(nn.Module):
    """Words that are embedded and predicted with the same weights, and batch norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.body = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.words(words))), words)


STEPS: dict[str, dict[str, Any]] = {
    "tied weights, buffers, clipping": {"replicas": 2, "clip_grad_norm": 1.0},
    "shards of parameters, local batches": {
        "replicas": 2,
        "shard": "parameters",
        "batch": "local",
        "on_nan": "skip",
    },
    "shards of gradients": {"replicas": 2, "shard": "gradients"},
    "a stream": {"schedule": "pipedream-2bw", "clip_grad_norm": 1.0, "on_nan": "raise"},
}
"""Options of pipelines that together have every instruction for which a rank may wait."""


def _step_of_kind(rank: int, timeout: float, clock: Clock, blow: Blow, scratch: Path) -> None:
    """Two steps of a kind. Each rank notes which ops its program has."""
    ops, link = set[str](), Linker.link

    def linking(self: Linker, instruction: Instruction) -> Callable[[], None]:
        action = link(self, instruction)
        ops.add(instruction.op)
        return strike if (instruction.op, rank) in struck else action

    def strike() -> None:
        clock.mark(rank, STRUCK)
        os.kill(os.getpid(), blow.signal)

    Linker.link = linking  # type: ignore[method-assign]
    struck = {(blow.op, victim) for victim in blow.victims}
    torch.manual_seed(0)
    options, is_stream = STEPS[blow.kind], "schedule" in STEPS[blow.kind]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))) if is_stream else Tied()
    loss_fn = nn.functional.mse_loss if is_stream else None
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    pipe = pipec.compile(
        model, loss_fn=loss_fn, microbatches=4, optimizer=optimizer, timeout=timeout, **options
    )
    for number in range(2):
        x, target = batch(number)
        if is_stream:
            pipe.step(x, target=target)
        else:
            pipe.step((x[:, 0].abs() * 8).long())
    (scratch / f"ops_{rank}").write_text(" ".join(sorted(ops)))
    clock.mark(rank, EXIT)


def ops_of_ranks(world: World) -> list[list[str]]:
    """The ops that the program of each rank has, of a world that nothing befell."""
    return [(world.scratch / f"ops_{rank}").read_text().split() for rank in range(RANKS)]


def _live(
    rank: int, port: int, timeout: float, clock: Clock, blow: Blow | None, directory: Path, scratch: Path
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS), RANK=str(rank))
    with (scratch / f"printed_{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        if blow is not None and blow.kind:
            _step_of_kind(rank, timeout, clock, blow, scratch)
        else:
            _train(rank, timeout, clock, blow, directory)
    except pipec.PipecError as error:
        clock.mark(rank, SAID)
        (scratch / f"said_{rank}").write_text(f"{type(error).__name__}: {error}")


def _train(rank: int, timeout: float, clock: Clock, blow: Blow | None, directory: Path) -> None:
    """A script with every phase: two checkpoints, the first before the steady state.

    It begins when all ranks have met: of one that dies before, they know nothing. A launcher does.
    """
    if blow is not None and blow.is_by_instruction and rank in blow.victims:
        _strike_at_instruction(rank, clock, blow)
    pipe = pipeline(timeout)
    clock.mark(rank, COMPILE)
    checkpoints = pipec.CheckpointManager(directory, every=1, keep=2)
    checkpoints.resume(pipe)
    x, target = batch(0)
    pipe.prepare(x, target=target)
    clock.mark(rank, FIRST)
    step(pipe)
    checkpoints.step(pipe)
    clock.mark(rank, STEADY)
    for _ in range(STEADY_STEPS):
        step(pipe)
    clock.mark(rank, CHECKPOINT)
    checkpoints.step(pipe)
    clock.mark(rank, EXIT)


def _strike_at_instruction(rank: int, clock: Clock, blow: Blow) -> None:
    """Let this process get its signal before an instruction of the first step, or of a later one."""
    execute, made = Interpreter._execute, 0
    chosen, moment = 0, blow.moment
    if blow.phase == STEADY:
        chosen, moment = 1 + int(blow.moment * (STEADY_STEPS - 1)), blow.moment * (STEADY_STEPS - 1) % 1

    def strike() -> None:
        clock.mark(rank, STRUCK)
        os.kill(os.getpid(), blow.signal)

    def executing(self: Interpreter, actions: Sequence[Callable[[], None]], timestamps: Any) -> None:
        nonlocal made
        place = int(moment * len(actions))
        struck = [*actions[:place], strike, *actions[place:]] if made == chosen else actions
        execute(self, struck, timestamps)
        made += 1

    Interpreter._execute = executing  # type: ignore[method-assign]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def names(text: str, ranks: Sequence[int]) -> bool:
    """Whether a text names one of these ranks."""
    return any(re.search(rf"\branks? (\d+, )*{rank}\b", text) for rank in ranks)
