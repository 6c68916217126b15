"""NCCL connections: what they ask of torch.distributed, and with two GPUs that ranks train over them.

Without a GPU a stub stands for torch.distributed. It writes down what is asked of it, and its messages are
over when the test says so.
"""

import gc
import re
import weakref
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
from pipec.runtime import connections
from pipec.runtime.connections import Direction, NcclConnections

TIMEOUT = 0.2
"""Seconds after which these connections give up."""


class Work:
    """A message that is over when it has been asked ``num_polls`` times whether it is."""

    def __init__(self, num_polls: float) -> None:
        self.num_polls = num_polls
        self.waited = False

    def is_completed(self) -> bool:
        self.num_polls -= 1
        return self.num_polls < 0

    def wait(self) -> None:
        self.waited = True


class Group:
    def __init__(self, ranks: list[int], timeout: timedelta, backend: str) -> None:
        self.ranks, self.timeout, self.backend = tuple(ranks), timeout, backend
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


class Distributed:
    """What one rank sees of torch.distributed. ``asked`` is every request in order."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.asked: list[tuple[str, Direction]] = []
        self.works: list[Work] = []
        self.num_polls: float = 0

    def new_group(self, ranks: list[int], timeout: timedelta, backend: str) -> Group:
        assert all(work.num_polls < 0 for work in self.works), "an earlier group's greeting is not over"
        self.asked.append(("group", (ranks[0], ranks[1])))
        self.groups.append(Group(ranks, timeout, backend))
        return self.groups[-1]

    def isend(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._message("send", group)

    def irecv(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._message("receive", group)

    def _message(self, kind: str, group: Group) -> Work:
        self.asked.append((kind, group.ranks))
        self.works.append(Work(self.num_polls))
        return self.works[-1]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    stub = Distributed()
    monkeypatch.setattr(connections, "dist", stub)
    monkeypatch.setattr(connections, "_CHECK_SECONDS", 0.0)
    return stub


def connected(rank: int, *directions: Direction, failed: bool = False) -> NcclConnections:
    found = NcclConnections(torch.device("cpu"), rank, TIMEOUT, lambda: failed)
    found.open(directions)
    return found


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
        connected(rank, *directions, directions[0])
        assert ", ".join(f"{what} {a}>{b}" for what, (a, b) in distributed.asked) == expected


def test_what_is_open_is_not_opened_again(distributed: Distributed) -> None:
    found = connected(0, (0, 1))
    distributed.asked.clear()
    found.open([(0, 1), (0, 2)])
    assert distributed.asked == [("group", (0, 2)), ("send", (0, 2))]


def test_groups_outlive_the_patience_of_the_ranks(distributed: Distributed) -> None:
    """NCCL's own watchdog would end the process before the ranks can say what happened."""
    connected(0, (0, 1))
    assert distributed.groups[0].backend == "nccl"
    assert distributed.groups[0].timeout > timedelta(seconds=TIMEOUT)


def test_a_greeting_that_is_never_over_is_an_error(distributed: Distributed) -> None:
    distributed.num_polls = float("inf")
    with pytest.raises(TimeoutError, match=r"still under way after 0\.2 s"):
        connected(0, (0, 1))


def test_messages_take_the_group_of_their_direction(distributed: Distributed) -> None:
    found = connected(1, (0, 1), (1, 0), (1, 2))
    distributed.asked.clear()
    found.send([torch.zeros(1), torch.zeros(2)], 2, tag=5)
    found.send([torch.zeros(1)], 0, tag=5)
    work = found.receive(torch.zeros(1), 0, tag=7)
    assert distributed.asked == [("send", (1, 2)), ("send", (1, 2)), ("send", (1, 0)), ("receive", (0, 1))]
    found.wait(work)
    assert distributed.works[-1].waited


@pytest.mark.parametrize("ending", ["the next message", "drain", "close"])
def test_a_tensor_lives_until_its_message_is_over(distributed: Distributed, ending: str) -> None:
    found = connected(0, (0, 1))
    distributed.num_polls = 1000
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    found.send([tensor], 1, tag=0)
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
    found = connected(0, (0, 1), (1, 0))
    distributed.num_polls = 3
    found.send([torch.zeros(1), torch.zeros(1)], 1, tag=0)
    found.receive(torch.zeros(1), 1, tag=0)
    found.drain()
    assert all(work.num_polls < 0 for work in distributed.works)


def test_draining_gives_up_after_the_timeout(distributed: Distributed) -> None:
    found = connected(0, (0, 1))
    distributed.num_polls = float("inf")
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(TimeoutError, match=r"NCCL messages are still under way after 0\.2 s"):
        found.drain()


def test_draining_notices_that_another_rank_failed(distributed: Distributed) -> None:
    found = connected(0, (0, 1), failed=True)
    distributed.num_polls = float("inf")
    found.send([torch.zeros(1)], 1, tag=0)
    with pytest.raises(ConnectionError, match="another rank failed"):
        found.drain()


def test_closing_aborts_what_is_under_way_and_then_nothing_is_left_to_wait_for(
    distributed: Distributed,
) -> None:
    found = connected(0, (0, 1), (1, 0))
    distributed.num_polls = float("inf")
    found.receive(torch.zeros(1), 1, tag=0)
    found.close()
    assert [group.num_aborts for group in distributed.groups] == [1, 1]
    found.drain()


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
