"""NCCL connections without a GPU: what they ask of torch.distributed, and steps over an emulated one.

A stub stands for torch.distributed. It writes down what is asked of it, and its messages are over when the
test says so. ``emulated_nccl`` carries messages between threads. ``tests/cuda`` has what needs GPUs.
"""

import contextlib
import functools
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import emulated_nccl
import pytest
import torch
import torch.nn.functional as F
from bare_programs import lower
from emulated_nccl import PATIENCE, Emulated, Options, run_ranks
from equality_rows import Row, batch_of, model_of, piped
from instruction_hooks import before_each
from slow_params import slow
from torch import Tensor, nn
from torch._C._distributed_c10d import WorkResult

import pipec
from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import SCHEDULED_PHASES, Instruction, Link, Op, Payload, Program, Value
from pipec.ir.batch_split import split_sizes
from pipec.programs.lower import chain_links
from pipec.runtime import World
from pipec.runtime.messages import distributed_transport as transport_of_processes
from pipec.runtime.messages import nccl
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, NO_LIMIT, Direction
from pipec.runtime.messages.nccl import NcclConnections, edge_coloring_order
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.dry_run import DryRuns
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.linker import Linker
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.ranks import Ranks
from pipec.schedules import make_schedule

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work:
    """A message that is over when it has been asked ``num_polls`` times whether it is, or has failed."""

    def __init__(self, num_polls: float, error: WorkResult | None) -> None:
        self.num_polls = num_polls
        self.error = error

    def is_completed(self) -> bool:
        self.num_polls -= 1
        return self.num_polls < 0 or self.error is not None

    def get_future_result(self) -> "torch.futures.Future[int]":
        """The result of a failed message; that of a message that succeeded is set some time later."""
        future = torch.futures.Future[int]()
        if self.error is not None:
            future.set_result(int(self.error))
        return future

    def wait(self) -> None:
        """The GPU waits, and the host goes on."""


class Group:
    """A group; ``distributed`` notes what is asked of it."""

    def __init__(self, distributed: "Distributed", ranks: tuple[int, ...], options: Options) -> None:
        self.ranks, self.options = ranks, options
        self.send, self.recv, self.allreduce = (
            functools.partial(distributed.message, kind, self) for kind in ("send", "receive", "sum")
        )
        self.timeout = timedelta()
        self.num_aborts, self.error_handling = 0, os.environ.get(ERROR_HANDLING)
        self.occupied: threading.Barrier | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        """As on a GPU that the messages of all groups occupy: it waits until all of them are aborted."""
        self.num_aborts += 1
        if self.occupied is not None:
            self.occupied.wait(PATIENCE)


class Distributed(emulated_nccl.Distributed):
    """What one rank sees of torch.distributed. ``asked`` is every request in order."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Group] = []
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.works: list[Work] = []
        self.tensors: list[Tensor] = []
        self.num_polls: float = 0
        self.error: WorkResult | None = None
        self.opening = False

    def make_group(self, store: str, rank: int, size: int, options: Options) -> Group:
        ranks = tuple(int(each) for each in re.findall(r"\d+", store.replace("-1", "")))
        assert 0 <= rank < size == len(ranks)
        self.asked.append(("group", ranks))
        self.groups.append(Group(self, ranks, options))
        return self.groups[-1]

    def message(self, kind: str, group: Group, tensors: list[Tensor], *to: int) -> Work:
        if group.num_aborts:
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
        assert not self.opening or all(work.num_polls < 0 for work in self.works), "a greeting is not over"
        self.asked.append((kind, group.ranks))
        self.works.append(Work(self.num_polls, self.error))
        self.tensors += tensors
        return self.works[-1]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    stub = Distributed()
    monkeypatch.setattr(nccl, "dist", stub)
    return stub


def connected(
    distributed: Distributed,
    rank: int,
    *directions: Direction,
    on_progress: Callable[[], object] = bool,
) -> NcclConnections:
    distributed.opening = True
    found = NcclConnections(torch.device("cpu"), torch.distributed.HashStore(), rank, 4, on_progress)
    found.open(directions)
    distributed.opening = False
    return found


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "group 0>1, group 1>0, send 0>1, receive 1>0"),
        (1, "group 0>1, group 1>0, group 1>2, receive 0>1, send 1>0, send 1>2"),
        (2, "group 1>2, receive 1>2"),
    ],
)
def test_every_rank_makes_its_groups_in_one_order_and_greets_in_its_own(
    distributed: Distributed, rank: int, expected: str
) -> None:
    """A greeting is over before the next one begins: the stub's ``message`` checks it."""
    distributed.num_polls = 2
    for directions in itertools.permutations([(0, 1), (1, 0), (1, 2)]):
        distributed.asked.clear()
        found = connected(distributed, rank, *directions, directions[0])
        assert ", ".join(f"{what} {a}>{b}" for what, (a, b) in distributed.asked) == expected
    distributed.asked.clear()
    found.open([(0, 1), (rank, 3)])
    assert distributed.asked == [("group", (rank, 3)), ("send", (rank, 3))]


@pytest.mark.parametrize("before", [None, "3"])
def test_groups_have_streams_of_their_own_and_a_late_message_does_not_end_the_process(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Streams that scripts make are of another pool; and what waits takes few multiprocessors.

    The script saves after an error, and torch's watchdog would abort it.
    """
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(ERROR_HANDLING, before)
    connected(distributed, 0, (0, 1)).open([], [(0, 1)])
    assert os.environ.get(ERROR_HANDLING) == before
    for group in distributed.groups:
        assert group.options.is_high_priority_stream
        assert (group.error_handling, group.timeout) == ("0", NO_LIMIT)
    direction, collective = distributed.groups
    assert direction.options.config.max_ctas < collective.options.config.max_ctas


def test_groups_are_aborted_when_the_script_ends(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: torch warns of groups that are left, those of freed connections too."""
    at_exit = list[Callable[[], object]]()
    monkeypatch.setattr(nccl.atexit, "register", lambda *call: at_exit.append(functools.partial(*call)))
    connected(distributed, 0, (0, 1), (1, 0))
    connected(distributed, 0, (0, 1)).close()
    assert [group.num_aborts for group in distributed.groups] == [0, 0, 1]
    for leave in at_exit:
        leave()
    assert [group.num_aborts for group in distributed.groups] == [1, 1, 1]


@pytest.mark.parametrize(
    ("what", "launched"), [("send", ["send"]), ("collective", ["sum"]), ("wait", []), ("drain", [])]
)
def test_posted_receives_are_launched_in_order_behind_a_compute(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch, what: str, launched: list[str]
) -> None:
    """Each as if where it was posted. A wait for a message that is launched already launches no other."""

    class PastLaunches:
        def __init__(self, device: torch.device) -> None:
            self.here = functools.partial(next, map(self._entered, itertools.count(1)))

        @contextlib.contextmanager
        def _entered(self, number: int) -> Iterator[None]:
            distributed.asked.append(("enter", (number,)))
            yield
            distributed.asked.append(("leave", (number,)))

    monkeypatch.setattr(nccl, "PastLaunches", PastLaunches)
    found = connected(distributed, 0, (0, 1), (1, 0), (2, 0))
    found.open([], [(0, 1)])
    earlier = found.receive([torch.zeros(1)], 1, tag=0)
    found.wait(earlier)
    distributed.asked.clear()
    receives = [found.receive([torch.zeros(1)], peer, tag=0) for peer in (1, 2, 1)]
    found.wait(earlier)
    assert distributed.asked == []
    assert not any(each.is_completed() for each in receives)
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: found.send([torch.zeros(1)], 1, tag=0),
        "collective": lambda: found.all_reduce((0, 1), torch.zeros(1)),
        "wait": lambda: found.wait(receives[0]),
        "drain": found.drain,
    }
    calls[what]()
    posted = enumerate((1, 2, 1), 4)  # behind the greetings of two directions and an earlier message
    in_order = [(("enter", (k,)), ("receive", (peer, 0)), ("leave", (k,))) for k, peer in posted]
    assert distributed.asked[:9] == [*itertools.chain(*in_order)]
    assert [kind for kind, _ in distributed.asked[9:]] == launched


def test_a_host_that_waits_launches_what_others_may_wait_for(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for messages that it received long ago, and is not further ahead of the GPU than that."""
    monkeypatch.setattr(nccl, "_MAX_AWAITED", 1)
    found = connected(distributed, 0, (0, 1), (1, 0))
    distributed.num_polls = 20
    earlier, later = (found.receive([torch.zeros(1)], 1, tag=0) for _ in range(2))
    found.wait(earlier)
    assert not earlier.is_completed()
    found.receive([torch.zeros(1)], 1, tag=0)
    asked = len(distributed.asked)
    found.wait(later)
    assert distributed.asked[asked:] == [("receive", (1, 0))]
    assert earlier.is_completed()


@pytest.mark.parametrize(("given", "warned"), [("1", True), ("7", True), ("8", False), ("32", False)])
def test_too_few_connections_of_cuda_are_warned_of_once(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch, said: list[str], given: str, warned: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    nccl._warn_of_few_connections.cache_clear()
    for _ in range(2):
        connected(distributed, 0, (0, 1))
    assert ["CUDA_DEVICE_MAX_CONNECTIONS=" + given in each for each in said] == [True] * warned


@pytest.mark.parametrize("ending", ["the next message", "drain", "close", "a host that is far ahead"])
def test_a_tensor_lives_until_its_message_is_over(
    collect: Callable[[], int], distributed: Distributed, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A host that is far ahead of the GPU waits before it uses more memory."""
    monkeypatch.setattr(nccl, "_MAX_AWAITED", 0)
    found = connected(distributed, 0, (0, 1), (1, 0))
    distributed.num_polls = 1000
    tensor = torch.zeros(3)
    held, is_ahead = weakref.ref(tensor), ending == "a host that is far ahead"
    call = found.receive if is_ahead else found.send
    received: Any = call([tensor], 1, tag=0)
    distributed.tensors.clear()
    del tensor
    collect()
    assert held() is not None
    if ending == "close":
        found.close()
    elif is_ahead:
        distributed.num_polls = 3
        found.wait(received)
        distributed.tensors.clear()
    else:
        distributed.works[-1].num_polls = distributed.num_polls = 0
        found.drain() if ending == "drain" else found.send([torch.zeros(1)], 1, tag=0)
    collect()
    assert held() is None


def test_each_message_that_ends_is_progress(distributed: Distributed) -> None:
    """For each the heartbeats begin to count anew. The first one, in another direction, ends last of all."""
    waiting, progress = list[Work](), list[int]()

    def end_next() -> None:
        progress.append(len(waiting))
        for work in waiting[:1]:
            waiting.remove(work)
            work.num_polls = 0

    found = connected(distributed, 0, (1, 0), (2, 0), on_progress=end_next)
    progress.clear()
    distributed.num_polls = float("inf")
    for receive in [found.receive([torch.zeros(1)], peer, tag=0) for peer in (1, 2, 2, 2, 2, 2, 2)]:
        found.wait(receive)
    stuck, *others = distributed.works[2:]
    waiting += [*others, stuck]
    found.drain()
    found.close()
    assert progress == [7, 6, 5, 4, 3, 2, 1]


def test_few_messages_of_a_direction_are_sent_at_a_time(distributed: Distributed) -> None:
    """Else the host, which waits for nothing, holds the tensors of all microbatches."""
    found = connected(distributed, 0, (0, 1), (0, 2))
    distributed.num_polls = float("inf")
    for _ in range(MAX_IN_TRANSIT):
        found.send([torch.zeros(1), torch.zeros(1)], 1, tag=0)
    found.send([torch.zeros(1)], 2, tag=0)
    asked = len(distributed.asked)
    oldest = distributed.works[2:4]
    for number, work in enumerate(oldest):
        threading.Timer(0.06 * (number + 1), setattr, (work, "num_polls", 0)).start()
    found.send([torch.zeros(1)], 1, tag=0)
    assert all(work.num_polls < 0 for work in oldest)
    assert distributed.asked[asked:] == [("send", (0, 1))]


# groups and their streams


def test_a_chain_opens_in_four_rounds() -> None:
    """Each rank meets one other in a round, however long the chain is."""
    chain = [(a, b) for a in range(5) for b in range(5) if abs(a - b) == 1]
    rounds = [(0, 1), (2, 3)], [(1, 0), (3, 2)], [(1, 2), (3, 4)], [(2, 1), (4, 3)]
    assert edge_coloring_order(chain) == [pair for each in rounds for pair in each]


def test_results_need_no_directions_of_their_own() -> None:
    """From one rank to 63 others they would, on twice as many streams as there are."""
    result = Link(63, -1, Payload.RESULT, (Value("loss", "float32", ()),))
    programs = lower(make_schedule("1f1b", 64, 4), (*chain_links(64), result))
    directions, has_last = transport_of_processes._directions(programs)
    assert directions == {(k, k + way) for k in range(64) for way in (-1, 1) if 0 <= k + way < 64}
    assert has_last


def test_more_groups_than_streams_are_refused_by_every_rank(distributed: Distributed) -> None:
    """Two of them would share a stream, and a message wait for one that comes after it."""
    peers = range(1, 18)
    directions = [pair for peer in peers for pair in ((0, peer), (peer, 0))]
    for rank in (0, 3):
        found = NcclConnections(torch.device("cpu"), torch.distributed.HashStore(), rank, 18, bool)
        with pytest.raises(InputError, match=r"rank 0 would exchange messages over 34 NCCL groups, .* 32"):
            found.open(directions)
        assert distributed.groups == []


# failures


@pytest.mark.parametrize("where", ["the next message", "drain"])
@pytest.mark.parametrize("error", [WorkResult.COMM_ERROR, WorkResult.TIMEOUT])
def test_a_message_that_failed_is_an_error_where_it_is_let_go(
    distributed: Distributed, where: str, error: WorkResult
) -> None:
    """torch says of a work that failed that it is completed."""
    found = connected(distributed, 0, (0, 1))
    distributed.error = error
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(ConnectionError, match="an NCCL message failed"):
        found.drain() if where == "drain" else found.send([torch.zeros(1)], 1, tag=0)


def test_errors_of_nccl_are_errors_of_the_connection(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the rank that notices an error isn't taken for the one that caused it."""

    def fail(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")

    found = connected(distributed, 0, (0, 1), (1, 0))
    work = found.receive([torch.zeros(1)], 1, tag=0)
    found.wait(work)
    for group in distributed.groups:
        group.send = group.recv = fail  # type: ignore[assignment]
    monkeypatch.setattr(distributed, "make_group", fail)
    monkeypatch.setattr(distributed.works[-1], "wait", fail)
    for call in (
        lambda: found.send([torch.zeros(1)], 1, tag=0),
        lambda: found.wait(found.receive([torch.zeros(1)], 1, tag=0)),
        lambda: found.wait(work),
        lambda: found.open([(0, 2)]),
    ):
        with pytest.raises(ConnectionError, match="communicator was aborted"):
            call()


def test_closing_aborts_own_groups_at_the_same_time_and_ends_all_calls(distributed: Distributed) -> None:
    """Ranks outside a group have a number in its place, which cannot be aborted. One abort fails."""
    found = connected(distributed, 1, (0, 1), (0, 2), (1, 2), (2, 1), (2, 3))
    failing, *others = distributed.groups
    barrier = threading.Barrier(2)
    for group in others:
        group.occupied = barrier

    def fail() -> None:
        raise torch.distributed.DistBackendError("ProcessGroup abort timed out")

    failing.abort = fail  # type: ignore[method-assign]
    distributed.num_polls = float("inf")
    found.receive([torch.zeros(1)], 0, tag=0)
    found.close()
    assert not barrier.broken, "an abort waited for one that was to follow"
    for call in (
        lambda: found.send([torch.zeros(1)], 2, tag=0),
        lambda: found.receive([torch.zeros(1)], 0, tag=0),
        found.drain,
        found.check,
    ):
        with pytest.raises(ConnectionError, match="the messages were aborted"):
            call()
    found.close()
    assert [group.num_aborts for group in others] == [1, 1]


def test_messages_that_were_aborted_do_not_count_as_over(distributed: Distributed) -> None:
    """An aborted work is completed and has no error. A step must not end as if it had been received."""
    found = connected(distributed, 0, (1, 0))
    distributed.num_polls = float("inf")
    found.receive([torch.zeros(1)], 1, tag=0)
    group = distributed.groups[0]
    abort = group.abort

    def complete() -> None:
        abort()
        distributed.works[-1].num_polls = 0
        time.sleep(0.1)

    group.abort = complete  # type: ignore[method-assign]
    threading.Timer(0.02, found.close).start()
    with pytest.raises(ConnectionError, match="the messages were aborted"):
        found.drain()


# what NCCL carries

LACKING = ("bool", "int16", "uint16", "uint32", "uint64", "complex64", "float8_e5m2")


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in LACKING], ids=LACKING)
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_a_dtype_that_nccl_lacks_travels_as_bytes(
    distributed: Distributed, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The bytes are those of the tensor itself: what is written into them is received."""
    found = connected(distributed, 0, (0, 1), (1, 0))
    sent = torch.randint(0, 2, shape).to(dtype)
    received = torch.zeros(shape).to(dtype)
    found.send([sent], 1, tag=0)
    found.wait(found.receive([received], 1, tag=0))
    outgoing, incoming = distributed.tensors[-2:]
    assert outgoing.dtype is incoming.dtype is torch.uint8
    incoming.copy_(outgoing)
    assert received.tolist() == sent.tolist()


# the runtime over an emulated GPU


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> emulated_nccl.Distributed:
    found = emulated_nccl.Distributed()
    monkeypatch.setattr(nccl, "dist", found)
    return found


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1), (1, 2)])
def test_collectives_are_in_the_order_of_the_ranks(
    emulated: emulated_nccl.Distributed, ranks: tuple[int, ...]
) -> None:
    """A group gives its k-th rank the k-th part, in whatever order its ranks are."""

    def run(transport: Emulated) -> tuple[list[float], list[float]] | None:
        transport._connections.open([], [ranks], has_results=False)
        if transport.rank not in ranks:
            return None
        group, size = transport.group(ranks), len(ranks)
        part, whole = torch.zeros(2), torch.zeros(2 * size)
        group.reduce_scatter(part, torch.arange(2.0 * size) + 100 * transport.rank)()
        group.all_gather(whole, torch.full((2,), float(transport.rank)))()
        return part.tolist(), whole.tolist()

    found, total = run_ranks(3, run), 100 * sum(ranks)
    for k, rank in enumerate(ranks):
        part = [total + len(ranks) * (2.0 * k), total + len(ranks) * (2.0 * k + 1)]
        assert found[rank] == (part, [float(each) for each in ranks for _ in range(2)])


def test_peers_may_get_different_results(emulated: emulated_nccl.Distributed) -> None:
    """With replicas that pass their own rows, ranks 0 and 2 send theirs to ranks 1 and 3 alone."""

    def run(transport: Emulated) -> list[list[float]]:
        connections, rank, made = transport._connections, transport.rank, {0: 3, 2: 2}
        connections.open([], [], has_results=True)

        def rows(maker: int, peer: int) -> int:
            return made[maker] if peer == maker + 1 else 0

        for peer in range(4) if rank in made else ():
            if peer != rank:
                result = torch.full((rows(rank, peer),), float(rank + 1))
                connections.send([result], peer, 0, Payload.RESULT)
        arriving = {maker: [torch.zeros(rows(maker, rank))] for maker in made if maker != rank}
        works = [connections.receive(into, maker, 0, Payload.RESULT) for maker, into in arriving.items()]
        for work in works:
            connections.wait(work)
        return [into[0].tolist() for into in arriving.values()]

    assert run_ranks(4, run) == [[[]], [[1.0] * 3, []], [[]], [[], [3.0] * 2]]


def test_results_that_a_stage_keeps_pass_between_its_replicas(emulated: emulated_nccl.Distributed) -> None:
    """Ranks 2 and 3 of the other stage take no part in it."""
    link = Link(0, 0, Payload.RESULT, (Value("loss", "float32", ("b",)),))
    ops = Op.RECV, Op.SEND
    programs = [
        Program(rank, [Instruction(op, 0, -1, link, peer=1 - rank) for op in ops] if rank < 2 else [])
        for rank in range(4)
    ]

    def run(transport: Emulated) -> list[float]:
        transport.connect(programs, (), "")
        if transport.rank > 1:
            return []
        receive, send = programs[transport.rank].instructions
        receiver, sizes = transport.receiver(receive, 0), {"b": 2}
        receiver.post(sizes)
        transport.sender(send, 0)([torch.full((2,), float(transport.rank))], sizes)
        (found,) = receiver.wait()
        return list(found.tolist())

    assert run_ranks(4, run) == [[1.0, 1.0], [0.0, 0.0], [], []]


ROWS = 15


def train(
    row: Row, model: nn.Module, artifact: Artifact, ranks: Ranks, num_steps: int
) -> tuple[list[Any], dict[str, Tensor]]:
    """The results of each step, and the gradients that a process has."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    execution = Execution(artifact, tensors, tensors, ranks)
    batches, sizes = [batch_of(row, number, ROWS) for number in range(num_steps)], split_sizes(ROWS, 4)
    results = [execution.run([batch], BatchSlice(sizes, ROWS), seed=0) for batch in batches]
    return results, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("schedule", "num_steps", "waits"),
    [
        ("gpipe", 20, False),
        slow("1f1b", 100, False),
        ("1f1b", 10, True),
        ("zb-h1", 10, True),
        ("zb-h2", 10, True),
    ],
)
def test_steps_with_random_delays_are_those_of_one_process(
    emulated: emulated_nccl.Distributed,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    num_steps: int,
    waits: bool,
) -> None:
    """Bit for bit: results on every rank, and gradients.

    Any compute may wait for its GPU, as those do that free memory or load kernels. A receive that was
    launched before would wait forever.
    """
    row = Row(model="unusual", layout="3", schedule=schedule)
    x, y = batch_of(row, 0, ROWS)
    artifact = piped(row).pipe.prepare(x, target=y)._executions.artifact
    results, gradients = train(row, model_of(row), artifact, Ranks(3, PATIENCE), num_steps)
    models = [model_of(row) for _ in range(3)]
    if waits:
        monkeypatch.setattr(Linker, "link", before_each(wait_for_gpu))

    def run(transport: Emulated) -> tuple[list[Any], dict[str, Tensor]]:
        ranks = Ranks(["cpu"] * 3, PATIENCE, here=World(transport.rank, 3))
        ranks.distributed = transport
        return train(row, models[transport.rank], artifact, ranks, num_steps)

    found = run_ranks(3, run)
    for own, partial in found:
        torch.testing.assert_close(own, results, rtol=0, atol=0)
        torch.testing.assert_close(partial, {name: gradients[name] for name in partial}, rtol=0, atol=0)
    assert {name for _, partial in found for name in partial} == {*gradients}


def wait_for_gpu(rank: RankState, instruction: Instruction) -> None:
    """Let a compute wait until no message runs on the GPU of its rank."""
    transport: Any = rank.transport
    deadline = time.monotonic() + PATIENCE
    while instruction.op in {*map(Op, SCHEDULED_PHASES)} and transport.is_busy():
        if time.monotonic() > deadline:
            raise TimeoutError("a kernel waits until messages are over")
        time.sleep(1e-4)


@pytest.mark.parametrize(("every_size", "rehearsed"), [(False, [120, 128]), (True, [*range(120, 132)])])
def test_powers_of_two_are_rehearsed(every_size: bool, rehearsed: list[int]) -> None:
    """Else each new length costs a meeting of all ranks. Code that is compiled is so for each size."""
    pipe = pipec.compile(nn.Linear(2, 2), 1, loss_fn=F.mse_loss, microbatches=1)
    pipe.step(torch.ones(3, 2), target=torch.ones(3, 2))
    (execution,) = pipe._executions._linked.values()
    dry_runs, found = DryRuns(execution._interpreters[0], every_size), list[int]()
    for rows in range(120, 132):
        sizes = BatchSlice([rows], rows)
        if dry_runs.needs_dry_run(sizes):
            found.append(rows)
        dry_runs.dry_run([{"input": torch.ones(rows, 2), "target": torch.ones(rows, 2)}], sizes, seed=0)
    assert found == rehearsed
