"""How the values of a link travel: which go together, and that they arrive as they were sent."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Instruction, Link, Op, Payload, Value
from pipec.runtime.messages.buffers import Memory, buffers_for, values_in
from pipec.runtime.messages.connections import MOST_UNDER_WAY
from pipec.runtime.messages.outbox import Outbox
from pipec.runtime.messages.parcels import MOST_TOGETHER, Parcels, parcels
from pipec.runtime.processes.waits import NO_WAIT, Wait, Waiting, Waits

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.int64)


def link_of(*tensors: Tensor, payload: Payload = Payload.ACTIVATION) -> Link:
    """A link for values like these, of which each has ``b`` rows if it has dimensions."""
    values = (
        Value(f"x{i}", str(tensor.dtype).removeprefix("torch."), ("b", *tensor.shape[1:])[: tensor.ndim])
        for i, tensor in enumerate(tensors)
    )
    return Link(0, 1, payload, tuple(values))


def sent(link: Link, tensors: Sequence[Tensor], rows: int) -> list[list[int]]:
    """Send the values into the memory of a receiver, and compare; returns which of them were together."""
    sizes = {"b": rows}
    messages = iter(Outbox(link, CPU).messages(tensors, sizes))
    buffers = buffers_for(Instruction(Op.RECV, 1, 0, link, 0, 0), CPU)
    posted = [
        (each, buffer.memory(each.num_bytes))
        for each, buffer in zip(parcels(link, sizes), buffers, strict=False)
    ]
    for parcel, memory in posted:
        if parcel.num_bytes:
            message, into = next(messages), memory.message(parcel)
            assert message.is_contiguous(), "nor does a message carry strides"
            assert [message.dtype, message.nbytes] == [into.dtype, into.nbytes]
            assert (message.is_conj(), message.is_neg()) == (False, False), "no message carries such a mark"
            into.copy_(message.view(-1))
    assert list(messages) == []
    for received, tensor in zip(values_in(posted), tensors, strict=True):
        torch.testing.assert_close(received, tensor, rtol=0, atol=0)
    return [[place.number for place in parcel.places] for parcel, _ in posted]


def test_small_values_travel_together_and_large_ones_as_they_are() -> None:
    small = [torch.arange(3 * 5).view(3, 5).to(dtype) for dtype in DTYPES]
    large = torch.randn(3, MOST_TOGETHER // 8)
    tensors = [small[0], large, *small[1:], torch.tensor(2.5), torch.ones(3, 0)]
    link = link_of(*tensors)
    assert sent(link, tensors, 3) == [[0, 2, 3, 4, 5, 6, 7, 8], [1]]
    first = parcels(link, {"b": 3})[0]
    starts = [place.start * place.dtype.itemsize for place in first.places]
    assert all(start % 16 == 0 for start in starts)
    assert all(
        start + place.num_bytes <= following
        for start, place, following in zip(starts, first.places, [*starts[1:], first.num_bytes], strict=True)
    ), "no two values share a byte"


def test_one_value_and_what_lives_longer_than_its_message_travel_alone() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2)]
    assert sent(link_of(tensors[0]), tensors[:1], 2) == [[0]]
    for payload in (Payload.RESULT, Payload.OUTCOME, Payload.WEIGHT, Payload.WEIGHT_GRADIENT):
        assert sent(link_of(*tensors, payload=payload), tensors, 2) == [[0], [1]]


def test_values_without_elements_are_not_sent() -> None:
    tensors = [torch.ones(0, 3), torch.ones(0)]
    assert Outbox(link_of(*tensors), CPU).messages(tensors, {"b": 0}) == []
    sent(link_of(*tensors), tensors, 0)


def test_what_is_sent_is_what_stands_in_memory() -> None:
    """torch conjugates and negates by a mark on the tensor, and transposes by strides."""
    number = torch.tensor([1 + 2j, 3 - 1j]).conj()
    sent(link_of(number), [number], 2)
    sent(link_of(number.imag), [number.imag], 2)
    transposed = torch.randn(3, 2).t()
    sent(link_of(number, number.imag, transposed), [number, number.imag, transposed], 2)
    sent(link_of(transposed), [transposed], 2)


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2), torch.ones(1, 3)]
)
def test_a_value_that_is_not_the_one_of_the_plan_is_not_sent(wrong: Tensor) -> None:
    """gloo would put its bytes into the memory that was made for another one."""
    right = torch.ones(2, 3)
    for tensors, link in (([right, wrong], link_of(right, right)), ([wrong], link_of(right))):
        with pytest.raises(ExecutionError, match=r"x0.*: x\d is a tensor of torch\.float.* fake"):
            Outbox(link, CPU).messages(tensors, {"b": 2})


def test_a_message_keeps_its_values_while_it_is_under_way() -> None:
    """So many that follow are packed before one is known to have left."""
    tensors = [torch.zeros(2, 3), torch.zeros(2)]
    outbox, under_way = Outbox(link_of(*tensors), CPU), list[Tensor]()
    for number in range(1, 9):
        (message,) = outbox.messages([tensor + number for tensor in tensors], {"b": 2})
        under_way.append(message)
        for back, each in enumerate(reversed(under_way[-1 - MOST_UNDER_WAY :])):
            assert (each.view(torch.float32)[:6] == number - back).all()
    assert len({message.data_ptr() for message in under_way}) == MOST_UNDER_WAY + 1


def test_memory_is_free_when_nobody_holds_a_value_of_it() -> None:
    link = link_of(torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    memory = Memory(torch.empty(64, dtype=torch.uint8))
    for rows in (2, 1, 2):
        (parcel,) = parcels(link, {"b": rows})
        assert memory.is_free
        memory.message(parcel)
        values = memory.values(parcel)
        assert not memory.is_free
        view, _ = values.pop()[:1], values.pop()
        del _
        assert not memory.is_free
        del view
    assert memory.is_free


def test_parcels_follow_the_sizes_and_those_of_the_last_few_stay() -> None:
    found, sizes = Parcels(link_of(torch.ones(2, 3))), [{"b": rows} for rows in (2, 3)]
    first = [found.of(each) for each in sizes]
    assert [parcels[0].places[0].shape for parcels in first] == [(2, 3), (3, 3)]
    assert all(found.of(each) is parcels for each, parcels in zip(sizes, first, strict=True))
    assert [found.of({"b": rows})[0].places[0].shape for rows in range(9)] == [(b, 3) for b in range(9)]


def test_each_time_that_a_rank_waits_is_a_wait_of_its_own() -> None:
    """Or waits for the same message, step after step, would be told on the console as one that lasts."""
    waits = Waits()
    waiting = Waiting(waits, "receiving x from rank 1", 1, False)
    found = []
    for _ in range(2):
        with waiting:
            found.append(waits.now)
        assert (waits.now, waits.did) == (NO_WAIT, "receiving x from rank 1")
    assert found[0] is not found[1]
    assert found[0] == found[1] == Wait("receiving x from rank 1", 1)
