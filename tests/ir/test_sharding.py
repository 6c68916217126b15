"""How parameters are divided among replicas: every element has one owner, whatever the sizes."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_optimizers import EVERY, Plain, gradients, model
from torch import Tensor

from pipec.ir import ParameterShard, Sharding
from pipec.ir.sharding import ALIGNMENT, shard_evenly, shard_whole_tensors
from pipec.runtime.optimizers import PipelineOptimizer

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


@builds
@given(sizes=sizes, num_replicas=st.integers(1, 7))
def test_both_ways_say_the_same(build: Build, sizes: dict[str, int], num_replicas: int) -> None:
    sharding = build(sizes, num_replicas)
    by_replica = {
        (replica, piece) for replica in range(num_replicas) for piece in sharding.shards_of(replica)
    }
    by_name = {(replica, piece) for name in sizes for replica, piece in sharding.owners(name).items()}
    assert by_replica == by_name


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


def flat(tensors: Mapping[str, Tensor], sharding: Sharding) -> Tensor:
    """The buffer that ``sharding`` describes, with these tensors in it."""
    buffer = torch.zeros(sharding.num_replicas * sharding.width)
    for name, size, offset in zip(sharding.names, sharding.sizes, sharding.offsets, strict=True):
        buffer[offset : offset + size] = tensors[name].view(-1)
    return buffer


def owned(own: Tensor, sharding: Sharding, replica: int) -> dict[ParameterShard, Tensor]:
    """The pieces in the slice that a replica has of the buffer."""
    first = replica * sharding.width
    begins = {piece: sharding.position(piece) - first for piece in sharding.shards_of(replica)}
    return {piece: own[begin : begin + piece.size] for piece, begin in begins.items()}


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_reduce_scatter_updates_and_an_all_gather_make_a_step(name: str) -> None:
    """Three replicas with parameters, gradients and state all in slices, as at the third level of ZeRO."""
    plain, build = Plain(EVERY[name]), shard_evenly if name == "AdamW" else shard_whole_tensors
    sharding = build({name: each.numel() for name, each in plain.parameters.items()}, 3)
    optimizer = PipelineOptimizer(EVERY[name], model())
    slices = flat({name: each.detach() for name, each in model().items()}, sharding).chunk(3)
    replicas = [optimizer.for_stage(owned(own, sharding, replica)) for replica, own in enumerate(slices)]
    for step in range(5):
        drawn = [gradients(3 * step + replica, plain.parameters) for replica in range(3)]
        scattered = sum(flat(each, sharding) for each in drawn).chunk(3)  # type: ignore[union-attr]
        for replica, stage in enumerate(replicas):
            pieces = owned(scattered[replica], sharding, replica)
            stage.update({piece.name: gradient for piece, gradient in pieces.items()})
        for name, parameter in plain.parameters.items():
            parameter.grad = drawn[0][name] + drawn[1][name] + drawn[2][name]
        plain.optimizers[0].step()
    gathered = torch.cat(slices)
    for name, size, offset in zip(sharding.names, sharding.sizes, sharding.offsets, strict=True):
        assert torch.equal(gathered[offset : offset + size], plain.parameters[name].view(-1)), name


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
