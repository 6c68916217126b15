"""Messages through memory that two processes share: here both ends are in one process, on threads."""

import json
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
from pipec.runtime.messages import host_sockets
from pipec.runtime.messages.shared_memory import SharedMemory
from tests.runtime.test_messages import DTYPES, link_of

Pair = tuple[SharedMemory, SharedMemory]

DIRECTIONS = {(0, 1), (1, 0), (1, 2), (2, 1)}


class Ranks:
    """Ranks that exchange texts; ``open`` lets all of them find out with whom they share memory."""

    def __init__(self, num_ranks: int, directions: set[tuple[int, int]]) -> None:
        self._met, self._texts = threading.Barrier(num_ranks), [""] * num_ranks
        self.ends = [SharedMemory(rank) for rank in range(num_ranks)]
        with ThreadPoolExecutor(num_ranks) as ranks:
            list(ranks.map(lambda rank: self._open(rank, directions), range(num_ranks)))

    def _open(self, rank: int, directions: set[tuple[int, int]]) -> None:
        for _ in range(2):  # the second time changes nothing
            self.ends[rank].open(directions, lambda text: self._gather(rank, text))

    def _gather(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._met.wait(10)
        texts = list(self._texts)
        self._met.wait(10)
        return texts

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
    outgoing = [each for end in ends for each in end._outgoing.values()]
    free = [slot for each in outgoing for queue in each._tag_queues.values() for slot in queue.free]
    held = [slot for end in ends for each in end._incoming.values() for slot in each._holding.values()]
    return sorted(slot.memory.whole.numel() for slot in (*free, *held))


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
    del values, value
    assert len(memory_of(pair)) <= 4, "two slots, and two under way"


def test_memory_that_somebody_holds_is_not_written_again(pair: Pair) -> None:
    side, held = Side(pair, link_of(torch.zeros(2, 3)), num_slots=1), []
    for turn in range(6):
        side.receivers[0].post({"b": 2})
        side.send([torch.full((2, 3), float(turn))], {"b": 2})
        (value,) = side.receivers[0].wait()
        held.append(value[:1])
    assert [view[0, 0].item() for view in held] == [0, 1, 2, 3, 4, 5]


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
        del value
    assert len(memory_of(pair)) <= 3
    assert memory_of(pair)[-1] == 9 * 8 * 4


def test_a_value_that_is_not_the_one_of_the_plan_is_not_sent(pair: Pair) -> None:
    side = Side(pair, link_of(torch.ones(2, 3)))
    with pytest.raises(ExecutionError, match=r"x0 is a tensor of torch\.float64"):
        side.send([torch.ones(2, 3, dtype=torch.float64)], {"b": 2})
    side.receivers[0].post({"b": 3})
    side.send([torch.ones(2, 3)], {"b": 2})
    with pytest.raises(TransportError, match="a message of 24 bytes, but the plan expects 36"):
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
    """Each pair for itself: one without files in memory, one at whose name nobody listens, one that lies."""
    assert Ranks(3, DIRECTIONS).joined() == DIRECTIONS
    reach = host_sockets._reach

    def elsewhere(address: str, rank: int) -> socket.socket | None:
        name, secret = json.loads(address)
        return reach(json.dumps([name + "0" * (rank == 2), secret]), rank)

    def lying(address: str, rank: int) -> socket.socket | None:
        name, secret = json.loads(address)
        return reach(json.dumps([name, "00" * 32 if rank == 0 else secret]), rank)

    for broken, left in ((elsewhere, {(2, 1)}), (lying, {(0, 1)})):
        monkeypatch.setattr(host_sockets, "_reach", broken)
        assert Ranks(3, DIRECTIONS).joined() == DIRECTIONS - left
    monkeypatch.setattr(host_sockets, "_reach", reach)
    monkeypatch.setattr(host_sockets, "_is_possible", lambda: False)
    assert Ranks(3, DIRECTIONS).joined() == set()


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
