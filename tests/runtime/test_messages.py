"""How the values of a link travel: what is sent, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Link, Payload, Value
from pipec.runtime.messages.distributed_transport import LinkValues, as_in_memory
from pipec.runtime.processes.judge import NOT_WAITING, WaitStatus
from pipec.runtime.processes.star import WaitScope

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.int64)


def link_of(*tensors: Tensor, payload: Payload = Payload.ACTIVATION) -> Link:
    """A link for values like these, of which each has ``b`` rows if it has dimensions."""
    values = (
        Value(f"x{i}", str(tensor.dtype).removeprefix("torch."), ("b", *tensor.shape[1:])[: tensor.ndim])
        for i, tensor in enumerate(tensors)
    )
    return Link(0, 1, payload, tuple(values))


def test_a_receiver_has_memory_for_each_value() -> None:
    tensors = [torch.ones(3, 5, dtype=dtype) for dtype in DTYPES] + [torch.tensor(2.5), torch.ones(3, 0)]
    made = LinkValues(link_of(*tensors)).empty({"b": 3}, CPU)
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


def test_shapes_follow_the_sizes() -> None:
    found = LinkValues(link_of(torch.ones(2, 3)))
    assert [found.shapes({"b": rows}) for rows in range(9)] == [[(rows, 3)] for rows in range(9)]


def test_each_time_that_a_rank_waits_is_a_wait_of_its_own() -> None:
    """Or waits for the same message, step after step, would be told on the console as one that lasts."""

    class Waits:
        wait_status, last_activity = NOT_WAITING, ""

    waits: Any = Waits()
    waiting = WaitScope(waits, "receiving x from rank 1", 1, False, False)
    found = []
    for _ in range(2):
        with waiting:
            found.append(waits.wait_status)
        assert (waits.wait_status, waits.last_activity) == (NOT_WAITING, "receiving x from rank 1")
    assert found[0] is not found[1]
    assert found[0] == found[1] == WaitStatus("receiving x from rank 1", 1)
