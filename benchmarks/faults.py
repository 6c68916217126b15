"""What ranks do when one of them dies or hangs, and what a checkpoint is worth afterwards.

    python benchmarks/faults.py                 # all of it: about ten minutes on two cores
    python benchmarks/faults.py --kills 5 --stops 2 --saves 3

Every round is a run of four ranks. The table has a row for each kind of fault. A round that fails is printed
with the errors of its ranks, and the exit status is then 1. Everything random follows from the seed, which is
printed.

The ranks are forked from this process: one that imports torch and pipec needs seconds, a fork of one that has
imported them needs none. So this process has no threads and runs nothing itself.
"""

import argparse
import gc
import hashlib
import itertools
import math
import mmap
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

KILLED_WITHIN, STOP_TIMEOUT, STOPPED_WITHIN = 2.0, 3.0, 1.0
"""Seconds until all others have ended; after a rank is stopped, ``STOPPED_WITHIN`` beyond the timeout."""

ATTEMPTS = 20
"""How many runs wait for a fault that comes too late, after the rank has ended."""

SAVED = (1, 1 + STEADY_STEPS)
"""After which steps a run saves."""


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


def pipeline(timeout: float = 20.0) -> pipec.Pipeline:
    torch.manual_seed(0)
    layers = (layer for _ in range(RANKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)))
    return pipec.compile(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        timeout=timeout,
    )


def prepared() -> pipec.Pipeline:
    x, target = batch(0)
    return pipeline().prepare(x, target=target)


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


# The rounds.


@dataclass
class Row:
    """What came of the rounds with one kind of fault.

    ``known`` and ``late`` are seconds until the others had raised an error, and until they had ended.
    """

    fault: str
    expected: str
    rounds: int = 0
    failed: int = 0
    known: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)

    def note(self, problems: Sequence[str]) -> None:
        self.rounds += 1
        if problems:
            self.failed += 1
            print(f"{self.fault}: " + "\n  ".join(problems), flush=True)

    def text(self) -> str:
        good = f"{self.rounds - self.failed} of {self.rounds}"
        return f"| {self.fault} | {self.expected} | {good} | {_times(self.known)} | {_times(self.late)} |"


def _times(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s, {max(seconds):.2f} s" if seconds else ""


class Campaign:
    """Makes rounds in a folder of its own, and knows what checkpoints must hold."""

    def __init__(self, folder: Path, chosen: random.Random) -> None:
        self._folder, self._chosen, self._count = folder, chosen, 0
        self._digests = self._in_fork(_write_expected)
        self.directory = folder / "undisturbed"
        world = self.begin(self.directory)
        problems = _of_survivors(world, follow(world, ())) + self.problems_of(self.directory)
        assert not problems, problems
        self._usual = usual_seconds(world)
        print("usual seconds:", ", ".join(f"{n} {s:.2f}" for n, s in zip(PHASES, self._usual, strict=True)))

    def begin(self, directory: Path, blow: Blow | None = None, timeout: float = 20.0) -> World:
        self._count += 1
        return begin(directory, self._folder / f"scratch_{self._count}", blow, timeout)

    def struck(
        self, row: Row, phase: int, how: signal.Signals, within: float, num_victims: int = 1
    ) -> list[str]:
        """Let a fault happen in a new run, whose checkpoints come to ``self.directory``; returns problems."""
        timeout = STOP_TIMEOUT if how is signal.SIGSTOP else 20.0
        for _ in range(ATTEMPTS):
            victims = tuple(self._chosen.sample(range(RANKS), num_victims))
            blow = Blow(phase, how, victims, self._chosen.random())
            self.directory = self._folder / f"run_{self._count + 1}"
            world = self.begin(self.directory, blow, timeout)
            ends = follow(world, self._usual)
            if all(ends.statuses[rank] == -signal.SIGKILL for rank in victims):
                break  # else it had come to its end before
        else:
            return [f"{blow} did not strike in {ATTEMPTS} runs: {world.said(0)}"]
        problems = _of_survivors(world, ends)
        if num_victims < RANKS:
            row.late.append(ends.late)
            if ends.known > 0:  # not where all had come to their ends
                row.known.append(ends.known)
            if not ends.late <= within:
                problems.append(f"others ended after {ends.late:.2f} s")
        if problems:
            problems += [str(blow), *(f"rank {rank} said: {world.said(rank)}" for rank in range(RANKS))]
        return problems

    def problems_of(self, directory: Path, steps: Sequence[int] = SAVED) -> list[str]:
        """What is wrong with the newest checkpoint, which must be that of one of these steps."""
        found = self._in_fork(partial(_write_newest, directory))
        if not found:
            return [f"no checkpoint of {directory} loads"]
        ((number, weights),) = found.items()
        if number not in steps:
            return [f"{directory} has step {number}, expected one of {steps}"]
        return [] if weights == self._digests[number] else [f"step {number} of {directory} has other weights"]

    def _in_fork(self, write: Callable[[Path], None]) -> Mapping[int, str]:
        """The digest of each step that a fork writes; none if it fails."""
        written = self._folder / "digests"
        written.unlink(missing_ok=True)
        if outcome(fork(partial(write, written))):
            return {}
        lines = (line.split() for line in written.read_text().splitlines())
        return {int(number): weights for number, weights in lines}


def _write_expected(path: Path) -> None:
    """What each step makes of the weights, in one process."""
    pipe, lines = prepared(), list[str]()
    for _ in range(3 * STEADY_STEPS):
        step(pipe)
        lines.append(f"{pipe.num_steps} {digest(pipe)}")
    path.write_text("\n".join(lines))


def _write_newest(directory: Path, path: Path) -> None:
    """What the newest checkpoint has, in one process."""
    pipe = pipeline()
    pipec.CheckpointManager(directory, every=1).resume(pipe)
    path.write_text(f"{pipe.num_steps} {digest(pipe)}")


def _of_survivors(world: World, ends: Ends) -> list[str]:
    """What the ranks did wrong that nothing befell: each ends in order, and says who was at fault."""
    victims = world.blow.victims if world.blow else ()
    problems = []
    for rank in {*range(RANKS)} - {*victims}:
        said = world.said(rank)
        if ends.statuses[rank]:
            problems.append(f"rank {rank} ended with {ends.statuses[rank]}:\n{world.printed(rank)}")
        elif said and not names(said, victims):
            problems.append(f"rank {rank} does not name {victims}: {said}")
        elif not said and not world.clock.at(rank, EXIT):
            problems.append(f"rank {rank} ended without a word")
    return problems


def kills(campaign: Campaign, count: int) -> Iterator[Row]:
    rows = [Row(f"SIGKILL, {phase}", "all others end within 2 s and name it") for phase in PHASES]
    for number in range(count):
        phase = number % len(PHASES)
        rows[phase].note(campaign.struck(rows[phase], phase, signal.SIGKILL, KILLED_WITHIN))
    yield from rows


def instructions(campaign: Campaign) -> Iterator[Row]:
    """A rank dies before the first instruction of each op that a step has."""
    for kind in STEPS:
        row = Row(f"SIGKILL before each kind of instruction: {kind}", "all others end within 2 s and name it")
        shown = campaign.begin(campaign.directory, Blow(STEADY, signal.SIGKILL, (), 0.0, kind))
        row.note(_of_survivors(shown, follow(shown, ())))
        of_ranks = ops_of_ranks(shown)
        for op in sorted(set[str]().union(*of_ranks)):
            victim = next(rank for rank, ops in enumerate(of_ranks) if op in ops)
            blow = Blow(STEADY, signal.SIGKILL, (victim,), 0.0, kind, op)
            world = campaign.begin(campaign.directory, blow)
            ends = follow(world, ())
            problems = _of_survivors(world, ends)
            if ends.statuses[victim] != -signal.SIGKILL:
                problems.append(f"rank {victim} was not struck")
            if not ends.late <= KILLED_WITHIN:
                problems.append(f"others ended after {ends.late:.2f} s")
            row.late.append(ends.late)
            if ends.known > 0:
                row.known.append(ends.known)
            row.note([f"{op}: {problem}" for problem in problems])
        yield row


def stops(campaign: Campaign, count: int) -> Iterator[Row]:
    within = STOP_TIMEOUT + STOPPED_WITHIN
    row = Row("SIGSTOP, any phase", f"the same within the timeout of {STOP_TIMEOUT:g} s + 1 s")
    for number in range(count):
        row.note(campaign.struck(row, number % EXIT, signal.SIGSTOP, within))
    yield row


def saves(campaign: Campaign, count: int) -> Iterator[Row]:
    rows = [
        Row(f"SIGKILL while saving, {who}", "the checkpoint before loads, or the new one")
        for who in ("one rank", "all ranks")
    ]
    for number in range(count):
        row, num_victims = rows[number % 2], (1, RANKS)[number % 2]
        problems = campaign.struck(row, CHECKPOINT, signal.SIGKILL, KILLED_WITHIN, num_victims)
        row.note(problems + campaign.problems_of(campaign.directory))
    yield from rows


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, count in (("kills", 100), ("stops", 20), ("saves", 50)):
        given.add_argument(f"--{name}", type=int, default=count, help=f"how many; default: {count}")
    given.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a random one")
    options = given.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="pipec-faults-"))
    campaign = Campaign(folder, random.Random(options.seed))
    rows = [
        *instructions(campaign),
        *kills(campaign, options.kills),
        *stops(campaign, options.stops),
        *saves(campaign, options.saves),
    ]
    print("\n| what happens | what must follow | as it should be | known after | others ended after |")
    print("|---|---|---|---|---|")
    print("\n".join(row.text() for row in rows if row.rounds))
    shutil.rmtree(folder, ignore_errors=True)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
