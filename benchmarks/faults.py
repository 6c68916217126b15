"""What ranks do when one of them dies or hangs, and what a checkpoint is worth afterwards.

    python benchmarks/faults.py                 # all of it: about ten minutes on two cores
    python benchmarks/faults.py --kills 5 --stops 2 --saves 3
    python benchmarks/faults.py --restarts 5    # under torchrun: the time from a kill to the next new step

Every round is a run of four ranks, forked from this process. The table has a row for each kind of fault. A
round that fails is printed with the errors of its ranks, and the exit status is then 1. Everything random
follows from the seed, which is printed.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from fault_worlds import (
    CHECKPOINT,
    EXIT,
    PHASES,
    RANKS,
    STEADY,
    STEADY_STEPS,
    STEPS,
    Blow,
    Ends,
    World,
    begin,
    digest,
    follow,
    fork,
    names,
    ops_of_ranks,
    outcome,
    pipeline,
    prepared,
    step,
    usual_seconds,
)
from torch import nn

import pipec

KILLED_WITHIN, STOP_TIMEOUT, STOPPED_WITHIN = 2.0, 3.0, 1.0
"""Seconds until all others have ended; after a rank is stopped, ``STOPPED_WITHIN`` beyond the timeout."""

ATTEMPTS = 20
"""How many runs wait for a fault that comes too late, after the rank has ended."""

SAVED = (1, 1 + STEADY_STEPS)
"""After which steps a run saves."""


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


# a restart

RESTART_RANKS, EVERY, KILLED_AFTER, VICTIM = 2, 4, 7, 1


def train(folder: Path) -> None:
    """A script that resumes, is killed once after a step, and notes when, and when it makes a new step."""
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    pipe = pipec.compile(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    checkpoints = pipec.CheckpointManager(folder / "checkpoints", every=EVERY, keep=2)
    checkpoints.resume(pipe)
    x, target = torch.randn(16, 64), torch.randn(16, 64)
    while pipe.num_steps < KILLED_AFTER:
        pipe.step(x, target=target)
        if not is_first and pipe.num_steps == EVERY + 1:
            (folder / f"stepped_{os.environ['RANK']}").write_text(str(time.monotonic()))
        checkpoints.step(pipe)
    if is_first and os.environ["RANK"] == str(VICTIM):
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.step(x, target=target)


def restart_seconds() -> float:
    """Seconds from the kill until the last rank has made its first new step."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RESTART_RANKS}"]
        command = [sys.executable, *launcher, "--max-restarts=1", __file__, "--train", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        if done.returncode or "goes on after step 4" not in done.stdout + done.stderr:
            raise RuntimeError(done.stdout + done.stderr)
        stepped = (Path(folder, f"stepped_{rank}").read_text() for rank in range(RESTART_RANKS))
        return max(map(float, stepped)) - float(Path(folder, "killed").read_text())


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, count in (("kills", 100), ("stops", 20), ("saves", 50)):
        given.add_argument(f"--{name}", type=int, default=count, help=f"how many; default: {count}")
    given.add_argument("--instructions", action="store_true", help="only those before each instruction")
    given.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a random one")
    given.add_argument("--restarts", type=int, default=0, help="only so many restarts under torchrun")
    given.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.train:
        train(options.train)
        return 0
    if options.restarts:
        seconds = [restart_seconds() for _ in range(options.restarts)]
        print(f"{statistics.median(seconds):.1f} s from a kill to the next new step, the median of {seconds}")
        return 0
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="pipec-faults-"))
    campaign = Campaign(folder, random.Random(options.seed))
    rows = (
        [*instructions(campaign)]
        if options.instructions
        else [
            *instructions(campaign),
            *kills(campaign, options.kills),
            *stops(campaign, options.stops),
            *saves(campaign, options.saves),
        ]
    )
    print("\n| what happens | what must follow | as it should be | known after | others ended after |")
    print("|---|---|---|---|---|")
    print("\n".join(row.text() for row in rows if row.rounds))
    shutil.rmtree(folder, ignore_errors=True)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
