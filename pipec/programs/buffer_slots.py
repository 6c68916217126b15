"""Buffer slots: the receive buffer of each message."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints, compact, equal_groups, taken


def with_slots(
    columns: InstructionColumns, buffered: NDArray[np.bool_], stages_of_link: Mapping[int, Sequence[int]]
) -> InstructionColumns:
    """A program with the slots of its receives and moves.

    ``buffered[number]`` says whether the messages of a link need a slot; its last entry is for no link.
    ``stages_of_link`` has what ``holding_stages`` returns.

    A buffer is live from its receive until its stage, and every stage of the rank that gets its values from
    there, has freed the microbatch. A link has as many slots as it ever has live buffers at once. A message
    goes into the slot that has been free for longest. For example, with two microbatches live at once::

        recv mb 0   recv mb 1   free mb 0   recv mb 2   free mb 1   recv mb 3
        slot 0      slot 1                  slot 0                  slot 1
    """
    ops, stages, microbatches, links = columns.columns[:4]
    slots = np.full(len(columns), -1, np.int32)
    numbers = np.flatnonzero((ops == OP_CODE[Op.RECV]) | (ops == OP_CODE[Op.MOVE]))
    numbers = numbers[buffered[taken(links, numbers)]]
    frees = np.flatnonzero(ops == OP_CODE[Op.FREE])
    for group in equal_groups(taken(links, numbers)):
        received = numbers[group]
        reading_stages = stages_of_link.get(int(links[received[0]]), stages[received[:1]])
        reads = np.zeros(int(stages.max()) + 1, bool)
        reads[reading_stages] = True
        own = frees[reads[stages[frees]]]
        freed = np.empty(int(microbatches.max()) + 1, np.int64)
        freed[microbatches[own]] = own
        slots[received] = _assign_slots(received, freed[microbatches[received]])
    return InstructionColumns((*columns.columns[:5], compact(slots), *columns.columns[6:]), columns.links)


def _assign_slots(received: Ints, freed: Ints) -> Ints:
    """The slots of messages received at ``received``, ascending, and freed at ``freed``."""
    count = np.arange(received.size)
    order_of_frees = np.argsort(freed, kind="stable")
    depth = int((count + 1 - np.searchsorted(freed[order_of_frees], received)).max())
    slots_of_messages = count.copy()
    slots_of_messages[depth:] = order_of_frees[: max(received.size - depth, 0)]
    while (slots_of_messages >= depth).any():
        slots_of_messages = slots_of_messages[slots_of_messages]
    return slots_of_messages
