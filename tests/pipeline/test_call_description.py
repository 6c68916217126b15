"""The digests by which ranks compare tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.runtime.messages.call_description import describe_leaf, full_digest, sampled_digest

TENSORS = {
    "text": torch.arange(24).view(2, 3, 4),
    "half": torch.arange(8).to(torch.bfloat16),
    "one": torch.tensor(3.0),
    "none": torch.empty(0, 4),
    "large": torch.arange(20_000.0),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_digest_is_of_values_however_they_are_read(tensor: Tensor) -> None:
    """Memory of plain tensors is read without torch, that of others is not."""
    other = nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
    assert sampled_digest(other) == sampled_digest(tensor)


@pytest.mark.parametrize("name", ["text", "half", "one", "large"])
def test_one_value_that_differs_shows(name: str) -> None:
    tensor = TENSORS[name]
    other = tensor.clone()
    other.view(-1)[-1] += 1
    assert describe_leaf(other) != describe_leaf(tensor)


def test_what_is_marked_as_the_conjugate_is_read_as_such() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert sampled_digest(tensor.conj()) == sampled_digest(tensor.conj().resolve_conj())
    assert sampled_digest(tensor.conj()) != sampled_digest(tensor)


class _Sums(TorchDispatchMode):
    """Notes the types of what is summed, and how many elements that has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.default:
            self.found.append((args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def test_all_values_are_summed_in_words_of_8_bytes() -> None:
    """Words of 2 bytes are summed at a thirtieth of the rate: minutes for the parameters of a large model."""
    with _Sums() as sums:
        full_digest(torch.ones(2**18 + 3, dtype=torch.bfloat16))
    assert sums.found == [(torch.int64, 2**16), (torch.uint8, 6)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_a_full_digest_sees_every_element_and_no_layout_of_the_storage(dtype: torch.dtype) -> None:
    count = 80_003
    values = (torch.arange(count) % 2).to(dtype)
    expected = full_digest(values)
    shifted = torch.zeros(count + 3, dtype=dtype)[3:]
    assert full_digest(shifted.copy_(values)) == expected
    for position in (1, 40_001, count - 2):  # between samples, and in the bytes behind the last word
        changed = values.clone()
        changed[position] = 0
        assert full_digest(changed) != expected
