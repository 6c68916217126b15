"""What a rank sends of a link: its messages are checked against the plan, and small values put together."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Link, Sizes
from pipec.ir.text import format_link
from pipec.runtime.messages.buffers import Memory
from pipec.runtime.messages.connections import MOST_UNDER_WAY
from pipec.runtime.messages.parcels import Parcel, Parcels


class Outbox:
    """The messages of a link to a peer, of which at most ``MOST_UNDER_WAY`` leave at a time."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link, self._parcels, self._device = link, Parcels(link), device
        self._packings = deque(Packing(self._memory(0)) for _ in range(MOST_UNDER_WAY + 1))

    def held(self) -> list[Tensor]:
        """The memory that stays."""
        return [packing.memory.whole for packing in self._packings]

    def messages(self, tensors: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """The values of the link as they are sent, where the names in their shapes stand for ``sizes``.

        Raises:
            ExecutionError: a value is not what the receiver has prepared memory for.
        """
        parcels = self._parcels.of(sizes)
        check_values(self._link, parcels, tensors)
        return [self._message(parcel, tensors) for parcel in parcels if parcel.num_bytes]

    def _message(self, parcel: Parcel, tensors: Sequence[Tensor]) -> Tensor:
        """A tensor that torch marked as the conjugate, or the negative, of its memory is written out."""
        if parcel.is_alone:
            return tensors[parcel.places[0].number].resolve_conj().resolve_neg().contiguous()
        packing = self._packings.popleft()
        if packing.memory.num_bytes < parcel.num_bytes:
            packing = Packing(self._memory(parcel.num_bytes))
        self._packings.append(packing)
        packing.pack(parcel, tensors)
        return packing.memory.message(parcel)

    def _memory(self, num_bytes: int) -> Memory:
        return Memory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))


class Packing:
    """Memory in which values of a link are put together, time after time."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self._parcel = memory, Parcel((), 0)
        self._values: Sequence[Tensor] = ()

    def pack(self, parcel: Parcel, tensors: Sequence[Tensor]) -> None:
        """Copy the values of a parcel here."""
        if parcel is not self._parcel:
            self._parcel, self._values = parcel, self.memory.values(parcel)
        for place, value in zip(parcel.places, self._values, strict=True):
            value.copy_(tensors[place.number])


def check_values(link: Link, parcels: Sequence[Parcel], tensors: Sequence[Tensor]) -> None:
    """Check that the values of a link are what its receiver has prepared memory for.

    Raises:
        ExecutionError: one is not.
    """
    for parcel in parcels:
        for place in parcel.places:
            if not place.holds(tensor := tensors[place.number]):
                raise ExecutionError(
                    f"{format_link(link)}: {link.values[place.number].name} is a tensor of "
                    f"{tensor.dtype} with shape {tuple(tensor.shape)}, but the plan has {place.dtype} "
                    f"with shape {place.shape}: an operator makes something else than when the model was "
                    "captured; see what the fake implementations of custom operators return"
                )
