"""How the parameters of a stage are divided among its replicas: a flat buffer, cut into equal slices.

Each replica owns one slice. Elementwise optimizers update any part of a tensor, so ``shard_evenly`` may cut
tensors; for other optimizers ``shard_whole_tensors`` cuts none. Either way one reduce-scatter of the buffer
gives each replica its gradients, and one all-gather the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 64
"""Tensors begin and slices end at multiples of this number of elements, for vectorized kernels.

Kernels then group the elements of a tensor equally wherever it is cut, so an update has the same bits as the
update of the whole tensor: in bfloat16 torch rounds single elements differently from vectors of them. It
processes two vectors at a time, and a vector has at most 32 elements.
"""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Elements ``start`` to ``stop`` of a parameter, flattened row by row."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parameters of one dtype in a flat buffer of ``num_replicas`` slices with ``width`` elements each.

    Parameter ``names[i]`` has ``sizes[i]`` elements and begins at ``offsets[i]`` of the buffer. The elements
    between parameters and after the last one are padding.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    width: int
    num_replicas: int

    def shards_of(self, replica: int) -> tuple[ParameterShard, ...]:
        """The shards of a replica: at most one of each parameter."""
        every = range(len(self.names))
        return tuple(self._piece(index, replica) for index in every if replica in self._replicas(index))

    def owners(self, name: str) -> dict[int, ParameterShard]:
        """The shard of a parameter that each of its owners has, by replica."""
        index = self.names.index(name)
        return {replica: self._piece(index, replica) for replica in self._replicas(index)}

    def position(self, piece: ParameterShard) -> int:
        """The offset of a shard in the buffer."""
        return self.offsets[self.names.index(piece.name)] + piece.start

    def _replicas(self, index: int) -> range:
        """The owners of a parameter. An empty one has an owner too."""
        first, last = self.offsets[index], self.offsets[index] + max(self.sizes[index], 1) - 1
        return range(first // self.width, last // self.width + 1)

    def _piece(self, index: int, replica: int) -> ParameterShard:
        before = replica * self.width - self.offsets[index]
        return ParameterShard(self.names[index], max(before, 0), min(before + self.width, self.sizes[index]))


def shard_evenly(sizes: Mapping[str, int], num_replicas: int) -> Sharding:
    """Parameters one after the other, cut wherever a slice ends."""
    *offsets, total = accumulate(map(_padded_size, sizes.values()), initial=0)
    width = _padded_size(-(-total // num_replicas))
    return Sharding(tuple(sizes), tuple(sizes.values()), tuple(offsets), width, num_replicas)


def shard_whole_tensors(sizes: Mapping[str, int], num_replicas: int) -> Sharding:
    """Each parameter in one slice: the largest first, always to the emptiest replica (Graham's LPT)."""
    loads = [0] * num_replicas
    replicas: dict[str, int] = {}
    starts: dict[str, int] = {}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        replica = replicas[name] = loads.index(min(loads))
        starts[name] = loads[replica]
        loads[replica] += _padded_size(sizes[name])
    width = max(loads)
    offsets = {name: replicas[name] * width + starts[name] for name in sizes}
    names = sorted(sizes, key=offsets.__getitem__)
    return Sharding(
        tuple(names),
        tuple(sizes[name] for name in names),
        tuple(offsets[name] for name in names),
        width,
        num_replicas,
    )


def _padded_size(size: int) -> int:
    """The number of elements of a tensor in the buffer, with padding. An empty tensor takes space, too."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT
