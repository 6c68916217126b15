"""The digests by which ranks compare tensors."""

import pytest
import torch
from torch import Tensor, nn

from pipec.runtime.messages.call_description import describe_leaf, values_digest

TENSORS = {
    "text": torch.arange(24).view(2, 3, 4),
    "half": torch.arange(8).to(torch.bfloat16),
    "one": torch.tensor(3.0),
    "large": torch.arange(20_000.0),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "every second": torch.arange(9)[::2],
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_digest_is_of_values_however_they_are_read(tensor: Tensor) -> None:
    other = nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
    assert values_digest(other) == values_digest(tensor)
    other.detach().view(-1)[-1] += 1
    assert describe_leaf(other) != describe_leaf(tensor)
    if tensor.is_complex():
        assert values_digest(tensor.conj()) != values_digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_a_digest_sees_every_element_and_no_layout_of_the_storage(dtype: torch.dtype) -> None:
    count = 80_003
    values = (torch.arange(count) % 2).to(dtype)
    expected = values_digest(values)
    shifted = torch.zeros(count + 3, dtype=dtype)[3:]
    assert values_digest(shifted.copy_(values)) == expected
    for position in (1, 40_001, count - 2):  # and in the bytes behind the last row
        changed = values.clone()
        changed[position] = 0
        assert values_digest(changed) != expected


def test_a_digest_of_a_large_batch_sees_rows_that_change_places_and_signs() -> None:
    tokens = torch.randint(50_000, (64, 1024), generator=torch.Generator().manual_seed(1))
    one_hot = nn.functional.one_hot(tokens[:, 0] % 1000, 2048)
    numbers = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [
        (tokens, tokens[torch.arange(64).roll(8)]),
        (one_hot, one_hot[[1, 0, *range(2, 64)]]),
        (tokens, tokens[:, [1, 0, *range(2, 1024)]]),
        (numbers, -numbers),  # changes the highest bit of each word of 8 bytes
    ]
    for first, second in pairs:
        assert values_digest(first) != values_digest(second.contiguous())
