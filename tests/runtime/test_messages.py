"""How the values of a link travel: which go together, and that they arrive as they were sent."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Instruction, Link, Op, Payload, Value
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.messages.message_buffers import MessageMemory, link_values, make_receive_buffers
from pipec.runtime.messages.message_layout import MAX_COALESCED_BYTES, MessageLayouts, message_layouts
from pipec.runtime.messages.message_packing import MessagePacker
from pipec.runtime.processes.stall_reports import NOT_WAITING, CurrentWait, WaitScope, WaitStatus

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
    messages = iter(MessagePacker(link, CPU).messages(tensors, sizes))
    buffers = make_receive_buffers(Instruction(Op.RECV, 1, 0, link, 0, 0), CPU)
    posted = [
        (each, buffer.memory(each.num_bytes))
        for each, buffer in zip(message_layouts(link, sizes), buffers, strict=False)
    ]
    for message_layout, memory in posted:
        if message_layout.num_bytes:
            message, into = next(messages), memory.message(message_layout)
            assert message.is_contiguous(), "nor does a message carry strides"
            assert [message.dtype, message.nbytes] == [into.dtype, into.nbytes]
            assert (message.is_conj(), message.is_neg()) == (False, False), "no message carries such a mark"
            into.copy_(message.view(-1))
    assert list(messages) == []
    for received, tensor in zip(link_values(posted), tensors, strict=True):
        torch.testing.assert_close(received, tensor, rtol=0, atol=0)
    return [[place.number for place in message_layout.values] for message_layout, _ in posted]


def test_small_values_travel_together_and_large_ones_as_they_are() -> None:
    small = [torch.arange(3 * 5).view(3, 5).to(dtype) for dtype in DTYPES]
    large = torch.randn(3, MAX_COALESCED_BYTES // 8)
    tensors = [small[0], large, *small[1:], torch.tensor(2.5), torch.ones(3, 0)]
    link = link_of(*tensors)
    assert sent(link, tensors, 3) == [[0, 2, 3, 4, 5, 6, 7, 8], [1]]
    first = message_layouts(link, {"b": 3})[0]
    starts = [place.start * place.dtype.itemsize for place in first.values]
    assert all(start % 16 == 0 for start in starts)
    assert all(
        start + place.num_bytes <= following
        for start, place, following in zip(starts, first.values, [*starts[1:], first.num_bytes], strict=True)
    ), "no two values share a byte"


def test_one_value_and_what_lives_longer_than_its_message_travel_alone() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2)]
    assert sent(link_of(tensors[0]), tensors[:1], 2) == [[0]]
    for payload in (Payload.RESULT, Payload.MICROBATCH_RESULT, Payload.WEIGHT, Payload.WEIGHT_GRADIENT):
        assert sent(link_of(*tensors, payload=payload), tensors, 2) == [[0], [1]]


def test_values_without_elements_are_not_sent() -> None:
    tensors = [torch.ones(0, 3), torch.ones(0)]
    assert MessagePacker(link_of(*tensors), CPU).messages(tensors, {"b": 0}) == []
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
            MessagePacker(link, CPU).messages(tensors, {"b": 2})


def test_a_message_keeps_its_values_while_it_is_under_way() -> None:
    """So many that follow are packed before one is known to have left."""
    tensors = [torch.zeros(2, 3), torch.zeros(2)]
    message_packer, in_transit = MessagePacker(link_of(*tensors), CPU), list[Tensor]()
    for number in range(1, 9):
        (message,) = message_packer.messages([tensor + number for tensor in tensors], {"b": 2})
        in_transit.append(message)
        for back, each in enumerate(reversed(in_transit[-1 - MAX_IN_TRANSIT :])):
            assert (each.view(torch.float32)[:6] == number - back).all()
    assert len({message.data_ptr() for message in in_transit}) == MAX_IN_TRANSIT + 1


def test_memory_is_free_when_nobody_holds_a_value_of_it() -> None:
    link = link_of(torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    memory = MessageMemory(torch.empty(64, dtype=torch.uint8))
    for rows in (2, 1, 2):
        (message_layout,) = message_layouts(link, {"b": rows})
        assert memory.is_free
        memory.message(message_layout)
        values = memory.values(message_layout)
        assert not memory.is_free
        view, _ = values.pop()[:1], values.pop()
        del _
        assert not memory.is_free
        del view
    assert memory.is_free


def test_parcels_follow_the_sizes_and_those_of_the_last_few_stay() -> None:
    found, sizes = MessageLayouts(link_of(torch.ones(2, 3))), [{"b": rows} for rows in (2, 3)]
    first = [found.of(each) for each in sizes]
    assert [message_layouts[0].values[0].shape for message_layouts in first] == [(2, 3), (3, 3)]
    assert all(found.of(each) is message_layouts for each, message_layouts in zip(sizes, first, strict=True))
    assert [found.of({"b": rows})[0].values[0].shape for rows in range(9)] == [(b, 3) for b in range(9)]


def test_each_time_that_a_rank_waits_is_a_wait_of_its_own() -> None:
    """Or waits for the same message, step after step, would be told on the console as one that lasts."""
    waits = CurrentWait()
    waiting = WaitScope(waits, "receiving x from rank 1", 1, False, False)
    found = []
    for _ in range(2):
        with waiting:
            found.append(waits.now)
        assert (waits.now, waits.last_activity) == (NOT_WAITING, "receiving x from rank 1")
    assert found[0] is not found[1]
    assert found[0] == found[1] == WaitStatus("receiving x from rank 1", 1)
