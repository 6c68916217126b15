"""The gradients of a bucket: consecutive ones, in up to eight groups."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pipec.ir import Value
from pipec.plan.buckets import LEAST_BYTES, MOST_BUCKETS, bucket_groups


def groups(sizes: Sequence[int]) -> list[list[str]]:
    """Gradients of so many times the least bytes of a bucket."""
    values = [Value(f"w{k}", "uint8", (size * LEAST_BYTES,)) for k, size in enumerate(sizes)]
    return [[value.name for value in group] for group in bucket_groups(values)]


def test_small_gradients_travel_with_large_ones() -> None:
    found = groups([40, 0, 0, 40, 0, 0, 40, 0, 0, 40])
    assert found == [["w0"], ["w1", "w2", "w3"], ["w4", "w5", "w6"], ["w7", "w8", "w9"]]


@given(st.lists(st.integers(0, 50), max_size=30))
def test_every_gradient_is_in_one_group_and_in_order(sizes: list[int]) -> None:
    found = groups(sizes)
    assert list(itertools.chain(*found)) == [f"w{k}" for k in range(len(sizes))]
    assert len(found) <= MOST_BUCKETS if sum(sizes) > 1 else len(found) <= 1
