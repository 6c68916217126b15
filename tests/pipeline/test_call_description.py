"""The digests by which ranks compare tensors."""

import pytest
import torch
from torch import Tensor, nn

from pipec.runtime.messages.call_description import describe_leaf, sampled_digest

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
