"""Messages through memory that two processes share: here both ends are in one process, on threads."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from pipec.errors import ExecutionError, TransportError
from pipec.ir import Instruction, Link, Op, Payload
from pipec.runtime.messages import shared_memory
from pipec.runtime.messages.shared_memory import SharedMemory
from tests.runtime.test_messages import DTYPES, link_of

Pair = tuple[SharedMemory, SharedMemory]

DIRECTIONS = {(0, 1), (1, 0), (1, 2), (2, 1)}


class Ranks:
    """Ranks that know each other's hosts and addresses, as after their first exchange of texts."""

    def __init__(self, num_ranks: int, directions: set[tuple[int, int]]) -> None:
        self.ends = [SharedMemory(rank, num_ranks) for rank in range(num_ranks)]
        with ThreadPoolExecutor(num_ranks) as ranks:
            list(ranks.map(lambda rank: self._open(rank, directions), range(num_ranks)))

    def _open(self, rank: int, directions: set[tuple[int, int]]) -> None:
        own = self.ends[rank]
        others = {
            k: end.address for k, end in enumerate(self.ends) if k != rank and own.host == end.host != ""
        }
        for _ in range(2):  # the second time changes nothing
            own.open(directions, others)

    def joined(self) -> set[tuple[int, int]]:
        """The directions whose both ends go through shared memory."""
        link = link_of(torch.zeros(1))
        sends = {(a, b) for a, b in DIRECTIONS if self.ends[a].sender(at(a, b, link), 0, nullcontext())}
        receives = {(a, b) for a, b in DIRECTIONS if self.ends[b].receiver(at(b, a, link), 0, nullcontext())}
        assert sends == receives
        return sends


def at(rank: int, peer: int, link: Link, slot: int = 0) -> Instruction:
    """What a rank sends or receives: which of both decides nothing here."""
    return Instruction(Op.SEND, rank, 0, link, peer, slot)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Rank 0, which sends to rank 1, and that one."""
    sending, receiving = Ranks(2, {(0, 1)}).ends
    yield sending, receiving
    sending.close()
    receiving.close()


class Side:
    """The instructions of a link at both ends of a direction, with some buffer slots."""

    def __init__(self, pair: Sequence[SharedMemory], link: Link, tag: int = 3, num_slots: int = 2) -> None:
        sender = pair[0].sender(at(0, 1, link), tag, nullcontext())
        found = [pair[1].receiver(at(1, 0, link, slot), tag, nullcontext()) for slot in range(num_slots)]
        assert sender
        self.send, self.receivers = sender, [receiver for receiver in found if receiver]


def memory_of(ends: Sequence[SharedMemory]) -> list[int]:
    """The bytes of the slots that either end knows."""
    free = [slot for queue in ends[0]._outgoing[1]._tag_queues.values() for slot in queue.free]
    sender = [*free, *ends[0]._outgoing[1]._in_use.values()]
    receiver = [*ends[1]._incoming[0]._slots.values()]
    assert {slot.number for slot in sender} >= {slot.number for slot in receiver} - {-1}
    return sorted(len(slot.memory) for slot in sender)


def test_values_arrive_as_they_were_sent_and_stay_while_they_are_held(
    pair: Pair,
) -> None:
    """Small and large ones, what has no elements, and marks and strides of torch's."""
    number = torch.tensor([1 + 2j, 3 - 1j]).conj()
    tensors = [torch.arange(10).view(2, 5).to(dtype) for dtype in DTYPES]
    tensors += [torch.randn(2, 9000), number, number.imag, torch.randn(3, 2).t(), torch.ones(2, 0)]
    side, kept = Side(pair, link_of(*tensors)), list[tuple[Sequence[Tensor], int]]()
    for turn in range(9):
        receiver = side.receivers[turn % 2]
        receiver.post({"b": 2})
        side.send([tensor + turn if tensor.dtype != torch.bool else tensor for tensor in tensors], {"b": 2})
        kept = [*kept[-1:], (receiver.wait(), turn)]
        for values, number_of in kept[-2:]:
            for value, tensor in zip(values, tensors, strict=True):
                wanted = tensor if tensor.dtype == torch.bool else tensor + number_of
                torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    assert len(memory_of(pair)) <= 4, "two in transit, and two that are copied"


def test_tags_do_not_wait_for_each_other_and_each_keeps_its_order(
    pair: Pair,
) -> None:
    one, other = (Side(pair, link_of(torch.zeros(1, 3)), tag, 3) for tag in (1, 2))
    for turn in range(2):
        for side, sign in ((one, 1.0), (other, -1.0)):
            side.send([torch.full((1, 3), sign * (turn + 1))], {"b": 1})
    found = []
    for turn in range(2):
        for side in (other, one):
            side.receivers[turn].post({"b": 1})
            found += [value[0, 0].item() for value in side.receivers[turn].wait()]
    assert found == [-1, 1, -2, 2]


def test_a_sender_waits_until_the_last_but_one_is_posted(pair: Pair) -> None:
    side = Side(pair, link_of(torch.zeros(1, 3)), num_slots=3)
    for _ in range(2):
        side.send([torch.zeros(1, 3)], {"b": 1})
    threading.Timer(0.1, lambda: side.receivers[0].post({"b": 1})).start()
    start = time.monotonic()
    side.send([torch.zeros(1, 3)], {"b": 1})
    assert time.monotonic() - start > 0.05
    threading.Timer(0.1, pair[1].close).start()
    with pytest.raises(ConnectionError):
        side.send([torch.zeros(1, 3)], {"b": 1})


def test_sizes_change_from_step_to_step_and_memory_does_not_pile_up(
    pair: Pair,
) -> None:
    side = Side(pair, link_of(torch.zeros(1, 8)), num_slots=1)
    for rows in (1, 5, 2, 7, 5, 9, 0, 1):
        side.receivers[0].post({"b": rows})
        side.send([torch.full((rows, 8), float(rows))], {"b": rows})
        (value,) = side.receivers[0].wait()
        assert value.shape == (rows, 8)
        assert (value == rows).all()
    assert len(memory_of(pair)) <= 3
    assert memory_of(pair)[-1] == 320, "9 rows, in whole cache lines"


def test_a_value_that_is_not_the_one_of_the_plan_is_not_sent(pair: Pair) -> None:
    side = Side(pair, link_of(torch.ones(2, 3)))
    with pytest.raises(ExecutionError, match=r"x0 is a tensor of torch\.float64"):
        side.send([torch.ones(2, 3, dtype=torch.float64)], {"b": 2})
    side.receivers[0].post({"b": 20})
    side.send([torch.ones(2, 3)], {"b": 2})
    with pytest.raises(TransportError, match="a message of 64 bytes, but the plan expects 256"):
        side.receivers[0].wait()


def test_a_wait_ends_when_the_other_end_closes(pair: Pair) -> None:
    side = Side(pair, link_of(torch.ones(2, 3)))
    side.receivers[0].post({"b": 2})
    threading.Timer(0.1, pair[1].close).start()
    with pytest.raises(ConnectionError):
        side.receivers[0].wait()
    with pytest.raises(ConnectionError):
        side.send([torch.ones(2, 3)], {"b": 2})


def test_a_forked_process_does_not_keep_a_socket_open(pair: Pair) -> None:
    side = Side(pair, link_of(torch.ones(2, 3)))
    side.receivers[0].post({"b": 2})
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.read(reading, 1)
        os._exit(0)
    try:
        pair[0]._outgoing[1].socket._connection.close()  # as the kernel does when this process dies
        with pytest.raises(ConnectionError):
            side.receivers[0].wait()
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_ranks_that_cannot_share_memory_are_left_to_other_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Ranks(3, DIRECTIONS).joined() == DIRECTIONS
    hosts = iter(["one", "one", "two"])
    monkeypatch.setattr(shared_memory, "_host", lambda: next(hosts))
    assert Ranks(3, DIRECTIONS).joined() == {(0, 1), (1, 0)}
    monkeypatch.setattr(shared_memory, "_host", lambda: "")
    assert Ranks(3, DIRECTIONS).joined() == set()


def test_strangers_of_the_host_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one does not know the secret, one says too little."""
    monkeypatch.setattr(shared_memory, "_HANDSHAKE_SECONDS", 0.05)
    sending, receiving = SharedMemory(0, 2), SharedMemory(1, 2)
    strangers = []
    for hello in (None, shared_memory._HELLO.pack(0, bytes(32)), b"x"):
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        strangers[-1].connect(receiving._name)
        if hello:
            strangers[-1].send(hello)
    with ThreadPoolExecutor(2) as ranks:
        opened = [
            ranks.submit(own.open, {(0, 1)}, {other: end.address})
            for own, other, end in ((sending, 1, receiving), (receiving, 0, sending))
        ]
        for each in opened:
            each.result()
    side = Side((sending, receiving), link_of(torch.ones(2, 3)))
    side.receivers[0].post({"b": 2})
    side.send([torch.ones(2, 3)], {"b": 2})
    assert side.receivers[0].wait()[0].sum() == 6


def test_what_lives_longer_than_its_microbatch_goes_another_way(
    pair: Pair,
) -> None:
    for payload in Payload:
        link = link_of(torch.zeros(1), payload=payload)
        assert bool(pair[0].sender(at(0, 1, link), 0, nullcontext())) == payload.feeds_compute
        assert bool(pair[1].receiver(at(1, 0, link), 0, nullcontext())) == payload.feeds_compute


def test_no_file_of_a_message_stays_open() -> None:
    def use() -> None:
        side = Side(Ranks(2, {(0, 1)}).ends, link_of(torch.ones(2, 3)))
        for _ in range(3):
            side.receivers[0].post({"b": 2})
            side.send([torch.ones(2, 3)], {"b": 2})
            side.receivers[0].wait()

    use()
    before = len(os.listdir("/proc/self/fd"))
    use()
    assert len(os.listdir("/proc/self/fd")) == before
