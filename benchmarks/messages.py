"""What it costs to post a receive, and to send: pipec's transport beside torch's calls and gloo's own.

pipec's ranks share memory, as on one host, or do not, as on several.

    torchrun --nproc-per-node 2 benchmarks/messages.py [--rounds 500]

Two ranks of one thread. In each round every contestant in turn posts a receive, sends to the other rank,
where one is posted, and waits. Between these the ranks wait for each other, so that nothing is timed while
the other rank is late. Microseconds are the host thread's processor time, first with what a call needs in the
cache, then after a copy of memory that empties it, as computes do. In a round trip by the clock, each rank
posts a receive, and one sends what the other sends back.
"""

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.ir import Instruction, Link, Op, Payload, Program, Value
from pipec.runtime import DistributedTransport
from pipec.runtime.messages import shared_memory

CPU = torch.device("cpu")
ROWS = 4
CASES = {
    "8 KiB": (512,),
    "1 MiB": (65536,),
    "2 x 64 KiB": (4096, 4096),
    "4 x 2 KiB": (128,) * 4,
}
"""Numbers of float32 in a row of each value, of which a message has four rows."""

CACHE_BYTES = 1 << 25
HEADINGS = ("post us", "/ gloo", "after computes", "/ gloo", "send us", "/ gloo", "after computes", "/ gloo")

Times = dict[tuple[str, str, bool], list[float]]
"""Seconds by contestant and call, and whether the cache was emptied before."""


class Contestant(Protocol):
    """Sends values to the other rank, and receives as many."""

    def post(self) -> None: ...

    def send(self) -> None: ...

    def wait(self) -> object: ...


@dataclass
class Gloo:
    """The calls of what torch's group has for CPU tensors, into memory that is there."""

    group: dist.ProcessGroup
    peer: int
    values: Sequence[Tensor]

    def __post_init__(self) -> None:
        self.into = [torch.empty_like(value) for value in self.values]
        self.backend = self.group._get_backend(CPU)
        self.sends: Sequence[dist.Work] = ()

    def post(self) -> None:
        self.receives = [self.backend.recv([tensor], self.peer, 0) for tensor in self.into]

    def send(self) -> None:
        self.sends = [self.backend.send([tensor], self.peer, 0) for tensor in self.values]

    def wait(self) -> None:
        for work in (*self.receives, *self.sends):
            work.wait()
        self.sends = ()  # gloo never returns from a second wait


class Torch(Gloo):
    """``torch.distributed.irecv`` and ``isend``, into memory that is there."""

    def post(self) -> None:
        self.receives = [dist.irecv(tensor, self.peer, group=self.group) for tensor in self.into]

    def send(self) -> None:
        self.sends = [dist.isend(tensor, self.peer, group=self.group) for tensor in self.values]


class Pipec:
    """A receive and a send instruction, as the transport binds them for each link."""

    def __init__(
        self, transport: DistributedTransport, widths: Sequence[int], values: Sequence[Tensor]
    ) -> None:
        carried = tuple(Value(f"x{i}", "float32", ("b", width)) for i, width in enumerate(widths))
        links = [Link(source, 1 - source, Payload.ACTIVATION, carried) for source in range(2)]
        programs = [
            Program(
                rank,
                (
                    Instruction(Op.RECV, rank, 0, links[1 - rank], 1 - rank, 0),
                    Instruction(Op.SEND, rank, 0, links[rank], 1 - rank),
                ),
            )
            for rank in range(2)
        ]
        transport.connect(programs, [], str(widths))
        receive, send = programs[transport.rank].instructions
        receiver, sizes = transport.receiver(receive, 1 - transport.rank), {"b": ROWS}
        self.post = functools.partial(receiver.post, sizes)
        self.wait = receiver.wait
        self.send = functools.partial(transport.sender(send, transport.rank), values, sizes)


def compare(contestants: dict[str, Contestant], rounds: int) -> dict[tuple[str, str, bool], float]:
    """Median microseconds of the processor, by contestant and call, and whether the cache is empty."""
    source = torch.ones(CACHE_BYTES // 8)
    target = torch.ones_like(source)
    found: Times = defaultdict(list)
    for turn in range(2 * rounds):
        for name, contestant in contestants.items():
            for what in ("post", "send", "wait"):
                is_cold = turn % 2 == 1
                if is_cold:
                    target.copy_(source)
                dist.barrier()
                start = time.thread_time()
                getattr(contestant, what)()
                found[name, what, is_cold].append(time.thread_time() - start)
    return {key: 1e6 * statistics.median(each) for key, each in found.items()}


def round_trips(contestants: dict[str, Contestant], rounds: int) -> dict[str, float]:
    """Median microseconds of the clock until what one rank sends has come back."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, contestant in contestants.items():
            contestant.post()
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                contestant.send()
                contestant.wait()
            else:
                contestant.wait()
                contestant.send()
            found[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(each) for name, each in found.items()}


def row(name: str, found: dict[tuple[str, str, bool], float]) -> list[str]:
    cells = []
    for what in ("post", "send"):
        for is_cold in (False, True):
            own, gloo = (found[each, what, is_cold] for each in (name, "gloo"))
            cells += [f"{own:.0f}", f"{own / gloo:.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    near = DistributedTransport(CPU)
    with mock.patch.object(shared_memory, "_host", return_value=""):
        far = DistributedTransport(CPU)
    if rank == 0:
        print(f"| message | contestant | {' | '.join(HEADINGS)} | round trip us |")
        print(f"|---|---|{'--:|' * (len(HEADINGS) + 1)}")
    for case, widths in CASES.items():
        values = [torch.randn(ROWS, width) for width in widths]
        group = dist.new_group(backend="gloo")
        contestants: dict[str, Contestant] = {
            "gloo": Gloo(group, 1 - rank, values),
            "torch": Torch(group, 1 - rank, values),
            "pipec, shared memory": Pipec(near, widths, values),
            "pipec, gloo": Pipec(far, widths, values),
        }
        with torch.no_grad():
            found, trips = compare(contestants, args.rounds), round_trips(contestants, args.rounds)
        for name in contestants if rank == 0 else ():
            print(f"| {case} | {name} | {' | '.join(row(name, found))} | {trips[name]:.0f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
