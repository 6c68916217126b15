"""How parameters are divided among replicas: every element has one owner, whatever the sizes."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipec.ir import ParameterShard, Sharding
from pipec.ir.sharding import ALIGNMENT, shard_evenly, shard_whole_tensors

Build = Callable[[Mapping[str, int], int], Sharding]

sizes = st.lists(st.integers(0, 500), max_size=12).map(lambda each: {f"p{i}": n for i, n in enumerate(each)})
builds = pytest.mark.parametrize("build", [shard_evenly, shard_whole_tensors])


@builds
@given(sizes=sizes, num_replicas=st.integers(1, 7))
def test_every_element_is_owned_once(build: Build, sizes: dict[str, int], num_replicas: int) -> None:
    sharding = build(sizes, num_replicas)
    pieces = [sharding.shards_of(replica) for replica in range(num_replicas)]
    owned = Counter((p.name, element) for own in pieces for p in own for element in range(p.start, p.stop))
    assert owned == Counter((name, element) for name, size in sizes.items() for element in range(size))
    assert all(len(sharding.owners(name)) == 1 for name, size in sizes.items() if size == 0)
    assert all(len({p.name for p in own}) == len(own) for own in pieces)
    assert {(replica, piece) for replica, own in enumerate(pieces) for piece in own} == {
        (replica, piece) for name in sizes for replica, piece in sharding.owners(name).items()
    }


@builds
@given(sizes=sizes, num_replicas=st.integers(1, 7))
def test_pieces_lie_apart_in_their_owners_slice(
    build: Build, sizes: dict[str, int], num_replicas: int
) -> None:
    sharding = build(sizes, num_replicas)
    assert sharding.width % ALIGNMENT == 0
    for replica in range(num_replicas):
        end = replica * sharding.width
        for piece in sharding.shards_of(replica):
            begin = sharding.position(piece)
            assert begin >= end
            assert begin % ALIGNMENT == piece.start % ALIGNMENT == 0
            end = begin + piece.size
        assert end <= (replica + 1) * sharding.width


def test_a_small_example() -> None:
    sharding = shard_evenly({"weight": 100, "bias": 3}, 2)
    assert sharding.shards_of(0) == (ParameterShard("weight", 0, 100),)
    assert sharding.shards_of(1) == (ParameterShard("bias", 0, 3),)
    assert sharding.position(ParameterShard("bias", 0, 3)) == sharding.width == 128
    assert shard_whole_tensors({"a": 100, "b": 300, "c": 200}, 2).offsets == (0, 384, 640)


@given(sizes=sizes, num_replicas=st.integers(1, 7))
def test_whole_tensors_are_not_cut_and_are_balanced(sizes: dict[str, int], num_replicas: int) -> None:
    sharding = shard_whole_tensors(sizes, num_replicas)
    assert all(len(sharding.owners(name)) == 1 for name in sizes)
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    padding = ALIGNMENT * len(sizes)
    assert sharding.width <= total / num_replicas + largest + padding
