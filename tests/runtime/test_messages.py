"""How the values of a link travel: what is sent and refused, and memory that two processes share."""

import functools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from pipec.errors import ExecutionError, TransportError
from pipec.ir import Link, Payload, Value
from pipec.runtime.messages import shared_memory
from pipec.runtime.messages.distributed_transport import LinkValues, as_in_memory
from pipec.runtime.messages.shared_memory import SharedMemory, hosts

DTYPES = (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.int64)
Pair = tuple[SharedMemory, SharedMemory]


# what is sent, and what is refused


def link_of(*tensors: Tensor) -> Link:
    """A link for values like these, of which each has ``b`` rows if it has dimensions."""
    values = (
        Value(f"x{i}", str(tensor.dtype).removeprefix("torch."), ("b", *tensor.shape[1:])[: tensor.ndim])
        for i, tensor in enumerate(tensors)
    )
    return Link(0, 1, Payload.ACTIVATION, tuple(values))


def test_a_receiver_has_memory_for_each_value() -> None:
    tensors = [torch.ones(3, 5, dtype=dtype) for dtype in DTYPES] + [torch.tensor(2.5), torch.ones(3, 0)]
    made = LinkValues(link_of(*tensors)).empty({"b": 3}, torch.device("cpu"))
    assert [(x.dtype, x.shape) for x in made] == [(x.dtype, x.shape) for x in tensors]


def test_what_is_sent_is_what_stands_in_memory() -> None:
    """torch conjugates and negates by a mark on the tensor, and transposes by strides."""
    number = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for tensor in (number, number.imag, torch.randn(3, 2).t(), torch.ones(2, 0)):
        sent = as_in_memory(tensor)
        assert sent.is_contiguous()
        assert (sent.is_conj(), sent.is_neg()) == (False, False)
        torch.testing.assert_close(sent, tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2), torch.ones(1, 3)]
)
def test_a_value_that_is_not_the_one_of_the_plan_is_not_sent(wrong: Tensor) -> None:
    """gloo would put its bytes into the memory that was made for another one."""
    right = torch.ones(2, 3)
    for tensors, link in (([right, wrong], link_of(right, right)), ([wrong], link_of(right))):
        with pytest.raises(ExecutionError, match=r"x0.*: x\d is a tensor of torch\.float.* fake"):
            LinkValues(link).check(tensors, {"b": 2})


# memory that two processes share: here both ends are in one process, on threads


def connected(num_ranks: int) -> list[SharedMemory]:
    """Ranks that know each other's addresses, as after their first exchange of texts."""
    ends = [SharedMemory(rank) for rank in range(num_ranks)]
    addresses = [end.address for end in ends]
    with ThreadPoolExecutor(num_ranks) as ranks:
        list(ranks.map(lambda end: end.connect(addresses), ends))
    return ends


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Rank 0, which sends to rank 1, and that one."""
    sending, receiving = connected(2)
    yield sending, receiving
    sending.close()
    receiving.close()


def receive(pair: Pair, *shape: int, tag: int = 3) -> tuple[Tensor, shared_memory.Receive]:
    made = torch.empty(shape)
    return made, pair[1].receive([made], 0, tag)


def exchanged(pair: Sequence[SharedMemory], *sent: Tensor) -> list[Tensor]:
    """What rank 1 receives of a message of these."""
    received = [torch.empty_like(each) for each in sent]
    work = pair[1].receive(received, 0, 3)
    pair[0].send(sent, 1, 3)
    work.wait()
    return received


def memory_of(pair: Pair) -> int:
    """The bytes of memory that the file from rank 0 to rank 1 takes."""
    return os.fstat(pair[0]._outgoing[1]._file).st_blocks * 512


PAGE = os.sysconf("SC_PAGESIZE")


def test_values_arrive_as_they_were_sent_and_stay_while_they_are_held(pair: Pair) -> None:
    tensors = [torch.arange(10).view(2, 5).to(dtype) for dtype in DTYPES]
    tensors += [torch.randn(2, 9000), torch.tensor(2.5)]
    kept = list[tuple[list[Tensor], int]]()
    for turn in range(9):
        values = exchanged(pair, *(x + turn if x.dtype != torch.bool else x for x in tensors))
        kept = [*kept[-1:], (values, turn)]
        for found, number in kept[-2:]:
            for value, tensor in zip(found, tensors, strict=True):
                wanted = tensor if tensor.dtype == torch.bool else tensor + number
                torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    pages = -(-sum(tensor.nbytes for tensor in tensors) // PAGE)
    assert memory_of(pair) <= 3 * pages * PAGE, "two in transit, and one that is read"


def test_tags_do_not_wait_for_each_other_and_each_keeps_its_order(pair: Pair) -> None:
    """The k-th message is for the k-th receive, whichever is awaited first."""
    sent = [(tag, (1.0, -1.0)[tag] * turn) for turn in (1, 2) for tag in (0, 1)]
    posted = [receive(pair, 3, tag=tag) for tag, _ in sent]
    for tag, number in sent:
        pair[0].send([torch.full((3,), number)], 1, tag)
    for _, work in reversed(posted):
        work.wait()
    assert [value[0].item() for value, _ in posted] == [number for _, number in sent]
    for tag, number in sent:
        pair[0].send([torch.full((3,), number)], 1, tag)
    for tag, number in sorted(sent, key=lambda each: -each[0]):
        value, work = receive(pair, 3, tag=tag)
        work.wait()
        assert value[0] == number


def test_a_sender_waits_until_the_last_but_one_is_posted(pair: Pair) -> None:
    for _ in range(2):
        pair[0].send([torch.zeros(1, 3), torch.zeros(2)], 1, 3)
    posted = list[bool]()

    def post() -> None:
        posted.append(True)
        pair[1].receive([torch.empty(1, 3), torch.empty(2)], 0, 3)

    threading.Timer(0.1, post).start()
    pair[0].send([torch.zeros(1, 3), torch.zeros(2)], 1, 3)
    assert posted
    threading.Timer(0.1, pair[1].close).start()
    with pytest.raises(ConnectionError):
        pair[0].send([torch.zeros(1, 3)], 1, 3)


def test_sizes_change_from_step_to_step_and_memory_does_not_pile_up(pair: Pair) -> None:
    for rows in (1, 5, 2, 7, 5, 9, 1):
        (value,) = exchanged(pair, torch.full((rows, 8), float(rows)))
        assert (value == rows).all()
    assert memory_of(pair) <= 3 * PAGE


def test_values_are_whole_where_the_system_transfers_a_few_bytes_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(call: Callable[..., int], file: int, parts: list[Any], place: int) -> int:
        return call(file, [memoryview(parts[0]).cast("B")[:7]], place)

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(shared_memory.os, name, functools.partial(little, getattr(os, name)))
    sent = [torch.arange(5), torch.arange(3.0)]
    torch.testing.assert_close(exchanged(pair, *sent), sent, rtol=0, atol=0)


def test_a_message_of_another_size_is_refused(pair: Pair) -> None:
    pair[0].send([torch.ones(2, 3)], 1, 3)
    with pytest.raises(TransportError, match="received 24 bytes, but the plan expects 240"):
        receive(pair, 20, 3)[1].wait()


def test_memory_that_cannot_be_had_is_an_error_with_a_remedy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "pwritev", refuse)
    with pytest.raises(TransportError, match=r"cannot get 24 bytes of memory to share .* No space left"):
        pair[0].send([torch.ones(2, 3)], 1, 3)


def test_a_wait_ends_when_the_other_end_closes(pair: Pair) -> None:
    _, work = receive(pair, 2, 3)
    threading.Timer(0.1, pair[1].close).start()
    with pytest.raises(ConnectionError):
        work.wait()
    with pytest.raises(ConnectionError):
        pair[0].send([torch.ones(2, 3)], 1, 3)


def test_a_forked_process_does_not_keep_a_socket_open(pair: Pair) -> None:
    _, work = receive(pair, 2, 3)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.read(reading, 1)
        os._exit(0)
    try:
        pair[0]._outgoing[1].socket.close()  # as the kernel does when this process dies
        with pytest.raises(ConnectionError):
            work.wait()
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_ranks_that_cannot_share_memory_are_left_to_other_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [sorted(end.peers) for end in connected(3)] == [[1, 2], [0, 2], [0, 1]]
    names = iter(["one", "one", "two"])
    monkeypatch.setattr(shared_memory, "_host", lambda: next(names))
    found = connected(3)
    assert [sorted(end.peers) for end in found] == [[1], [0], []]
    assert hosts([end.address for end in found]) == [0, 0, 2]
    monkeypatch.setattr(shared_memory, "_host", lambda: "")
    assert [sorted(end.peers) for end in connected(3)] == [[], [], []]


def test_strangers_of_the_host_are_not_let_in() -> None:
    """A process that is no rank connects first, and says nothing or that it is rank 1."""
    ends = [SharedMemory(0), SharedMemory(1)]
    children = []
    for said in (b"", (1).to_bytes(8, "little")):
        if not (child := os.fork()):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(json.loads(ends[0].address)[2])
            stranger.send(said)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda end: end.connect([each.address for each in ends]), ends))
    assert exchanged(ends, torch.ones(2))[0].tolist() == [1, 1]


def test_no_file_of_a_message_stays_open() -> None:
    def use() -> None:
        pair = connected(2)
        for _ in range(3):
            exchanged(pair, torch.ones(2, 3))

    use()
    before = len(os.listdir("/proc/self/fd"))
    use()
    assert len(os.listdir("/proc/self/fd")) == before
