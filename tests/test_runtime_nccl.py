"""NCCL connections: what they ask of torch.distributed, and with two GPUs that ranks train over them.

Without a GPU a stub stands for torch.distributed. It writes down what is asked of it, and its messages are
over when the test says so.
"""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from unsplit import Outcome
from workers import read_outcome, train

import pipec
from pipec.artifact.directory import read, write
from pipec.runtime import nccl
from pipec.runtime.connections import Direction
from pipec.runtime.nccl import NcclConnections, transferable

TIMEOUT = 0.2
"""Seconds after which these connections give up."""


class Work:
    """A message that is over when it has been asked ``num_polls`` times whether it is, or has failed."""

    def __init__(self, num_polls: float, error: Exception | None) -> None:
        self.num_polls = num_polls
        self.error = error
        self.waited = False

    def is_completed(self) -> bool:
        self.num_polls -= 1
        return self.num_polls < 0 or self.error is not None

    def exception(self) -> Exception | None:
        return self.error

    def wait(self) -> None:
        self.waited = True


class Group:
    def __init__(self, ranks: list[int], timeout: timedelta, backend: str) -> None:
        self.ranks, self.timeout, self.backend = tuple(ranks), timeout, backend
        self.num_aborts = 0
        self.occupied: threading.Barrier | None = None

    def abort(self) -> None:
        """As on a GPU that the messages of all groups occupy: it waits until all of them are aborted."""
        self.num_aborts += 1
        if self.occupied is not None:
            self.occupied.wait(TIMEOUT)


class Distributed:
    """What rank ``rank`` sees of torch.distributed. ``asked`` is every request in order."""

    DistError = torch.distributed.DistError

    def __init__(self) -> None:
        self.rank = 0
        self.groups: list[Group] = []
        self.asked: list[tuple[str, Direction]] = []
        self.works: list[Work] = []
        self.tensors: list[Tensor] = []
        self.num_polls: float = 0
        self.error: Exception | None = None

    def new_group(self, ranks: list[int], timeout: timedelta, backend: str) -> Group | int:
        assert all(work.num_polls < 0 for work in self.works), "an earlier group's greeting is not over"
        self.asked.append(("group", (ranks[0], ranks[1])))
        if self.rank not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        self.groups.append(Group(ranks, timeout, backend))
        return self.groups[-1]

    def isend(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._message("send", tensor, group)

    def irecv(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._message("receive", tensor, group)

    def _message(self, kind: str, tensor: Tensor, group: Group) -> Work:
        if group.num_aborts:
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
        self.asked.append((kind, group.ranks))
        self.works.append(Work(self.num_polls, self.error))
        self.tensors.append(tensor)
        return self.works[-1]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    stub = Distributed()
    monkeypatch.setattr(nccl, "dist", stub)
    monkeypatch.setattr(nccl, "_CHECK_SECONDS", 0.01)
    return stub


def connected(
    distributed: Distributed, rank: int, *directions: Direction, is_failed: Callable[[], bool] = bool
) -> NcclConnections:
    distributed.rank = rank
    found = NcclConnections(torch.device("cpu"), rank, TIMEOUT, is_failed)
    found.open(directions)
    return found


def other_rank_fails_after(seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + seconds
    return lambda: time.monotonic() > moment


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "group 0>1, send 0>1, group 1>0, receive 1>0, group 1>2"),
        (1, "group 0>1, receive 0>1, group 1>0, send 1>0, group 1>2, send 1>2"),
        (2, "group 0>1, group 1>0, group 1>2, receive 1>2"),
    ],
)
def test_every_rank_makes_the_same_groups_in_one_order_and_greets_in_its_own(
    distributed: Distributed, rank: int, expected: str
) -> None:
    """A greeting is over before the next group is made: the stub's ``new_group`` checks it."""
    distributed.num_polls = 2
    for directions in permutations([(0, 1), (1, 0), (1, 2)]):
        distributed.asked.clear()
        connected(distributed, rank, *directions, directions[0])
        assert ", ".join(f"{what} {a}>{b}" for what, (a, b) in distributed.asked) == expected


def test_what_is_open_is_not_opened_again(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1))
    distributed.asked.clear()
    found.open([(0, 1), (0, 2)])
    assert distributed.asked == [("group", (0, 2)), ("send", (0, 2))]


def test_groups_outlive_the_patience_of_the_ranks(distributed: Distributed) -> None:
    """NCCL's own watchdog would end the process before the ranks can say what happened."""
    connected(distributed, 0, (0, 1))
    assert distributed.groups[0].backend == "nccl"
    assert distributed.groups[0].timeout > timedelta(seconds=TIMEOUT)


def test_a_greeting_that_is_never_over_is_an_error(distributed: Distributed) -> None:
    distributed.num_polls = float("inf")
    with pytest.raises(TimeoutError, match=r"still under way after 0\.2 s"):
        connected(distributed, 0, (0, 1))


def test_messages_take_the_group_of_their_direction(distributed: Distributed) -> None:
    found = connected(distributed, 1, (0, 1), (1, 0), (1, 2))
    distributed.asked.clear()
    found.send([torch.zeros(1), torch.zeros(2)], 2, tag=5)
    found.send([torch.zeros(1)], 0, tag=5)
    work = found.receive(torch.zeros(1), 0, tag=7)
    assert distributed.asked == [("send", (1, 2)), ("send", (1, 2)), ("send", (1, 0)), ("receive", (0, 1))]
    found.wait(work)
    assert distributed.works[-1].waited


@pytest.mark.parametrize("ending", ["the next message", "drain", "close"])
def test_a_tensor_lives_until_its_message_is_over(distributed: Distributed, ending: str) -> None:
    found = connected(distributed, 0, (0, 1))
    distributed.num_polls = 1000
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    found.send([tensor], 1, tag=0)
    distributed.tensors.clear()
    del tensor
    gc.collect()
    assert held() is not None
    if ending == "close":
        found.close()
    else:
        distributed.works[-1].num_polls = distributed.num_polls = 0
        found.drain() if ending == "drain" else found.send([torch.zeros(1)], 1, tag=0)
    gc.collect()
    assert held() is None


def test_draining_waits_for_every_message(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1), (1, 0))
    distributed.num_polls = 3
    found.send([torch.zeros(1), torch.zeros(1)], 1, tag=0)
    found.receive(torch.zeros(1), 1, tag=0)
    found.drain()
    assert all(work.num_polls < 0 for work in distributed.works)


def test_draining_gives_up_after_the_timeout(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1))
    distributed.num_polls = float("inf")
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(TimeoutError, match=r"NCCL messages are still under way after 0\.2 s"):
        found.drain()


def test_draining_is_patient_while_messages_end(distributed: Distributed) -> None:
    """Together they take four times the timeout."""
    found = connected(distributed, 0, (0, 1), (1, 0))
    distributed.num_polls = float("inf")
    for _ in range(4):
        found.send([torch.zeros(1)], 1, tag=0)
        found.receive(torch.zeros(1), 1, tag=0)
    for number, work in enumerate(distributed.works[2:]):
        threading.Timer(0.5 * TIMEOUT * (number + 1), setattr, (work, "num_polls", 0)).start()
    found.drain()
    found.close()


def test_what_is_stuck_in_one_direction_hides_no_progress_in_another(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1), (0, 2))
    distributed.num_polls = float("inf")
    for peer in (1, 2, 2, 2):
        found.send([torch.zeros(1)], peer, tag=0)
    stuck, *others = distributed.works[2:]
    for number, work in enumerate([*others, stuck]):
        threading.Timer(0.6 * TIMEOUT * (number + 1), setattr, (work, "num_polls", 0)).start()
    found.drain()


# failures

ERROR = torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error")


@pytest.mark.parametrize("where", ["the next message", "drain"])
def test_a_message_that_failed_is_an_error_where_it_is_let_go(distributed: Distributed, where: str) -> None:
    """torch says of a work that failed that it is completed."""
    found = connected(distributed, 0, (0, 1))
    distributed.error = ERROR
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(ConnectionError, match="remote process exited"):
        found.drain() if where == "drain" else found.send([torch.zeros(1)], 1, tag=0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NCCL communicator was aborted on rank 0.", ConnectionError),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", TimeoutError),
    ],
)
def test_errors_of_nccl_are_errors_of_the_connection(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    """So that the rank that notices an error isn't taken for the one that caused it."""

    def fail(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError(text)

    found = connected(distributed, 0, (0, 1), (1, 0))
    work = found.receive(torch.zeros(1), 1, tag=0)
    for name in ("isend", "irecv", "new_group"):
        monkeypatch.setattr(distributed, name, fail)
    monkeypatch.setattr(work, "wait", fail)
    for call in (
        lambda: found.send([torch.zeros(1)], 1, tag=0),
        lambda: found.receive(torch.zeros(1), 1, tag=0),
        lambda: found.wait(work),
        lambda: found.open([(0, 2)]),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            call()


def test_draining_notices_that_another_rank_failed(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1), is_failed=other_rank_fails_after(0.05))
    distributed.num_polls = float("inf")
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(ConnectionError, match="the messages were aborted"):
        found.drain()


def test_a_failure_of_another_rank_frees_a_host_that_is_stuck(distributed: Distributed) -> None:
    """It waits for the GPU somewhere, and asks nothing of the connections."""
    found = connected(distributed, 0, (0, 1), (1, 0), is_failed=other_rank_fails_after(0.05))
    deadline = time.monotonic() + 5
    while not all(group.num_aborts for group in distributed.groups):
        assert time.monotonic() < deadline, "nobody aborts the messages"
        time.sleep(0.005)
    for call in (
        lambda: found.send([torch.zeros(1)], 1, tag=0),
        lambda: found.receive(torch.zeros(1), 1, tag=0),
        found.drain,
        found.check,
    ):
        with pytest.raises(ConnectionError, match="the messages were aborted"):
            call()
    found.close()
    assert [group.num_aborts for group in distributed.groups] == [1, 1]


def test_messages_that_were_aborted_do_not_count_as_over(distributed: Distributed) -> None:
    """An aborted work is completed and has no error. A step must not end as if it had been received."""
    found = connected(distributed, 0, (1, 0))
    distributed.num_polls = float("inf")
    found.receive(torch.zeros(1), 1, tag=0)
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


def test_closing_aborts_own_groups_at_the_same_time(distributed: Distributed) -> None:
    """Ranks outside a group have a number in its place, which cannot be aborted."""
    found = connected(distributed, 1, (0, 1), (0, 2), (1, 2), (2, 1), (2, 3))
    assert len(distributed.groups) == 3
    barrier = threading.Barrier(3)
    for group in distributed.groups:
        group.occupied = barrier
    distributed.num_polls = float("inf")
    found.receive(torch.zeros(1), 0, tag=0)
    found.close()
    assert [group.num_aborts for group in distributed.groups] == [1, 1, 1]
    assert not barrier.broken, "an abort waited for one that was to follow"
    with pytest.raises(ConnectionError, match="the messages were aborted"):
        found.drain()


def test_an_abort_that_fails_keeps_no_other_from_being_made(distributed: Distributed) -> None:
    found = connected(distributed, 0, (0, 1), (0, 2))

    def fail() -> None:
        raise torch.distributed.DistBackendError("ProcessGroup abort timed out")

    distributed.groups[0].abort = fail  # type: ignore[method-assign]
    found.close()
    assert distributed.groups[1].num_aborts == 1


def test_the_thread_that_watches_ends_with_the_connections(distributed: Distributed) -> None:
    def watchers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "pipec watcher"}

    gc.collect()
    before = watchers()
    found = connected(distributed, 0, (0, 1))
    (own,) = watchers() - before
    del found
    gc.collect()
    own.join(5)
    assert not own.is_alive()


# what NCCL carries

LACKING = (
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.float8_e5m2,
)


@pytest.mark.parametrize("dtype", LACKING, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_a_dtype_that_nccl_lacks_travels_as_bytes(
    distributed: Distributed, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The bytes are those of the tensor itself: what is written into them is received."""
    found = connected(distributed, 0, (0, 1), (1, 0))
    sent = torch.randint(0, 2, shape).to(dtype)
    received = torch.zeros(shape).to(dtype)
    found.send([sent], 1, tag=0)
    found.receive(received, 1, tag=0)
    outgoing, incoming = distributed.tensors[-2:]
    assert outgoing.dtype is incoming.dtype is torch.uint8
    incoming.copy_(outgoing)
    assert received.tolist() == sent.tolist()


def test_what_nccl_carries_is_not_viewed() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32):
        tensor = torch.zeros(2, 3, dtype=dtype)
        assert transferable(tensor) is tensor


# on real GPUs

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Two stages with their tensors, compiled without a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    pipe = pipec.compile(model, ["cpu"] * 2, loss_fn=nn.functional.mse_loss, microbatches=4)
    pipe.prepare(X, target=Y).save(tmp_path / "artifact", tensors=True)
    return tmp_path / "artifact"


@two_gpus
def test_two_processes_train_as_one_does(artifact: Path, tmp_path: Path) -> None:
    assert train([artifact] * 2, {"x": X, "target": Y}, tmp_path) == ["", ""]
    found = read_outcome(tmp_path, 2)
    alone = pipec.load(artifact, ["cpu"] * 2)
    expected = Outcome.of(alone.step(x=X, target=Y), alone)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients))


@two_gpus
def test_a_failing_rank_fails_the_other_with_its_error(artifact: Path, tmp_path: Path) -> None:
    broken, _ = read(artifact)
    source = re.sub(r"(def backward\(.*\):\n)", r'\1    raise ValueError("broken")\n', broken.sources[1])
    tensors = safetensors.torch.load_file(artifact / "tensors.safetensors")
    write(replace(broken, sources=(broken.sources[0], source)), artifact, tensors)
    first, failed = train([artifact] * 2, {"x": X, "target": Y}, tmp_path)
    assert failed.startswith("ExecutionError: rank 1, stage 1, microbatch 0, backward: ValueError: broken")
    assert first.startswith("TransportError: rank 0")
    assert "ValueError: broken" in first
